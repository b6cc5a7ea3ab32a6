"""Mooncake traces (FAST'25 release): JSONL, integer milliseconds, global ids of chained 512-token blocks.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces. The last block of a prompt may be partial and
has an id. There are no session ids; turns are not inferred here, so every call is single-shot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated

import msgspec
import numpy as np

from kvfold.traces.batch import Batch, numbered
from kvfold.traces.columns import assemble, by_arrival
from kvfold.traces.decode import BlockId, Tokens, decode_lines
from kvfold.traces.delta import delta_columns
from kvfold.traces.errors import BadTraceError
from kvfold.traces.gather import Places, Table
from kvfold.traces.prefix import partial_last
from kvfold.traces.table import Meta, Trace

BLOCK_TOKENS = 512
NO_SESSIONS = "no session ids: every call is single-shot, turns are not inferred"


class _Row(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Unknown fields are refused: near-twins of this format have other blocks (16) or hold deltas."""

    timestamp: Annotated[int, msgspec.Meta(ge=0, le=10**14)]  # ms, from any origin
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]


def batches(lines: Iterable[bytes], source: str) -> Iterator[Batch]:
    """The rows of one file as they stand, with their ``stamp`` in ms. Raises BadTraceError."""
    decoder = msgspec.json.Decoder(_Row)
    for numbers, texts in numbered(lines):
        rows = decode_lines(decoder, texts, numbers, source)
        blocks = np.array([len(row.hash_ids) for row in rows], np.int64)
        ids = chain.from_iterable(row.hash_ids for row in rows)
        columns = {
            "stamp": np.array([row.timestamp for row in rows], np.int64),
            "input_tokens": np.array([row.input_length for row in rows], np.int64),
            "output_tokens": np.array([row.output_length for row in rows], np.int64),
        }
        places = np.array(numbers, np.int64)
        yield Batch(places, columns, blocks, np.fromiter(ids, np.int64, int(blocks.sum())))


def read(lines: Iterable[bytes], source: str) -> Trace:
    """The rows of one file; arrivals count from the earliest row. Raises BadTraceError.

    Exact duplicates are real traffic and stay. Rows of one millisecond keep the order of the file.
    """
    table = Table(batches(lines, source))
    kept = np.flatnonzero(table.columns.get("input_tokens", ()))
    if not kept.size:
        raise BadTraceError(
            "a trace must have rows, got none with a prompt", source, "check that the file is whole"
        )
    stamps_ms = table.columns["stamp"][kept]
    arrival_time_s = (stamps_ms - stamps_ms.min()) / 1e3
    order = by_arrival(arrival_time_s)
    late = int((np.diff(stamps_ms) < 0).sum())
    rows = kept[order]
    places = Places(source, table.lines[rows])
    input_tokens = table.columns["input_tokens"][rows]
    columns = delta_columns(*table.chains(rows), places) | {
        "source_row": table.lines[rows],
        "arrival_time_s": arrival_time_s[order],
        "input_tokens": input_tokens,
        "output_tokens": table.columns["output_tokens"][rows],
    }
    read_rows = len(table.lines)
    meta = Meta(
        format="mooncake",
        source=source,
        sha256="",
        time_unit="ms",
        block_size_tokens=BLOCK_TOKENS,
        partial_last=partial_last(columns, input_tokens, BLOCK_TOKENS, places),
        hash_scope="global",
        rows_read=read_rows,
        rows_kept=len(rows),
        drops={"zero_input_tokens": read_rows - len(rows)} if read_rows > len(rows) else {},
        warnings=(
            NO_SESSIONS,
            *((f"{late:,} rows stood before an earlier one: sorted by arrival",) if late else ()),
        ),
    )
    return assemble(meta, columns)
