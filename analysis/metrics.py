"""What a simulation says, in the field's words: latency quantiles, throughput, goodput, sessions, energy.

docs/metrics.md defines every name. Percentiles are NumPy's ``linear`` method. A number that is not defined is
NaN here and null in the output, never 0.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.analysis.latency import COMPLETED, Floats, Latency, call_latency
from kvfold.analysis.out import plain
from kvfold.analysis.slo import Slo, good
from kvfold.sim.run import FS_PER_S, OUTCOMES, Calls, Run, Stretches
from kvfold.traces.table import WAIT_KINDS

Ints = NDArray[np.integer[Any]]

#: Fewer values than this have no P99 / have a P99 that is flagged.
P99_MIN_VALUES, P99_SURE_VALUES = 100, 1000
#: Samples up to this size are sorted whole.
_BUCKETED_VALUES = 1_000_000
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
#: Quantiles of a CDF as it is drawn: even up to P90, finer in the tail.
_CDF_QUANTILES = np.concatenate([np.arange(0, 900, 20), np.arange(900, 990, 5), np.arange(990, 1001)]) / 1000


def quantiles(values: Floats, at: Floats, weights: Ints | None = None) -> Floats:
    """Quantiles by NumPy's ``linear`` method; ``weights`` says how many times each value is in the sample.

    The same bits as ``np.quantile(np.repeat(values, weights), at)`` without the expanded sample.
    ``values`` must not be empty nor hold NaN, and weights must not be all 0.
    """
    if weights is None:
        return np.quantile(values, at)
    total = int(weights.sum())
    position = (total - 1) * np.asarray(at, np.float64)
    lower = np.floor(position)
    ranks = np.concatenate([lower, np.minimum(lower + 1, total - 1)]).astype(np.int64)
    low, high = np.split(_at_ranks(values, weights, ranks.ravel()).reshape(ranks.shape), 2)
    fraction, rise = position - lower, high - low
    # from the nearer end, as NumPy does it: exact at both ends
    return np.where(fraction < 0.5, low + rise * fraction, high - rise * (1 - fraction))


def _at_ranks(values: Floats, weights: Ints, ranks: Ints) -> Floats:
    """The values at ranks (from 0) of the sorted sample in which each value occurs `weights` times.

    Large samples are counted into buckets first, and only the buckets that hold a rank are sorted: a sort of all
    of them would take several times the memory of the sample.
    """
    if len(values) <= _BUCKETED_VALUES:
        order = np.argsort(values)
        return values[order][np.searchsorted(np.cumsum(weights[order]), ranks, side="right")]
    edges = np.unique(values[:: len(values) // 4096])
    counts = np.zeros(len(edges) + 1, np.int64)
    for start in range(0, len(values), _BUCKETED_VALUES):
        part = slice(start, start + _BUCKETED_VALUES)
        bucket = np.searchsorted(edges, values[part], side="right")
        np.add.at(counts, bucket, weights[part])
    ends = np.cumsum(counts)
    found = np.empty(len(ranks))
    bounds = np.concatenate([[-np.inf], edges, [np.inf]])
    for bucket in np.unique(np.searchsorted(ends, ranks, side="right")).tolist():
        inside = (values >= bounds[bucket]) & (values < bounds[bucket + 1])
        mine, some = values[inside], weights[inside]
        order = np.argsort(mine)
        before = ends[bucket] - counts[bucket]
        here = (ranks >= before) & (ranks < ends[bucket])
        found[here] = mine[order][np.searchsorted(np.cumsum(some[order]), ranks[here] - before, side="right")]
    return found


def summary(values: Floats, weights: Ints | None = None) -> dict[str, Any]:
    """``mean, p50, p90, p95, p99, n`` of the defined (not NaN) values, None where the sample is too small.

    p99 is None below 100 values; ``p99_flagged`` says that there are fewer than 1,000.
    """
    kept = ~np.isnan(values)
    if weights is not None:
        kept &= weights > 0
    if not kept.all():
        values, weights = values[kept], None if weights is None else weights[kept]
    n = int(len(values) if weights is None else weights.sum())
    result: dict[str, Any] = {
        "mean": None,
        **dict.fromkeys(_QUANTILES),
        "n": n,
        "p99_flagged": n < P99_SURE_VALUES,
    }
    if n == 0:
        return result
    result["mean"] = float(values.mean() if weights is None else values @ weights / n)
    found = quantiles(values, np.array(list(_QUANTILES.values())), weights)
    result.update(zip(_QUANTILES, found.tolist(), strict=True))
    if n < P99_MIN_VALUES:
        result["p99"] = None
    return result


def cdf(values: Floats, weights: Ints | None = None) -> dict[str, list[float]]:
    """The distribution as it is drawn: quantiles ``q``, values ``v``; both empty when nothing is defined."""
    kept = ~np.isnan(values) if weights is None else ~np.isnan(values) & (weights > 0)
    if not kept.any():
        return {"q": [], "v": []}
    found = quantiles(values[kept], _CDF_QUANTILES, None if weights is None else weights[kept])
    return {"q": _CDF_QUANTILES.tolist(), "v": found.tolist()}


def itl(run: Run) -> tuple[Floats, Ints]:
    """Inter-token gaps in seconds, pooled over all tokens, and how many times each occurs.

    Each step of a stretch gives ``decode_seqs`` gaps as long as the step; gaps across a preemption come from
    ``run.gap_s``. The weights sum to Σ(N - 1) over the calls that produced N >= 1 tokens. Equal steps are
    kept as one weighted value, so memory follows the steps whose length changes.
    """
    stretches = run.stretches
    used = (stretches.decode_seqs > 0) & (stretches.steps > 0)
    steps, growth_fs = stretches.steps[used], stretches.growth_fs[used]
    rows = np.where(growth_fs == 0, 1, steps)
    # in place: with 10^7 steps every array here takes 80 MB
    values_fs = np.arange(rows.sum())
    values_fs -= np.repeat(np.cumsum(rows) - rows, rows)
    values_fs *= np.repeat(growth_fs, rows)
    values_fs += np.repeat(stretches.first_step_fs[used], rows)
    values_s = values_fs / FS_PER_S
    del values_fs
    weights = np.repeat((stretches.decode_seqs[used] * (steps // rows)).astype(np.int32), rows)
    if not len(run.gap_s):
        return values_s, weights
    spanning = np.ones(len(run.gap_s), np.int32)
    return np.concatenate([values_s, run.gap_s]), np.concatenate([weights, spanning])


def makespan_s(calls: Calls) -> float:
    """First arrival to last completion; NaN when nothing completed."""
    done = calls.outcome == COMPLETED
    if not done.any():
        return float("nan")
    return float(calls.last_token_s[done].max() - np.nanmin(calls.arrival_s))


def makespan_share_s(calls: Calls) -> Floats:
    """Each session's part of the makespan, at its first call; a call without a session is one of its own.

    Every instant is shared equally by the sessions alive in it (first arrival to last token, waits included);
    an instant without any goes to the next that arrives. So the parts sum to the makespan, and a session has
    nearly the same part in two runs that differ little. Resampled together with what the calls produced, they
    give a confidence interval for a rate (kvfold.analysis.bootstrap.rate). Sessions of which no call completed
    have no part.
    """
    share = np.zeros(len(calls.outcome))
    done = calls.outcome == COMPLETED
    if not done.any():
        return share
    ids = calls.session_id.astype(np.int64)
    _, at, unit = np.unique(
        np.where(ids >= 0, ids, -1 - np.arange(len(ids))), return_index=True, return_inverse=True
    )
    start, end = np.full(len(at), np.inf), np.full(len(at), -np.inf)
    np.fmin.at(start, unit, calls.arrival_s)
    np.fmax.at(end, unit, np.where(done, calls.last_token_s, -np.inf))
    live = np.flatnonzero(np.isfinite(end))
    moments = np.concatenate([start[live], end[live]])
    order = np.argsort(moments, kind="stable")  # at one instant, starts come before ends
    alive = np.cumsum(np.where(order < len(live), 1, -1))
    length = np.diff(moments[order], prepend=np.nanmin(calls.arrival_s))
    before = np.concatenate([[0], alive[:-1]])
    passed = np.empty(len(order))
    passed[order] = np.cumsum(np.divide(length, before, out=np.zeros(len(order)), where=before > 0))
    part = passed[len(live) :] - passed[: len(live)]
    opens = order[before == 0]  # starts after an instant without any
    part[opens] += length[before == 0]
    share[at[live]] = part
    return share


def sessions(calls: Calls, times: Latency) -> dict[str, Any]:
    """Sessions as wholes: how many completed, how long they took, and where their time went.

    ``task_completion_s`` runs from a session's first arrival to its last token, waits included, for sessions
    all of whose calls completed. The other times are totals over the calls of all sessions; where calls of a
    session run side by side their times add up to more than the session took.
    """
    member = calls.session_id >= 0
    ids, row = np.unique(calls.session_id[member], return_inverse=True)
    done = calls.outcome[member] == COMPLETED
    start, end = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.fmin.at(start, row, calls.arrival_s[member])
    np.fmax.at(end, row, np.where(done, calls.last_token_s[member], -np.inf))
    whole = np.bincount(row, ~done, minlength=len(ids)) == 0
    kind, wait = calls.wait_kind[member], calls.wait_before_s[member]
    tool, human = kind == WAIT_KINDS.index("tool"), kind == WAIT_KINDS.index("human")
    return {
        "count": len(ids),
        "completed": int(whole.sum()),
        "task_completion_s": summary(end[whole] - start[whole]),
        "llm_s": float(np.nansum(times.e2e_s[member])),
        "queue_s": float(np.nansum(times.queue_s[member])),
        "prefill_s": float(np.nansum(times.prefill_s[member])),
        "decode_s": float(np.nansum(times.decode_s[member])),
        "tool_wait_s": float(np.nansum(wait[tool])),
        "human_wait_s": float(np.nansum(wait[human])),
        "other_wait_s": float(np.nansum(wait[~tool & ~human])),
    }


def timeline(stretches: Stretches, bins: int = 300) -> dict[str, list[float]]:
    """Load over time as it is drawn: the largest value in each of ``bins`` equal parts of the run.

    ``running`` counts decoding sequences. A part in which no step ran holds 0. Empty without steps.
    """
    if len(stretches.steps) == 0:
        return {"t_s": [], "running": [], "waiting": [], "used_bytes": []}
    order = np.argsort(stretches.start_s, kind="stable")
    stretches = Stretches(*(getattr(stretches, column.name)[order] for column in fields(stretches)))
    start, steps = stretches.start_s, stretches.steps.astype(np.float64)
    duration_fs = steps * stretches.first_step_fs + steps * (steps - 1) / 2 * stretches.growth_fs
    end = start + duration_fs / FS_PER_S
    edges = np.linspace(start[0], end.max(), bins + 1)
    first_bin = np.clip(np.searchsorted(edges, start, side="right") - 1, 0, bins - 1)
    before = np.searchsorted(start, edges[:-1], side="right") - 1
    running_on = end[before] > edges[:-1]
    names = {
        "running": stretches.decode_seqs,
        "waiting": stretches.waiting,
        "used_bytes": stretches.used_bytes,
    }
    result = {"t_s": edges[:-1].tolist()}
    for name, values in names.items():
        largest = np.where(running_on, values[before], 0)
        np.maximum.at(largest, first_bin, values)
        result[name] = largest.tolist()
    return result


def goodput_rps(run: Run, slo: Slo) -> float | None:
    """Good requests over the makespan, None where nothing completed."""
    return _rate(int(good(slo, run.calls).sum()), makespan_s(run.calls))


def metrics(run: Run, slo: Slo) -> dict[str, Any]:
    """The keys of ``kvfold replay --json``; strict JSON values, null where a number is not defined.

    Rates divide by the makespan. Latency is that of completed calls; ``slo_attainment`` divides by all
    offered calls, so that rejected, timed-out and failed ones count as bad. Energy includes idling.
    """
    calls = run.calls
    times = call_latency(calls)
    done = calls.outcome == COMPLETED
    offered, passed = len(done), int(good(slo, calls).sum())
    output = int(calls.output_tokens[done].sum())
    span_s = makespan_s(calls)
    whole = sessions(calls, times)
    outcome = np.bincount(calls.outcome, minlength=len(OUTCOMES))
    return plain(
        {
            "counts": {"offered": offered, **dict(zip(OUTCOMES, outcome, strict=True))},
            "metrics": {
                "ttft_s": summary(times.ttft_s),
                "tpot_s": summary(times.tpot_s),
                "itl_s": summary(*itl(run)),
                "e2e_s": summary(times.e2e_s),
                "queue_s": summary(times.queue_s),
                "prefill_s": summary(times.prefill_s),
                "decode_s": summary(times.decode_s),
                "norm_latency_s": summary(times.norm_latency_s),
            },
            "output_tok_s": _rate(output, span_s),
            "total_tok_s": _rate(output + int(calls.input_tokens[done].sum()), span_s),
            "makespan_s": span_s,
            "goodput_rps": goodput_rps(run, slo),
            "slo_attainment": passed / offered if offered else None,
            "preemptions": int(calls.preemptions.sum()),
            "kv": run.kv,
            "sessions": whole,
            "energy_j_per_output_token": run.energy_j / output if output else None,
            "energy": _energy(run, whole),
            "reject_reasons": run.reject_reasons,
        }
    )


def _energy(run: Run, whole: dict[str, Any]) -> dict[str, Any]:
    """Totals and shares of the energy; per task it is all energy over the sessions that completed."""
    known = run.energy_j > 0
    return {
        "total_j": run.energy_j,
        "idle_j": run.idle_energy_j,
        "idle_share": run.idle_energy_j / run.energy_j if known else None,
        "attention_share": run.attention_energy_j / run.energy_j if known else None,
        "j_per_task": run.energy_j / whole["completed"] if whole["completed"] else None,
        "origin": run.energy_origin,
    }


def per_replica(run: Run) -> list[dict[str, Any]]:
    """Calls, tokens, busy time and peak KV of each replica."""
    calls, stretches = run.calls, run.stretches
    steps = stretches.steps.astype(np.float64)
    duration_fs = steps * stretches.first_step_fs + steps * (steps - 1) / 2 * stretches.growth_fs
    rows = []
    for replica in range(int(max(calls.replica.max(initial=0), stretches.replica.max(initial=0))) + 1):
        mine, ran = calls.replica == replica, stretches.replica == replica
        prompt_tokens = int(calls.input_tokens[mine & ~np.isnan(calls.scheduled_s)].sum())
        rows.append(
            {
                "replica": replica,
                "calls": int(mine.sum()),
                "completed": int((calls.outcome[mine] == COMPLETED).sum()),
                "output_tokens": int(calls.output_tokens[mine].sum()),
                "prefix_hit_token_share": int(calls.cached_tokens[mine].sum()) / max(1, prompt_tokens),
                "busy_s": float(duration_fs[ran].sum()) / FS_PER_S,
                "peak_bytes": int(stretches.used_bytes[ran].max(initial=0)),
            }
        )
    return rows


def _rate(total: float, span_s: float) -> float | None:
    return total / span_s if span_s > 0 else None
