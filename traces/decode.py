"""Typed decoding of rows: a msgspec type, or one error that names the rule, the value and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
#: Every key of an object matches, and so may a text that holds an escaped quote: never fewer than the keys.
_KEY = re.compile(rb'"\s*:')
_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])

T = TypeVar("T")


class _RepeatedKeyError(Exception):
    pass


def decode_json(decoder: msgspec.json.Decoder[T], data: bytes, source: str, line: int) -> T:
    """One JSON value that starts on line ``line`` of ``source``, no key twice; raises BadTraceError."""
    try:
        value = decoder.decode(data)
        if len(_KEY.findall(data)) != _distinct_keys(data):
            json.loads(data.decode(), object_pairs_hook=_unique, parse_int=str, parse_float=str)
        return value
    except msgspec.ValidationError as error:
        try:
            plain = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):  # such as a number that fits no type
            plain = None
        raise BadTraceError(_rule(error, plain), f"{source}:{line}", _MEND) from None
    except RecursionError:
        raise BadTraceError("JSON must not be nested without end", f"{source}:{line}", _MEND) from None
    except UnicodeDecodeError as error:  # in a value that the decoder has not looked into
        place = f"{source}:{line + data[: error.start].count(10)}"
        raise BadTraceError(
            f"text must be UTF-8, got {error.reason}", place, "save the file as UTF-8"
        ) from None
    except _RepeatedKeyError as error:
        raise BadTraceError(f"a key may stand once, got {error} twice", f"{source}:{line}", _MEND) from None
    except msgspec.DecodeError as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        before = data[: int(at[1])] if at else data.rstrip()
        rule = f"a row must be one whole JSON object: {error}"
        raise BadTraceError(rule, f"{source}:{line + before.count(10)}", _MEND) from None


def decode_lines(
    decoder: msgspec.json.Decoder[T], lines: Sequence[bytes], numbers: Sequence[int], source: str
) -> list[T]:
    """``decode_json`` of each line, at a third of its cost where all lines are sound and hold flat objects."""
    data = b"\n".join(lines)
    try:
        values = decoder.decode_lines(data)
        if len(values) == len(lines) and len(_KEY.findall(data)) == sum(map(len, _OBJECT.decode_lines(data))):
            return values
    except (msgspec.DecodeError, RecursionError):
        pass
    return [decode_json(decoder, line, source, number) for line, number in zip(lines, numbers, strict=True)]


def convert_row(row: Mapping[str, Any], kind: type[T], place: str) -> T:
    """A row of text or plain values as ``kind``; text is read as the number that the field wants."""
    try:
        return msgspec.convert(row, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadTraceError(_rule(error, row), place, _MEND) from None


def _distinct_keys(data: bytes) -> int:
    """Keys in all objects of sound JSON, where one that stands twice in its object counts once."""
    start = data.lstrip()[:1]
    if start == b"{":
        fields = _OBJECT.decode(data)
        keys, values = len(fields), list(fields.values())
    elif start == b"[":
        keys, values = 0, _LIST.decode(data)
    else:
        return 0
    return keys + sum(_distinct_keys(value) for value in map(bytes, values) if b"{" in value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(repr(next(key for key in keys if keys.count(key) > 1)))
    return fields


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
