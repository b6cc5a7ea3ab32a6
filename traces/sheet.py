"""Rows of a flat file as (line, {column: value}): CSV with a header, one JSON object a line, or Parquet."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from kvfold.traces.canonical_parquet import MAGIC as PARQUET_MAGIC
from kvfold.traces.decode import UTF8_BOM, decode_json
from kvfold.traces.errors import BadTraceError

Row = tuple[int, dict[str, Any]]


def sheet(stream: BinaryIO, source: str) -> Iterator[Row]:
    """The rows of a file in any of the three containers, told apart by its first bytes.

    Cells that are empty or null are left out, so that unknown is never taken for 0. Raises BadTraceError.
    """
    head = stream.read(len(UTF8_BOM) + 1)
    stream.seek(0)
    if head.startswith(PARQUET_MAGIC):
        return parquet_rows(stream, source)
    return (json_rows if head.removeprefix(UTF8_BOM)[:1] == b"{" else csv_rows)(stream, source)


def json_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the lines that hold something, without a byte-order mark."""
    for number, raw in enumerate(lines, 1):
        line = (raw.removeprefix(UTF8_BOM) if number == 1 else raw).strip()
        if line:
            yield number, line


def json_rows(lines: Iterable[bytes], source: str) -> Iterator[Row]:
    """Rows of a JSONL file; null values are left out. Raises BadTraceError."""
    decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
    for number, line in json_lines(lines):
        row = decode_json(decoder, line, source, number)
        yield number, {name: value for name, value in row.items() if value is not None}


def csv_rows(lines: Iterable[bytes], source: str) -> Iterator[Row]:
    """Rows of a CSV file as text; empty cells are left out. Raises BadTraceError."""
    reader = csv.reader(_text(lines, source), strict=True)
    names: list[str] = []
    try:
        for cells in reader:
            place = f"{source}:{reader.line_num}"
            if not names:
                names = [cell.strip() for cell in cells]
                twice = [name for name, times in Counter(names).items() if times > 1]
                if twice:
                    rule = f"a column must stand once in the header, got {twice[0]!r} twice"
                    raise BadTraceError(rule, place, "rename one of them")
            elif cells:
                if len(cells) != len(names):
                    rule = f"a row must have {len(names)} cells as the header has, got {len(cells)}"
                    raise BadTraceError(rule, place, "correct or remove the row")
                yield reader.line_num, {n: c for n, c in zip(names, cells, strict=True) if c}
    except csv.Error as error:
        place = f"{source}:{reader.line_num}"
        raise BadTraceError(f"a row must be valid CSV: {error}", place, "correct the quoting") from None


def parquet_rows(stream: BinaryIO, source: str) -> Iterator[Row]:
    """Rows of a Parquet file, one row group in memory at a time; nulls are left out. Raises BadTraceError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(stream).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, {name: value for name, value in row.items() if value is not None}
    except (pa.ArrowException, OSError, ValueError) as error:
        rule = f"a Parquet file must be whole: {str(error).splitlines()[0]}"
        raise BadTraceError(rule, source, "restore the file") from None


def header_of(line: bytes) -> list[str]:
    """Column names in the first line of a CSV file; empty if it is none."""
    try:
        return [
            name.strip() for name in next(csv.reader([line.removeprefix(UTF8_BOM).decode()], strict=True), [])
        ]
    except (UnicodeDecodeError, csv.Error):
        return []


def _text(lines: Iterable[bytes], source: str) -> Iterator[str]:
    for number, raw in enumerate(lines, 1):
        try:
            yield (raw.removeprefix(UTF8_BOM) if number == 1 else raw).decode()
        except UnicodeDecodeError as error:
            rule = f"text must be UTF-8, got {error.reason}"
            raise BadTraceError(rule, f"{source}:{number}", "save the file as UTF-8") from None
