"""From the columns that a source has to a whole Trace: the rest is filled with the mark for unknown."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvfold.traces.table import STATUSES, WAIT_KINDS, WAIT_SOURCES, Floats, Meta, Trace

KIND = {name: code for code, name in enumerate(WAIT_KINDS)}
SOURCE = {name: code for code, name in enumerate(WAIT_SOURCES)}
STATUS = {name: code for code, name in enumerate(STATUSES)}

#: Type of each column of numbers, and its mark for unknown.
DEFAULTS: dict[str, tuple[type[np.generic], float]] = {
    "source_row": (np.int64, -1),
    "session_id": (np.int32, -1),
    "turn_index": (np.int32, 0),
    "agent_id": (np.int32, 0),
    "parent_request_id": (np.int64, -1),
    "arrival_time_s": (np.float64, np.nan),
    "wait_before_s": (np.float64, np.nan),
    "wait_kind": (np.int8, KIND["none"]),
    "wait_source": (np.int8, SOURCE["none"]),
    "input_tokens": (np.int64, -1),
    "output_tokens": (np.int64, -1),
    "reasoning_tokens": (np.int64, -1),
    "recorded_cached_tokens": (np.int64, -1),
    "shared_parent": (np.int64, -1),
    "shared_blocks": (np.int64, 0),
    "new_block_start": (np.int64, 0),
    "new_blocks": (np.int64, 0),
    "recorded_e2e_s": (np.float64, np.nan),
    "recorded_ttft_s": (np.float64, np.nan),
    "status": (np.int8, STATUS["unknown"]),
}
#: Columns of strings; the unknown one is empty.
TEXTS = ("source_id", "model", "tenant", "tool_names")


@dataclass(slots=True)
class Edges:
    """Parent links in row order of the child; a call's first edge is its ``parent_request_id``."""

    child: array[int] = field(default_factory=lambda: array("q"))
    parent: array[int] = field(default_factory=lambda: array("q"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    kind: array[int] = field(default_factory=lambda: array("b"))

    def add(self, child: int, parent: int, wait_s: float, kind: int) -> None:
        self.child.append(child)
        self.parent.append(parent)
        self.wait_s.append(wait_s)
        self.kind.append(kind)


def assemble(meta: Meta, columns: dict[str, Any], edges: Edges | None = None) -> Trace:
    """A Trace of the given columns, which must be in row order; a missing column is unknown on every row.

    Adds to ``meta.warnings`` what a reader of the numbers must know about any source.
    """
    rows = len(columns["input_tokens"])
    filled: dict[str, Any] = {
        name: np.asarray(columns[name], kind) if name in columns else np.full(rows, default, kind)
        for name, (kind, default) in DEFAULTS.items()
    }
    filled |= {name: list(columns[name]) if name in columns else [""] * rows for name in TEXTS}
    edges = edges or Edges()
    trace = Trace(
        meta=meta,
        **filled,
        block_ids=np.asarray(columns.get("block_ids", ()), np.int64),
        edge_child=np.array(edges.child, np.int64),
        edge_parent=np.array(edges.parent, np.int64),
        edge_wait_s=np.array(edges.wait_s, np.float64),
        edge_wait_kind=np.array(edges.kind, np.int8),
    )
    return with_warnings(trace, *_remarks(trace))


def with_warnings(trace: Trace, *warnings: str) -> Trace:
    """The trace with these warnings after its own; one that it has already is not repeated."""
    every = tuple(dict.fromkeys((*trace.meta.warnings, *warnings)))
    return replace(trace, meta=replace(trace.meta, warnings=every))


def by_arrival(arrival_time_s: Floats) -> list[int]:
    """Row order of the table: by arrival, rows of one instant as in the file."""
    return np.argsort(arrival_time_s, kind="stable").tolist()


def remarks(
    unknown_outputs: int,
    zero_outputs: int,
    hashed: bool,
    gaps: tuple[int, int, float, int] | None,
) -> list[str]:
    """What a reader of the numbers must know about any source.

    ``gaps`` between arrivals on a common clock: how many, how many of them are 0, the most frequent one in
    seconds, and how many are that.
    """
    found = []
    if unknown_outputs:
        found.append(f"output_tokens is unknown on {unknown_outputs:,} calls")
    if zero_outputs:
        found.append(f"output_tokens is 0 on {zero_outputs:,} calls: kept, they have no TPOT")
    if not hashed:
        found.append("the source has no prefix hashes: prefix sharing is unknown")
    if gaps is not None and gaps[0] >= 99:
        count, zero, often_s, often = gaps
        if zero > count / 2:
            found.append(
                f"{zero:,} of {count:,} gaps between arrivals are 0: the source's clock is coarse, so the"
                " variation of the gaps says nothing about bursts"
            )
        if often_s > 0 and often > 0.99 * count:
            found.append(f"more than 99 % of the gaps are {often_s:g} s: the arrivals look made up")
    return found


def _remarks(trace: Trace) -> list[str]:
    known = trace.arrival_time_s[~np.isnan(trace.arrival_time_s)]
    gaps = None
    if trace.meta.clock == "common" and len(known) > 1:
        steps_s = np.diff(known)
        values, counts = np.unique(np.round(steps_s, 9), return_counts=True)
        often = counts.argmax()
        gaps = len(steps_s), int((steps_s == 0).sum()), float(values[often]), int(counts[often])
    return remarks(
        int((trace.output_tokens < 0).sum()),
        int((trace.output_tokens == 0).sum()),
        trace.meta.hash_scope != "none",
        gaps,
    )
