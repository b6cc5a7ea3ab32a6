"""Typed decoding of rows: a msgspec type, or one error that names the rule, the value and the line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvfold.traces.errors import BadTraceError

#: A count of tokens as recorded; 1e9 is far above any context window: more is a wrong unit or a wrong column.
Tokens = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
#: As Tokens, where none makes no sense.
SomeTokens = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
#: A duration or an offset; the bounds also refuse NaN and infinity. 1e11 s is 3,000 years.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
#: An opaque block identity, kept in all of its 63 bits.
BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

UTF8_BOM = b"\xef\xbb\xbf"
_MEND = "correct the row or remove it"

T = TypeVar("T")


def decode_json(decoder: msgspec.json.Decoder[T], data: bytes, source: str, line: int) -> T:
    """One JSON value that starts on line ``line`` of ``source``; raises BadTraceError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError:  # a number that fits no type
            value = None
        raise BadTraceError(_rule(error, value), f"{source}:{line}", _MEND) from None
    except RecursionError:
        raise BadTraceError("JSON must not be nested without end", f"{source}:{line}", _MEND) from None
    except msgspec.DecodeError as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        before = data[: int(at[1])] if at else data.rstrip()
        rule = f"a row must be one whole JSON object: {error}"
        raise BadTraceError(rule, f"{source}:{line + before.count(10)}", _MEND) from None


def convert_row(row: Mapping[str, Any], kind: type[T], place: str) -> T:
    """A row of text or plain values as ``kind``; text is read as the number that the field wants."""
    try:
        return msgspec.convert(row, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadTraceError(_rule(error, row), place, _MEND) from None


def _rule(error: msgspec.ValidationError, value: Any) -> str:
    """msgspec's message names the field but not its value: look the value up by the path in the message."""
    text, _, path = str(error).partition(" - at `$")
    where = path.rstrip("`")
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", where):
        try:
            value = value[key] if key else value[int(index)]
        except (KeyError, IndexError, TypeError):
            value = {}
    got = "" if not where or isinstance(value, dict | list) or "got" in text else f", got {value!r}"
    field = f"{where.lstrip('.')}: " if where else ""
    return f"{field}{text[:1].lower()}{text[1:].replace('`', '')}{got}"
