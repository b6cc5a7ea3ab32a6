"""A generator fitted to a trace, and its trace held against the real one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan
from typing import Any

import numpy as np

from kvfold.traces.arrivals import Clients, fitted
from kvfold.traces.burst import arrivals_of, burst
from kvfold.traces.draws import Quantiles
from kvfold.traces.fit_agents import agents_like, grows
from kvfold.traces.occupancy import before_in_thread
from kvfold.traces.stats import inspect, quantiles
from kvfold.traces.synth_agent import agents
from kvfold.traces.synth_chat import Requests, Size, chat
from kvfold.traces.table import Ints, Trace
from kvfold.traces.transform import has_coarse_clock, spread_ticks

#: A choice: how many clients the arrivals of a trace without names of clients come from.
_CLIENTS = 20
#: Ratio of the two windows whose dispersions are fitted, and how many long ones a trace must fill.
_LONG, _WINDOWS = 60, 10
#: Rate of session starts where the sessions of a trace have no common clock: one a minute.
STARTS_PER_S = 1 / 60


@dataclass(frozen=True, slots=True)
class Like:
    """A synthetic trace like ``real`` (whose coarse clock may have been spread).

    ``notes`` say what was changed for the fit, what was chosen and what could not be fitted.
    """

    real: Trace
    synthetic: Trace
    notes: tuple[str, ...]


def like(trace: Trace, seed: int) -> Like:
    """A synthetic trace of as many sessions or requests as ``trace`` has.

    Sessions with waits whose prompts grow make it one of sessions, else it is single-shot. Raises ValueError
    for a trace with fewer than two calls, or where no output tokens are known.
    """
    if len(trace) < 2:
        raise ValueError(f"a generator needs at least two calls to be fitted to, got {len(trace)}")
    unknown, empty = int((trace.output_tokens < 0).sum()), int((trace.output_tokens == 0).sum())
    if unknown == len(trace):
        raise ValueError("no output tokens are known: nothing to fit them to")
    notes = []
    if unknown:
        notes.append(f"{unknown:,} calls of unknown output: outputs are fitted to the others")
    if empty:
        notes.append(f"{empty:,} calls without output: the synthetic ones put out at least one token")
    if has_coarse_clock(trace):
        trace, note = spread_ticks(trace, seed)
        notes.append(note)
    block = trace.meta.block_size_tokens
    in_session = trace.session_id >= 0
    waits = in_session & ~np.isnan(trace.wait_before_s)
    if waits.any() and grows(trace):
        roots = np.unique(trace.session_id[in_session], return_index=True)[1]
        starts, note = _arrivals(replace(trace, arrival_time_s=trace.arrival_time_s[roots]))
        made = agents(agents_like(trace), len(roots), starts, seed, block)
        notes += _session_notes(trace, made, int((~in_session).sum()))
    else:
        model = _requests(trace)
        starts, note = _arrivals(trace)
        made = chat(model, len(trace), starts, seed, block)
        if in_session.any():
            why = "have prompts that do not hold the ones before" if waits.any() else "have no waits"
            notes.append(f"the sessions {why}: their calls are drawn as single-shot ones")
        if trace.meta.hash_scope == "session" or not model.shares_prefixes:
            notes.append("no prefix sharing over the whole trace: none is made")
    return Like(trace, made, (*notes, note))


def compared(pair: Like) -> list[tuple[str, float, float]]:
    """(name, real, synthetic) of the figures of `inspect` that at least one of the two has."""
    real, synthetic = (
        inspect(trace) | {"wait_s": quantiles(trace.wait_before_s[~np.isnan(trace.wait_before_s)])}
        for trace in (pair.real, pair.synthetic)
    )
    rows = _rows(real, synthetic)
    return [row for row in rows if not (isnan(row[1]) and isnan(row[2]))]


#: Figures of `inspect` that are held against each other.
_FIGURES = (
    *("rows_kept", "sessions", "rate_per_s", "interarrival_cv", "dispersion_1_s", "dispersion_60_s"),
    *("peak_over_mean_60_s", "input_tokens", "output_tokens", "calls_per_session", "wait_s", "tool_wait_s"),
    *("human_wait_s", "prefix_hit_token_share", "kv_occupancy"),
)
_MARKS = ("p50", "p90", "p99", "mean")


def _rows(real: dict[str, Any], synthetic: dict[str, Any]) -> list[tuple[str, float, float]]:
    rows: list[tuple[str, float, float]] = []
    for name in _FIGURES:
        one, other = real[name], synthetic[name]
        if name == "kv_occupancy":
            one, other = ((each or {}).get("over_service", {}) for each in (one, other))
            for kind in sorted(one.keys() | other.keys()):
                for limit in ("60_s", "unlimited"):
                    first, second = (each.get(kind, {}).get(limit, np.nan) for each in (one, other))
                    rows.append((f"{name} {kind} {limit}", float(first), float(second)))
        elif isinstance(one, dict):
            rows += [(f"{name} {mark}", float(one[mark]), float(other[mark])) for mark in _MARKS]
        else:
            rows.append((name, float(one), float(other)))
    return rows


def _arrivals(trace: Trace) -> tuple[Clients, str]:
    """Clients with the rate of the arrivals and their dispersion in two windows, and how that was done."""
    arrival_s = arrivals_of(trace)
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) > 1 else 0.0
    if not span_s:
        return Clients(STARTS_PER_S, count=_CLIENTS), (
            "arrivals have no common clock: a Poisson stream of one start a minute is a choice"
        )
    rate_per_s = len(arrival_s) / span_s
    short_s = max(1.0, float(f"{1 / rate_per_s:.1g}"))
    long_s = _LONG * short_s
    if span_s < _WINDOWS * long_s:
        return Clients(rate_per_s, count=_CLIENTS), (
            f"{span_s:,.0f} s are too short for windows of {long_s:g} s: arrivals are a Poisson stream"
        )
    short, long = burst(arrival_s, short_s).dispersion, burst(arrival_s, long_s).dispersion
    clients = fitted(rate_per_s, (short_s, short), (long_s, long), _CLIENTS, span_s / _WINDOWS)
    found = clients.index_of_dispersion(short_s)
    miss = "" if abs(found - short) < 0.1 * short else f", which come to {found:.3g} in the short ones"
    return clients, (
        f"arrivals are fitted to the dispersion in windows of {short_s:g} s and {long_s:g} s, {short:.3g} and"
        f" {long:.3g}, with {_CLIENTS} clients (a choice){miss}; daily rhythm is not"
    )


def _session_notes(trace: Trace, made: Trace, single: int) -> list[str]:
    notes = ["waits, tokens and outputs are drawn independently of each other and of the context"]
    if trace.meta.hash_scope != "none":
        notes.append("a prompt shares all of the one before, after a compaction nothing")
    agents_of = np.unique(np.stack([trace.session_id, trace.agent_id])[:, trace.agent_id > 0], axis=1).shape[
        1
    ]
    if agents_of:
        notes.append(f"{agents_of:,} sub-agents are left out: their waits are in those of their session")
    unknown = int(np.isnan(trace.wait_before_s[before_in_thread(trace) >= 0]).sum())
    if unknown:
        notes.append(f"{unknown:,} unknown waits are drawn like the others of their kind")
    if single:
        notes.append(f"{single:,} calls outside sessions are left out")
    if np.isnan(trace.recorded_e2e_s).all():
        notes.append("no service time is recorded: calls take none, and KV held in waits has no measure")
    arrival_s = arrivals_of(trace)
    if len(arrival_s):
        span_s = float(arrival_s[-1] - arrival_s[0])
        late = int((made.arrival_time_s > span_s).sum())
        notes.append(
            f"{late:,} calls arrive after {span_s:,.0f} s, where the real trace ends and cuts its sessions"
        )
    return notes


def _requests(trace: Trace) -> Requests:
    """Single-shot requests in four groups by prompt, with how much of it an earlier one had."""
    block = trace.meta.block_size_tokens
    is_global = trace.meta.hash_scope == "global"
    shared = (
        np.minimum(trace.shared_blocks * block, trace.input_tokens) if is_global else np.zeros(len(trace))
    )
    system = int(np.quantile(shared, 0.05)) if is_global else 0
    continued = shared > system
    carried = shared / trace.input_tokens
    group = np.searchsorted(np.quantile(trace.input_tokens, (0.25, 0.5, 0.75)), trace.input_tokens)
    known = trace.output_tokens >= 0
    sizes = []
    for at in np.unique(group).tolist():
        rows = group == at
        more = rows & continued
        sizes.append(
            Size(
                share=float(rows.mean()),
                input_tokens=_at_most(trace.input_tokens[rows]),
                output_tokens=_at_most(trace.output_tokens[rows & known if (rows & known).any() else known]),
                continued=float(continued[rows].mean()),
                carried=Quantiles.of(carried[more]) if more.any() else Quantiles.constant(0.0),
            )
        )
    parents = trace.shared_parent[continued]
    gaps = trace.arrival_time_s[continued] - trace.arrival_time_s[parents]
    gaps = gaps[~np.isnan(gaps)]
    return Requests(tuple(sizes), system, Quantiles.of(gaps) if len(gaps) else Quantiles.constant(0.0))


def _at_most(tokens: Ints) -> Quantiles:
    """A table of the sample that never draws more than it holds: prompts and outputs have a limit somewhere."""
    return Quantiles.of(tokens).up_to(float(tokens.max()))
