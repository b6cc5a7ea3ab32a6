"""Changes to a trace that a user asks for or is told of; each returns it with a line that says what changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from kvfold.traces.burst import has_coarse_clock
from kvfold.traces.columns import with_warnings
from kvfold.traces.draws import stream
from kvfold.traces.select import kept_rows, taken
from kvfold.traces.table import Floats, Ints, Trace

__all__ = [
    "cap_idle",
    "first_of_equal_sessions",
    "has_coarse_clock",
    "keep_matching",
    "keep_sessions",
    "sample_sessions",
    "scale_rate",
    "spread_ticks",
    "window",
]


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


def window(trace: Trace, start_s: float, end_s: float) -> tuple[Trace, str]:
    """Calls that arrive from ``start_s`` to before ``end_s``, on the trace's clock; the clock then starts at
    ``start_s``. Raises ValueError without a common clock, or where no call is left."""
    _need_clock(trace, "a time window")
    inside = (trace.arrival_time_s >= start_s) & (trace.arrival_time_s < end_s)
    kept, text = kept_rows(
        trace, np.flatnonzero(inside), "outside_window", f"arrivals from {start_s:g} s to {end_s:g} s"
    )
    return replace(kept, arrival_time_s=kept.arrival_time_s - start_s), text


def scale_rate(trace: Trace, factor: float, waits: bool = False) -> tuple[Trace, str]:
    """Arrivals ``factor`` times as fast: 2 halves the time between roots; with ``waits`` also every wait.

    Later calls of a session move with its first, and keep their recorded service. Raises ValueError without a
    common clock or for a factor that is not positive.
    """
    if not 0 < factor < float("inf"):
        raise ValueError(f"the factor of the rate must be positive, got {factor}")
    _need_clock(trace, "a change of the rate")
    less, arrival_s = 1 - 1 / factor, trace.arrival_time_s
    is_root = np.ones(len(trace), bool)
    is_root[trace.edge_child] = False
    # by how much each call arrives before it did: a child as its parent, and the one of least where it joins
    earlier_s = np.where(is_root, (arrival_s - arrival_s.min()) * less, np.inf)
    gains_s = np.nan_to_num(trace.edge_wait_s) * (less if waits else 0.0)
    edges = zip(trace.edge_child.tolist(), trace.edge_parent.tolist(), gains_s.tolist(), strict=True)
    for child, parent, gain_s in edges:
        earlier_s[child] = min(earlier_s[child], earlier_s[parent] + gain_s)
    parents = np.where(is_root, np.arange(len(trace)), trace.parent_request_id)
    moved = replace(
        trace,
        arrival_time_s=arrival_s - earlier_s,
        wait_before_s=trace.wait_before_s - (earlier_s - earlier_s[parents]),
        edge_wait_s=trace.edge_wait_s - gains_s,
    )
    moved = _sorted(moved)
    text = (
        f"arrivals {factor:g} times as fast (2 is twice as many a second): {_rates(trace, moved)}; waits are"
        f" {f'{1 / factor:g} times as long' if waits else 'unchanged'}"
    )
    return with_warnings(moved, text), text


def cap_idle(trace: Trace, limit_s: float) -> tuple[Trace, str]:
    """No stretch longer than ``limit_s`` in which nothing arrives and no call is known to be served.

    A call is served until its recorded end, or until a wait after it begins. Later calls move forward, and a
    wait that lasts over such a stretch is shorter by what was cut of it; a wait of one session while others
    work stays as it is. Raises ValueError without a common clock.
    """
    _need_clock(trace, "a cap on idle time")
    arrival_s = trace.arrival_time_s
    ends_s = arrival_s + np.nan_to_num(trace.recorded_e2e_s)
    waiting = np.flatnonzero((trace.parent_request_id >= 0) & (trace.wait_before_s > 0))
    np.maximum.at(ends_s, trace.parent_request_id[waiting], arrival_s[waiting] - trace.wait_before_s[waiting])
    edges = np.flatnonzero(trace.edge_wait_s > 0)
    children = trace.edge_child[edges]
    np.maximum.at(ends_s, trace.edge_parent[edges], arrival_s[children] - trace.edge_wait_s[edges])
    idle_s = np.maximum(0.0, arrival_s[1:] - np.maximum.accumulate(ends_s)[:-1])
    long = np.flatnonzero(idle_s > limit_s)
    cut_s = idle_s[long] - limit_s

    def cut_until(moment_s: Floats) -> Floats:
        sums_s = np.append(0.0, np.cumsum(cut_s))
        return sums_s[np.searchsorted(arrival_s[1:][long], moment_s, side="right")]

    def cut_of(wait_s: Floats, rows: Ints) -> Floats:
        began_s = arrival_s[rows] - np.nan_to_num(wait_s)
        return np.minimum(cut_until(arrival_s[rows]) - cut_until(began_s), np.nan_to_num(wait_s))

    shorter_s = cut_of(trace.wait_before_s, np.arange(len(trace)))
    text = (
        f"{len(long):,} idle stretches of more than {limit_s:g} s cut to it: {cut_s.sum():,.0f} s of"
        f" {arrival_s[-1] - arrival_s[0]:,.0f} s removed, {shorter_s.sum():,.0f} s from"
        f" {int((shorter_s > 0).sum()):,} waits that last over them"
    )
    capped = replace(
        trace,
        arrival_time_s=arrival_s - cut_until(arrival_s),
        wait_before_s=trace.wait_before_s - shorter_s,
        edge_wait_s=trace.edge_wait_s - cut_of(trace.edge_wait_s, trace.edge_child),
    )
    return with_warnings(capped, text), text


def keep_matching(
    trace: Trace,
    model: Collection[str] = (),
    tenant: Collection[str] = (),
    session: Collection[int] = (),
    input_tokens: tuple[float, float] | None = None,
    output_tokens: tuple[float, float] | None = None,
) -> tuple[Trace, str]:
    """Calls of these models, tenants and sessions, with tokens from the first to the second bound, both included.

    An empty collection keeps all; unknown output tokens are in no range. Raises ValueError where a name is
    not in the trace or no call is left.
    """
    kept = np.ones(len(trace), bool)
    said = []
    names: tuple[tuple[str, Collection[Any], list[Any]], ...] = (
        ("model", model, trace.model),
        ("tenant", tenant, trace.tenant),
        ("session", session, trace.session_id.tolist()),
    )
    for what, wanted, column in names:
        if wanted:
            if missing := sorted(set(wanted) - set(column)):
                known = ", ".join(map(str, sorted(set(column))[:8])) or "none"
                raise ValueError(f"{what} must be in the trace, got {missing[0]!r}; it has {known}")
            kept &= np.array([value in wanted for value in column])
            said.append(f"{what} {', '.join(map(str, sorted(wanted)))}")
    ranges = (("input", input_tokens, trace.input_tokens), ("output", output_tokens, trace.output_tokens))
    for what, bounds, tokens in ranges:
        if bounds is not None:
            kept &= (tokens >= max(0, bounds[0])) & (tokens <= bounds[1])
            said.append(f"{bounds[0]:g} to {bounds[1]:g} {what} tokens")
    return kept_rows(trace, np.flatnonzero(kept), "filtered", "; ".join(said) or "no filter")


def keep_sessions(trace: Trace, sessions: Collection[int]) -> tuple[Trace, str]:
    """Only the calls of these sessions. Raises ValueError where none is left."""
    kept = np.isin(trace.session_id, np.fromiter(sessions, np.int64, len(sessions)))
    return kept_rows(trace, np.flatnonzero(kept), "session_not_kept", f"{len(sessions):,} sessions")


def sample_sessions(trace: Trace, count: int, seed: int) -> tuple[Trace, str]:
    """``count`` sessions at random, in a trace without sessions single calls. Raises ValueError for too many."""
    single = trace.session_id < 0
    units = np.where(single, -1 - np.arange(len(trace)), trace.session_id)  # a single call is its own unit
    names = np.unique(units)
    if not 1 <= count <= len(names):
        raise ValueError(f"the number of sessions must be 1 to {len(names):,}, got {count:,}")
    chosen = names[np.argsort(stream(seed, "sample").random(len(names)), kind="stable")[:count]]
    what = "single calls" if single.all() else "sessions"
    text = f"{count:,} of {len(names):,} {what} at random (seed {seed})"
    return kept_rows(trace, np.flatnonzero(np.isin(units, chosen)), "session_not_kept", text)


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


def _sorted(trace: Trace) -> Trace:
    order = np.argsort(trace.arrival_time_s, kind="stable")
    return trace if (np.diff(order) == 1).all() else taken(trace, order)


def _rates(before: Trace, after: Trace) -> str:
    return f"{_rate(before.arrival_time_s)} requests/s become {_rate(after.arrival_time_s)}"


def _rate(arrival_s: Floats) -> str:
    span_s = float(arrival_s.max() - arrival_s.min())
    return f"{len(arrival_s) / span_s:.4g}" if span_s else "-"


def _need_clock(trace: Trace, what: str) -> None:
    if trace.meta.clock != "common":
        raise ValueError(f"{what} needs a clock common to all sessions, which {trace.meta.source} has not")
