"""Canonical trace files: JSONL (the header is the first object), CSV (first ``#`` line), Parquet (metadata).

A flat file needs no header, only ``arrival_time_s``, ``input_tokens`` and ``output_tokens`` (-1: unknown).
Writing and reading back gives the same columns, bit for bit. Only the Parquet functions import pyarrow.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvfold.traces.columns import TEXTS
from kvfold.traces.decode import UTF8_BOM, convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.gather import gather
from kvfold.traces.row import SECONDS, WORDS, Header, Row, header_of, rows_of
from kvfold.traces.table import Trace

PARQUET_MAGIC = b"PAR1"
_MARK = b"kvfold_trace"
_LISTS = ("new_block_ids", "parents")
_NEEDED = ("arrival_time_s", "input_tokens", "output_tokens")


def read(stream: BinaryIO, source: str) -> Trace:
    """A canonical file in any of its three containers, told apart by content. Raises BadTraceError."""
    head = stream.read(4)
    stream.seek(0)
    if head == PARQUET_MAGIC:
        return _read_parquet(stream, source)
    return (
        _read_jsonl(stream, source) if head.removeprefix(UTF8_BOM)[:1] == b"{" else _read_csv(stream, source)
    )


def write(trace: Trace, path: Path) -> None:
    """Write ``.jsonl``, ``.csv`` or ``.parquet``; the file appears whole or not at all.

    Raises ValueError for another ending, before anything is written.
    """
    writers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in writers:
        raise ValueError(f"a trace file must end in {', '.join(writers)}, got {path.name}")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.writelines(writers[path.suffix](trace))
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read_jsonl(lines: Iterable[bytes], source: str) -> Trace:
    decoder = msgspec.json.Decoder(Row)
    header = Header(kvfold_trace=1)
    rows: list[Row] = []
    numbers: list[int] = []
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if number == 1:
            line = line.removeprefix(UTF8_BOM)
            if _MARK in line:
                header = decode_json(msgspec.json.Decoder(Header), line, source, 1)
                continue
        if line:
            rows.append(decode_json(decoder, line, source, number))
            numbers.append(number)
    return gather(rows, numbers, header, source)


def _read_csv(lines: Iterable[bytes], source: str) -> Trace:
    header = Header(kvfold_trace=1)
    texts = _decoded(lines, source)
    first = next(texts, "")
    above = int(first.startswith("#"))  # lines above those that the CSV reader counts
    if above:
        header = decode_json(msgspec.json.Decoder(Header), first[1:].strip().encode(), source, 1)
    else:
        texts = chain([first], texts)
    reader = csv.reader(texts, strict=True)
    names: list[str] = []
    rows: list[Row] = []
    numbers: list[int] = []
    try:
        for cells in reader:
            number = reader.line_num + above
            if not names:
                names = cells
                if missing := [name for name in _NEEDED if name not in names]:
                    rule = f"the columns must include {', '.join(_NEEDED)}; {', '.join(missing)} is missing"
                    raise BadTraceError(
                        rule, f"{source}:{number}", "add it (output_tokens: -1 where unknown)"
                    )
            elif cells:
                if len(cells) != len(names):
                    rule = f"a row must have {len(names)} cells as the header has, got {len(cells)}"
                    raise BadTraceError(rule, f"{source}:{number}", "correct or remove the row")
                row: dict[str, Any] = {name: cell for name, cell in zip(names, cells, strict=True) if cell}
                row |= {name: row[name].split() for name in _LISTS if name in row}
                rows.append(convert_row(row, Row, f"{source}:{number}"))
                numbers.append(number)
    except csv.Error as error:
        place = f"{source}:{reader.line_num + above}"
        raise BadTraceError(f"a row must be valid CSV: {error}", place, "correct the quoting") from None
    return gather(rows, numbers, header, source)


def _read_parquet(stream: BinaryIO, source: str) -> Trace:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(stream)
        values = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        rule = f"a Parquet file must be whole: {str(error).splitlines()[0]}"
        raise BadTraceError(rule, source, "restore the file") from None
    mark = (table.schema.metadata or {}).get(_MARK)
    header = decode_json(msgspec.json.Decoder(Header), mark, source, 1) if mark else Header(kvfold_trace=1)
    numbers = range(1, table.num_rows + 1)
    rows = [
        convert_row(
            {name: value for name, value in row.items() if value is not None}, Row, f"{source}:{number}"
        )
        for number, row in zip(numbers, values, strict=True)
    ]
    return gather(rows, numbers, header, source)


def _jsonl(trace: Trace) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    yield encoder.encode(header_of(trace)) + b"\n"
    for row in rows_of(trace):
        yield encoder.encode(row) + b"\n"


def _csv(trace: Trace) -> Iterator[bytes]:
    yield b"# " + msgspec.json.encode(header_of(trace)) + b"\n"
    rows = [msgspec.to_builtins(row) for row in rows_of(trace)]  # without the fields that hold their default
    used = set(_NEEDED).union(*rows)
    names = [name for name in Row.__struct_fields__ if name in used]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        row |= {name: " ".join(map(str, row[name])) for name in _LISTS if name in row}
        writer.writerow([row.get(name, "") for name in names])
    yield text.getvalue().encode()


def _parquet(trace: Trace) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"new_block_ids": pa.list_(pa.int64()), "parents": pa.list_(pa.string())}
    kinds |= dict.fromkeys(SECONDS, pa.float64())
    kinds |= dict.fromkeys((*TEXTS, *WORDS), pa.string())
    rows = list(rows_of(trace))
    table = pa.table(
        {
            name: pa.array([getattr(row, name) for row in rows], kinds.get(name, pa.int64()))
            for name in Row.__struct_fields__
        },
        metadata={_MARK: msgspec.json.encode(header_of(trace))},
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    yield buffer.getvalue()


def _decoded(lines: Iterable[bytes], source: str) -> Iterator[str]:
    for number, raw in enumerate(lines, 1):
        line = raw.removeprefix(UTF8_BOM) if number == 1 else raw
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            rule = f"text must be UTF-8, got {error.reason}"
            raise BadTraceError(rule, f"{source}:{number}", "save the file as UTF-8") from None
