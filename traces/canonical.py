"""Canonical trace files: JSONL (the header is the first object), CSV (first ``#`` line), Parquet (metadata).

A flat file needs no header, only ``arrival_time_s``, ``input_tokens`` and ``output_tokens`` (-1: unknown).
Writing and reading back gives the same columns, bit for bit. Only Parquet imports pyarrow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from kvfold.traces import canonical_csv, canonical_parquet
from kvfold.traces.batch import Batch, numbered
from kvfold.traces.decode import UTF8_BOM, decode_json, decode_lines
from kvfold.traces.gather import gather
from kvfold.traces.row import MARK, Header, Row, batch_of, batches_of, header_of, rows_of
from kvfold.traces.table import Trace

#: Endings of the three containers.
SUFFIXES = (".jsonl", ".csv", ".parquet")


def read(stream: BinaryIO, source: str) -> Trace:
    """A canonical file in any of its three containers, told apart by content. Raises BadTraceError."""
    header, rows = batches(stream, source)
    return gather(rows, header, source)


def batches(stream: BinaryIO, source: str) -> tuple[Header, Iterator[Batch]]:
    """What the file says of itself, and its rows a few thousand at a time. Both raise BadTraceError."""
    head = stream.read(4)
    stream.seek(0)
    if head == canonical_parquet.MAGIC:
        header, rows = canonical_parquet.batches(stream, source)
    elif head.removeprefix(UTF8_BOM)[:1] == b"{":
        header, rows = _jsonl_batches(stream, source)
    else:
        header, rows = canonical_csv.batches(stream, source)
    return header, rows if header.rows is not None else map(_own_line, rows)


def write(trace: Trace, path: Path) -> None:
    """Write ``.jsonl``, ``.csv`` or ``.parquet``; the file appears whole or not at all.

    Raises ValueError for another ending, before anything is written.
    """
    used = {name for batch in batches_of(trace) for name in batch.used}
    write_batches(batches_of(trace), header_of(trace.meta), used, path)


def write_batches(batches: Iterable[Batch], header: Header, used: Iterable[str], path: Path) -> None:
    """As ``write``; ``used`` names the columns that the batches have, lists too."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a trace file must end in {', '.join(SUFFIXES)}, got {path.name}")
    writers = dict(zip(SUFFIXES, (_write_jsonl, canonical_csv.write, canonical_parquet.write), strict=True))
    with whole_file(path) as file:
        writers[path.suffix](batches, header, set(used), file)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that appears as ``path`` when all of it is on disk; after an error nothing is left of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _jsonl_batches(stream: BinaryIO, source: str) -> tuple[Header, Iterator[Batch]]:
    first = stream.readline().removeprefix(UTF8_BOM).strip()
    headed = MARK in first
    header = decode_json(msgspec.json.Decoder(Header), first, source, 1) if headed else Header(kvfold_trace=1)
    if not headed:
        stream.seek(0)
    decoder = msgspec.json.Decoder(Row)
    return header, (
        batch_of(decode_lines(decoder, lines, numbers, source), numbers, source)
        for numbers, lines in numbered(stream, 1 + headed)
    )


def _own_line(batch: Batch) -> Batch:
    """Not written by kvfold: where a row names no source, its own line is it."""
    given = batch.columns.get("source_row", np.full(len(batch), -1))
    batch.columns["source_row"] = np.where(given < 0, batch.lines, given)
    return batch


def _write_jsonl(batches: Iterable[Batch], header: Header, used: Iterable[str], file: BinaryIO) -> None:
    encoder = msgspec.json.Encoder()
    file.write(encoder.encode(header) + b"\n")
    for batch in batches:
        file.write(encoder.encode_lines(list(rows_of(batch))))
