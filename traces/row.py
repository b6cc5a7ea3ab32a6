"""The canonical row: one LLM call as it stands on disk in JSONL, CSV and Parquet.

The fields are the columns of ``Trace``, with ``new_block_ids`` and ``parents`` written out in the row. A field
that is left out is unknown (or has the default below). ``parents`` holds ``id:wait_s:kind``, the wait empty
where it is unknown; it may be left out where ``parent_request_id``, ``wait_before_s`` and ``wait_kind`` say it
all. ``request_id`` may be left out where it is the row's position in the file, counted from 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from math import isnan, nan
from operator import attrgetter
from pathlib import PurePath
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kvfold.traces.batch import ROWS, Batch, runs
from kvfold.traces.columns import DEFAULTS, KIND, TEXTS
from kvfold.traces.decode import BlockId, Seconds, Tokens
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import STATUSES, WAIT_KINDS, WAIT_SOURCES, Meta, Trace

_Id = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
_Index = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=-1, le=10**9)]
_Kind = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(WAIT_KINDS)})$")]
_Source = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(WAIT_SOURCES)})$")]
_Status = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(STATUSES)})$")]
_PARENT = re.compile(rf"(\d{{1,18}}):(\d{{1,11}}(?:\.\d+)?(?:e-?\d{{1,3}})?)?:({'|'.join(WAIT_KINDS)})")

#: The key that opens a header.
MARK = b"kvfold_trace"
#: Columns that every file must have.
NEEDED = ("arrival_time_s", "input_tokens", "output_tokens")
#: Fields that are None in a row and NaN in a Trace where unknown.
SECONDS = ("arrival_time_s", "wait_before_s", "recorded_e2e_s", "recorded_ttft_s")
#: Fields that are words in a row and codes in a Trace.
WORDS = {"wait_kind": WAIT_KINDS, "wait_source": WAIT_SOURCES, "status": STATUSES}


class Row(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Unknown fields are refused, so that a misspelt column is not taken for an unknown value."""

    request_id: _Id = -1
    source_id: str = ""
    source_row: _Id = -1
    session_id: _Index = -1
    turn_index: _Index = 0
    agent_id: _Index = 0
    parent_request_id: _Id = -1
    arrival_time_s: Seconds | None = None
    wait_before_s: Seconds | None = None
    wait_kind: _Kind = "none"
    wait_source: _Source = "none"
    input_tokens: Tokens
    output_tokens: _Count
    reasoning_tokens: _Count = -1
    recorded_cached_tokens: _Count = -1
    shared_parent: _Id = -1
    shared_blocks: Tokens = 0
    new_block_ids: list[BlockId] = []
    recorded_e2e_s: Seconds | None = None
    recorded_ttft_s: Seconds | None = None
    status: _Status = "unknown"
    model: str = ""
    tenant: str = ""
    tool_names: str = ""
    parents: list[str] = []


#: Fields that hold one value each, with the value that stands for no value.
_PLAIN = {
    name: default
    for name, default in zip(Row.__struct_fields__, Row.__struct_defaults__, strict=True)
    if name not in ("new_block_ids", "parents")
}


