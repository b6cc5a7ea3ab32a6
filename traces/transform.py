"""Changes to a trace that a user asks for or is told of; each says what it changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np

from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Trace

_NOT_KEPT = "session_not_kept"


def has_coarse_clock(trace: Trace) -> bool:
    """Whether most arrivals share their instant with another, so that the clock ticked and the load did not."""
    if trace.meta.clock != "common" or len(trace) < 100:
        return False
    return int((np.diff(trace.arrival_time_s) == 0).sum()) > (len(trace) - 1) / 2


def spread_ticks(trace: Trace, seed: int) -> tuple[Trace, str]:
    """Spread arrivals that share an instant evenly at random over the time to the next one, in file order.

    The last tick is as long as the median one. Returns the trace and one line that says what changed.
    """
    arrival_s = trace.arrival_time_s
    ticks_s, tick_of, calls = np.unique(arrival_s, return_inverse=True, return_counts=True)
    lengths_s = np.diff(ticks_s, append=np.nan)
    lengths_s[-1] = np.median(lengths_s[:-1]) if len(ticks_s) > 1 else 0.0
    offsets = np.random.default_rng(seed).random(len(trace))
    # within a tick in ascending order, so that rows keep the order of the file
    offsets = offsets[np.lexsort((offsets, tick_of))]
    offsets[calls[tick_of] == 1] = 0.0
    moved = int((calls[calls > 1]).sum())
    text = (
        f"clock of {np.median(lengths_s):g} s ticks: {moved:,} arrivals that share an instant were spread over "
        f"their tick (seed {seed})"
    )
    return replace(trace, arrival_time_s=arrival_s + offsets * lengths_s[tick_of]), text


def keep_sessions(trace: Trace, sessions: Collection[int]) -> tuple[Trace, str]:
    """Only the calls of these sessions, with one line that says what went.

    Raises BadTraceError where calls of different sessions share prefixes (hash scope `global`): dropping a session
    would take the beginning of other chains with it.
    """
    if trace.meta.hash_scope == "global":
        raise BadTraceError(
            "sessions can be dropped only where they share no prefix ids, got hash scope global",
            trace.meta.source,
        )
    kept = np.isin(trace.session_id, np.fromiter(sessions, np.int64, len(sessions)))
    rows = np.flatnonzero(kept)
    row_of = np.full(len(trace) + 1, -1, np.int64)  # the last entry maps -1 (none) to itself
    row_of[rows] = np.arange(len(rows))
    edges = kept[trace.edge_child]
    columns: dict[str, Any] = {}
    for column in fields(trace):
        values = getattr(trace, column.name)
        if isinstance(values, list):
            columns[column.name] = [values[row] for row in rows.tolist()]
        elif column.name.startswith("edge_"):
            columns[column.name] = values[edges]
        elif column.name not in ("meta", "block_ids"):
            columns[column.name] = values[rows]
    for name in ("parent_request_id", "shared_parent", "edge_child", "edge_parent"):
        columns[name] = row_of[columns[name]]
    dropped = len(trace) - len(rows)
    text = f"kept {len(sessions):,} sessions with {len(rows):,} calls, dropped {dropped:,} calls of others"
    meta = replace(
        trace.meta,
        rows_kept=len(rows),
        drops=trace.meta.drops | {_NOT_KEPT: trace.meta.drops.get(_NOT_KEPT, 0) + dropped},
        warnings=(*trace.meta.warnings, text),
    )
    return replace(trace, meta=meta, **columns), text


def first_of_equal_sessions(trace: Trace) -> list[int]:
    """Sessions without those that repeat an earlier one's prompts and outputs, call for call."""
    calls: dict[int, list[tuple[int, int]]] = {}
    for session, prompt, output in zip(
        trace.session_id.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True
    ):
        calls.setdefault(session, []).append((prompt, output))
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for session, sequence in calls.items():
        seen.setdefault(tuple(sequence), session)
    return sorted(seen.values())
