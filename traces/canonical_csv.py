"""The canonical table as CSV: the header object in a first ``#`` line, then one row a call.

Lists are written with spaces between their items. A text that a spreadsheet would take for a formula gets an
apostrophe in front, and loses it when it is read.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from kvfold.traces.batch import ROWS, Batch
from kvfold.traces.columns import TEXTS
from kvfold.traces.decode import UTF8_BOM, convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.row import NEEDED, Header, Row, batch_of, rows_of
from kvfold.traces.unpack import LONGEST_LINE_BYTES

_LISTS = ("new_block_ids", "parents")
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def batches(stream: BinaryIO, source: str) -> tuple[Header, Iterator[Batch]]:
    """What the file says of itself, and its rows a few thousand at a time. Both raise BadTraceError."""
    first = stream.readline().removeprefix(UTF8_BOM)
    above = int(first.startswith(b"#"))  # lines above those that the CSV reader counts
    header = Header(kvfold_trace=1)
    if above:
        header = decode_json(msgspec.json.Decoder(Header), first[1:].strip(), source, 1)
    else:
        stream.seek(0)
    return header, _batches(_decoded(stream, source, 1 + above), source, above)


def write(batches: Iterable[Batch], header: Header, used: Iterable[str], file: BinaryIO) -> None:
    """All rows to ``file``, with the columns of ``used``."""
    file.write(b"# " + msgspec.json.encode(header) + b"\n")
    names = [name for name in Row.__struct_fields__ if name in {*used, *NEEDED}]
    text = io.StringIO()
    plain = csv.writer(text, lineterminator="\n")
    # a carriage return alone is not quoted otherwise
    quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    plain.writerow(names)
    for batch in batches:
        for row in map(msgspec.to_builtins, rows_of(batch)):  # without the fields that hold their default
            row |= {name: " ".join(map(str, row[name])) for name in _LISTS if name in row}
            row |= {name: _guarded(row[name]) for name in TEXTS if name in row}
            writer = quoted if any("\r" in row.get(name, "") for name in TEXTS) else plain
            writer.writerow([row.get(name, "") for name in names])
        file.write(text.getvalue().encode())
        text.seek(0)
        text.truncate()


def _batches(texts: Iterator[str], source: str, above: int) -> Iterator[Batch]:
    names: list[str] = []
    rows: list[Row] = []
    numbers: list[int] = []
    reader = csv.reader(texts, strict=True)
    for cells in _cells(reader, source, above):
        number = reader.line_num + above
        if not names:
            names = _names(cells, f"{source}:{number}")
            continue
        if len(cells) != len(names):
            rule = f"a row must have {len(names)} cells as the header has, got {len(cells)}"
            raise BadTraceError(rule, f"{source}:{number}", "correct or remove the row")
        row: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
        row |= {name: row[name].split() for name in _LISTS if name in row}
        row |= {name: _plain(row[name]) for name in TEXTS if name in row}
        rows.append(convert_row(row, Row, f"{source}:{number}"))
        numbers.append(number)
        if len(rows) == ROWS:
            yield batch_of(rows, numbers, source)
            rows, numbers = [], []
    if rows:
        yield batch_of(rows, numbers, source)


def _cells(reader: Any, source: str, above: int) -> Iterator[list[str]]:
    """Rows with cells in them; the module's limit on a cell, which is the process's, is raised while reading."""
    while True:
        limit = csv.field_size_limit(LONGEST_LINE_BYTES)
        try:
            cells = next(reader, None)
        except csv.Error as error:
            place = f"{source}:{reader.line_num + above}"
            raise BadTraceError(f"a row must be valid CSV: {error}", place, "correct the quoting") from None
        finally:
            csv.field_size_limit(limit)
        if cells is None:
            return
        if cells:
            yield cells


def _names(cells: list[str], place: str) -> list[str]:
    if missing := [name for name in NEEDED if name not in cells]:
        rule = f"the columns must include {', '.join(NEEDED)}; {', '.join(missing)} is missing"
        raise BadTraceError(rule, place, "add it (output_tokens: -1 where unknown)")
    if repeated := [name for name in cells if cells.count(name) > 1]:
        raise BadTraceError(f"a column may stand once, got {repeated[0]!r} twice", place, "remove one")
    return cells


def _guarded(text: str) -> str:
    return "'" + text if _FORMULA.match(text) else text


def _plain(text: str) -> str:
    return text[1:] if text[:1] == "'" and _FORMULA.match(text) else text


def _decoded(lines: Iterable[bytes], source: str, first: int) -> Iterator[str]:
    for number, raw in enumerate(lines, first):
        line = raw.removeprefix(UTF8_BOM) if number == 1 else raw
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            rule = f"text must be UTF-8, got {error.reason}"
            raise BadTraceError(rule, f"{source}:{number}", "save the file as UTF-8") from None
