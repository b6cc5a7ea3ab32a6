"""Mooncake traces (FAST'25 release): JSONL, integer milliseconds, global ids of chained 512-token blocks.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces. The last block of a prompt may be partial and
has an id. There are no session ids; turns are not inferred here, so every call is single-shot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np

from kvfold.traces.columns import assemble, by_arrival
from kvfold.traces.decode import UTF8_BOM, BlockId, Tokens, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import Chains, partial_last
from kvfold.traces.table import Meta, Trace

BLOCK_TOKENS = 512


class _Row(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Unknown fields are refused: near-twins of this format have other blocks (16) or hold deltas."""

    timestamp: Annotated[int, msgspec.Meta(ge=0, le=10**14)]  # ms, from any origin
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]


def read(lines: Iterable[bytes], source: str) -> Trace:
    """The rows of one file; arrivals count from the earliest row. Raises BadTraceError.

    Exact duplicates are real traffic and stay. Rows of one millisecond keep the order of the file.
    """
    decoder = msgspec.json.Decoder(_Row)
    rows: list[_Row] = []
    numbers: list[int] = []
    read_rows = 0
    for number, raw in enumerate(lines, 1):
        line = raw.removeprefix(UTF8_BOM).strip() if number == 1 else raw.strip()
        if not line:
            continue
        row = decode_json(decoder, line, source, number)
        read_rows += 1
        if row.input_length:
            rows.append(row)
            numbers.append(number)
    if not rows:
        raise BadTraceError(
            "a trace must have rows, got none with a prompt", source, "check that the file is whole"
        )
    stamps_ms = np.array([row.timestamp for row in rows], np.int64)
    arrival_time_s = (stamps_ms - stamps_ms.min()) / 1e3
    order = by_arrival(arrival_time_s)
    late = int((np.diff(stamps_ms) < 0).sum())
    rows = [rows[at] for at in order]
    places = [f"{source}:{numbers[at]}" for at in order]
    chains = Chains()
    for row, place in zip(rows, places, strict=True):
        chains.add(row.hash_ids, place)
    input_tokens = np.array([row.input_length for row in rows], np.int64)
    columns = chains.columns() | {
        "source_row": np.array(numbers)[order],
        "arrival_time_s": arrival_time_s[order],
        "input_tokens": input_tokens,
        "output_tokens": [row.output_length for row in rows],
    }
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
            "no session ids: every call is single-shot, turns are not inferred",
            *((f"{late:,} rows stood before an earlier one: sorted by arrival",) if late else ()),
        ),
    )
    return assemble(meta, columns)
