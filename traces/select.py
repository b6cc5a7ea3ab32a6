"""Rows of a trace in another order or without some, with every reference and prefix chain still right."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields, replace
from typing import Any

import numpy as np

from kvfold.traces.columns import KIND, SOURCE, with_warnings
from kvfold.traces.table import Ints, Trace

_CHAIN = ("shared_parent", "shared_blocks", "new_block_start", "new_blocks", "block_ids")


def taken(trace: Trace, rows: Ints) -> Trace:
    """The given rows, in the given order; parents must come before their children.

    Blocks that a row left out brought are brought by the first row left that has them. A call that loses all
    its parents becomes a root at its recorded arrival. ``meta`` stays.
    """
    row_of = np.full(len(trace) + 1, -1, np.int64)  # the last entry maps -1 (none) to itself
    row_of[rows] = np.arange(len(rows))
    child, parent = row_of[trace.edge_child], row_of[trace.edge_parent]
    edges = np.flatnonzero((child >= 0) & (parent >= 0))
    edges = edges[np.argsort(child[edges], kind="stable")]
    columns: dict[str, Any] = {}
    for column in fields(trace):
        values = getattr(trace, column.name)
        if isinstance(values, list):
            columns[column.name] = [values[row] for row in rows.tolist()]
        elif column.name.startswith("edge_"):
            columns[column.name] = values[edges]
        elif column.name not in ("meta", *_CHAIN):
            columns[column.name] = values[rows]
    columns |= _chains(trace, rows)
    columns |= {"edge_child": child[edges], "edge_parent": parent[edges]}
    columns["parent_request_id"] = row_of[columns["parent_request_id"]]
    # a root has no wait; a call whose first parent alone is gone still waits for the others
    had_parent = trace.parent_request_id[rows] >= 0
    lost = had_parent & (columns["parent_request_id"] < 0)
    left = np.full(len(rows), -1, np.int64)
    left[columns["edge_child"][::-1]] = columns["edge_parent"][::-1]
    columns["parent_request_id"] = np.where(lost, left, columns["parent_request_id"])
    root = lost & (left < 0)
    for name, value in (
        ("wait_before_s", np.nan),
        ("wait_kind", KIND["none"]),
        ("wait_source", SOURCE["none"]),
    ):
        columns[name] = np.where(root, value, columns[name]).astype(columns[name].dtype)
    return replace(trace, **columns)


def orphans(trace: Trace, rows: Ints) -> int:
    """Calls among ``rows`` all of whose parents are not: `taken` makes them roots."""
    kept = np.zeros(len(trace), bool)
    kept[rows] = True
    fed = np.zeros(len(trace), bool)
    fed[trace.edge_child] = True
    still = np.zeros(len(trace), bool)
    still[trace.edge_child[kept[trace.edge_parent]]] = True
    return int((kept & fed & ~still).sum())


def kept_rows(trace: Trace, rows: Ints, reason: str, text: str) -> tuple[Trace, str]:
    """The rows in trace order; the others are counted in the drops under ``reason``, and ``text`` in a warning.

    Raises ValueError where no row is left.
    """
    if not len(rows):
        raise ValueError(f"{text}: no call is left of {len(trace):,}")
    lost = orphans(trace, rows)
    dropped = len(trace) - len(rows)
    text = f"{text}: kept {len(rows):,} calls, dropped {dropped:,}"
    if lost:
        text += f"; {lost:,} calls lost the call that they follow and arrive when recorded"
    drops = trace.meta.drops
    if dropped:
        drops = drops | {reason: drops.get(reason, 0) + dropped}
    chosen = taken(trace, rows)
    meta = replace(trace.meta, rows_kept=len(rows), drops=drops)
    return with_warnings(replace(chosen, meta=meta), text), text


def _chains(trace: Trace, rows: Ints) -> dict[str, Any]:
    """The delta columns of the rows.

    Every block stands in the run of new blocks of one row of ``trace``. Of each run a beginning is known to
    the rows so far: ``reach`` says how far each of them got, so that the one to share with can be named.
    """
    shared_parent, shared_blocks = trace.shared_parent.tolist(), trace.shared_blocks.tolist()
    start, new = trace.new_block_start.tolist(), trace.new_blocks.tolist()
    reach: dict[int, list[int]] = {}  # run -> lengths of chain, ascending
    reacher: dict[int, list[int]] = {}  # and the new rows that brought the blocks up to them
    parents: list[int] = []
    shared: list[int] = []
    parts: list[Ints] = []
    counts: list[int] = []
    for at, row in enumerate(rows.tolist()):
        length = shared_blocks[row] + new[row]
        owner, common, brought, total = row, 0, [], length
        parent = -1
        while length:
            run_start = shared_blocks[owner]
            if length > run_start:
                known = reach.setdefault(owner, [])
                common = min(known[-1], length) if known else run_start
                if common < length:
                    first = start[owner] + common - run_start
                    brought.append(trace.block_ids[first : first + length - common])
                    known.append(length)
                    reacher.setdefault(owner, []).append(at)
                if common > run_start:
                    parent = reacher[owner][bisect_left(known, common)]
                    break
                length = run_start
            owner = shared_parent[owner]
        else:
            common = 0
        parents.append(parent)
        shared.append(common)
        parts += brought[::-1]
        counts.append(total - common)
    new_blocks = np.array(counts, np.int64)
    return {
        "shared_parent": np.array(parents, np.int64),
        "shared_blocks": np.array(shared, trace.shared_blocks.dtype),
        "new_block_start": np.cumsum(new_blocks) - new_blocks,
        "new_blocks": new_blocks.astype(trace.new_blocks.dtype),
        "block_ids": np.concatenate(parts) if parts else np.empty(0, np.int64),
    }