class Header(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a canonical file says of itself before its rows. ``rows`` gives away a file that was cut off."""

    kvfold_trace: Literal[1]
    rows: Tokens | None = None
    clock: Literal["common", "session"] = "common"
    time_zone: str = ""
    prompt_semantics: Literal["whole"] = "whole"
    block_size_tokens: Tokens = 0
    hash_scope: Annotated[str, msgspec.Meta(pattern="^(none|global|session)$")] = "none"
    warnings: list[str] = []


def header_of(meta: Meta) -> Header:
    """The header to write before the rows of a trace; it says from where a converted one comes."""
    warnings = list(meta.warnings)
    if meta.format != "canonical":
        drops = "".join(f", {count:,} dropped for {reason}" for reason, count in meta.drops.items())
        rows = f"{meta.rows_read:,} rows read, {meta.rows_kept:,} kept{drops}"
        sha256 = f", sha256 {meta.sha256}" if meta.sha256 else ""
        warnings.insert(0, f"converted from {meta.format} {PurePath(meta.source).name}: {rows}{sha256}")
    return Header(
        kvfold_trace=1,
        rows=meta.rows_kept,
        clock="session" if meta.clock == "session" else "common",
        time_zone=meta.time_zone,
        block_size_tokens=meta.block_size_tokens,
        hash_scope=meta.hash_scope,
        warnings=warnings,
    )


def batches_of(trace: Trace) -> Iterator[Batch]:
    """The rows of ``trace`` in order, ROWS at a time; read back with ``header_of`` they give its columns."""
    edge_of = np.searchsorted(trace.edge_child, np.arange(len(trace) + 1))
    for start in range(0, len(trace), ROWS):
        rows = slice(start, min(start + ROWS, len(trace)))
        columns: dict[str, Any] = {}
        for name in _PLAIN.keys() - {"request_id"}:
            values = getattr(trace, name)[rows]
            if isinstance(values, list):
                known = any(values)
            else:
                known = not (np.isnan(values) if name in SECONDS else values == DEFAULTS[name][1]).all()
            if known:
                columns[name] = values
        links = slice(edge_of[rows.start], edge_of[rows.stop])
        yield Batch(
            lines=np.arange(rows.start, rows.stop),
            columns=columns,
            new_blocks=trace.new_blocks[rows],
            new_block_ids=runs(trace.block_ids, trace.new_block_start[rows], trace.new_blocks[rows]),
            link_child=trace.edge_child[links] - rows.start,
            link_parent=trace.edge_parent[links],
            link_wait_s=trace.edge_wait_s[links],
            link_kind=trace.edge_wait_kind[links].astype(np.int64),
        )


def rows_of(batch: Batch) -> Iterator[Row]:
    """The rows of one batch, as they are written."""
    columns: dict[str, list[Any]] = {}
    for name, values in batch.columns.items():
        plain = values if isinstance(values, list) else values.tolist()
        if name in WORDS:
            plain = [WORDS[name][code] for code in plain]
        elif name in SECONDS:
            plain = [None if isnan(value) else value for value in plain]
        columns[name] = plain
    ends = [0] * len(batch) if batch.new_blocks is None else np.cumsum(batch.new_blocks).tolist()
    edges = zip(batch.link_parent.tolist(), batch.link_wait_s.tolist(), batch.link_kind.tolist(), strict=True)
    links = [_text(*edge) for edge in edges]
    first_link = np.searchsorted(batch.link_child, np.arange(len(batch) + 1)).tolist()
    columns.setdefault("output_tokens", [-1] * len(batch))
    start = 0
    for at, end in enumerate(ends):
        row = Row(**{name: column[at] for name, column in columns.items()})
        row.new_block_ids = batch.new_block_ids[start:end].tolist()
        parents = links[first_link[at] : first_link[at + 1]]
        if parents != [_text(*link) for link in links_of(row, "")]:
            row.parents = parents
        yield row
        start = end


def batch_of(rows: Sequence[Row], lines: Sequence[int], source: str) -> Batch:
    """The columns of ``rows``, which stand on ``lines`` of ``source``. Raises BadTraceError."""
    columns: dict[str, Any] = {}
    for name, default in _PLAIN.items():
        values = list(map(attrgetter(name), rows))
        if values.count(default) == len(rows):
            continue
        if name in TEXTS:
            columns[name] = list(map(sys.intern, values))
        elif name in WORDS:
            columns[name] = np.fromiter(map(WORDS[name].index, values), np.int8, len(rows))
        else:
            columns[name] = np.array(values, DEFAULTS.get(name, (np.int64, -1))[0])  # None becomes NaN
    batch = Batch(np.array(lines, np.int64), columns)
    if any(row.new_block_ids for row in rows):
        batch.new_blocks = np.fromiter((len(row.new_block_ids) for row in rows), np.int64, len(rows))
        ids = chain.from_iterable(row.new_block_ids for row in rows)
        batch.new_block_ids = np.fromiter(ids, np.int64, int(batch.new_blocks.sum()))
    if "parent_request_id" in columns or any(row.parents for row in rows):
        links = [
            (child, *link)
            for child, (row, line) in enumerate(zip(rows, lines, strict=True))
            for link in links_of(row, f"{source}:{line}")
        ]
        child, parent, wait_s, kind = zip(*links, strict=True) if links else ((), (), (), ())
        batch.link_child, batch.link_parent = np.array(child, np.int64), np.array(parent, np.int64)
        batch.link_wait_s, batch.link_kind = np.array(wait_s, np.float64), np.array(kind, np.int64)
    return batch


def links_of(row: Row, place: str) -> list[tuple[int, float, int]]:
    """(parent id, wait_s or NaN, code of the wait's kind) of each parent. Raises BadTraceError."""
    if not row.parents:
        wait_s = nan if row.wait_before_s is None else row.wait_before_s
        return [] if row.parent_request_id < 0 else [(row.parent_request_id, wait_s, KIND[row.wait_kind])]
    links = []
    for text in row.parents:
        match = _PARENT.fullmatch(text)
        if match is None:
            rule = f"a parent must be id:wait_s:kind with a kind of {', '.join(WAIT_KINDS)}, got {text!r}"
            raise BadTraceError(rule, place, "correct it; leave the wait empty where it is unknown")
        links.append((int(match[1]), float(match[2]) if match[2] else nan, KIND[match[3]]))
    if row.parent_request_id not in (-1, links[0][0]):
        rule = (
            f"parent_request_id must be the first of parents, got {row.parent_request_id} and {links[0][0]}"
        )
        raise BadTraceError(rule, place, "leave parent_request_id out or put it first")
    return links


def _text(parent: int, wait_s: float, kind: int) -> str:
    return f"{parent}:{'' if isnan(wait_s) else repr(wait_s)}:{WAIT_KINDS[kind]}"
