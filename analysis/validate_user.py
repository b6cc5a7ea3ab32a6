"""A user's own measurement as the reference: `vllm bench serve --save-detailed` replayed on its own arrivals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvfold.analysis.deployment import format_sizes
from kvfold.analysis.latency import latency
from kvfold.analysis.validate import Check, compared
from kvfold.analysis.validate_replay import METRICS, STATISTICS, statistic_of
from kvfold.sim.errors import ConfigError
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.step import step_cost
from kvfold.sim.work import MODELLED_OVERHEAD, Overhead
from kvfold.traces.load import load

if TYPE_CHECKING:
    from kvfold.analysis.deployment import Deployment
    from kvfold.sim.run import Run
    from kvfold.sim.scheduler import Limits
    from kvfold.traces.table import Floats, Trace

#: Terms that `fit` moves, in seconds.
TERMS = ("step_s", "token_s", "sequence_s")
#: Steps by which the fit first feels for the slope of each term; coarse, as a replay moves in whole steps.
_FEELERS = np.array([1e-3, 2e-6, 20e-6])
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Truth:
    """What the client saw of each completed request, in trace order; TPOT is NaN for one-token outputs."""

    trace: Trace
    seen: dict[str, Floats]


def load_truth(path: Path) -> Truth:
    """Raises BadTraceError for a file that is no result, ConfigError for one without latencies or with too few."""
    trace = load(str(path))
    if not len(trace) or np.isnan(trace.recorded_ttft_s).all() or np.isnan(trace.recorded_e2e_s).all():
        raise ConfigError(
            f"{path}: no measured latencies; write the result with vllm bench serve --save-result --save-detailed"
        )
    arrival_s = trace.arrival_time_s
    seen = _seen(arrival_s, trace.recorded_ttft_s, trace.recorded_e2e_s, trace.output_tokens)
    return Truth(trace, seen)


def against(truth: Truth, deployment: Deployment, limits: Limits, source: str) -> list[Check]:
    """Mean and percentiles of TTFT, TPOT and latency, ours beside the client's; nothing is fitted."""
    ours = simulated(truth.trace, deployment, limits, MODELLED_OVERHEAD)
    return _checks("vllm-result", "", truth.seen, ours, slice(None), source)


@dataclass(frozen=True, slots=True)
class Fit:
    """Overhead terms fitted to one half of the requests, and the checks on the other half."""

    overhead: Overhead
    checks: list[Check]
    requests: int  # in the half that was fitted


def fit(truth: Truth, deployment: Deployment, limits: Limits, source: str) -> Fit:
    """Least squares on log TTFT and log TPOT of the earlier half of the requests (Gauss-Newton, no term below 0).

    All requests are replayed each time, as the later half waits behind the earlier one.
    """
    half = len(truth.trace) // 2
    if half < 10:
        raise ConfigError(f"a fit needs at least 20 requests, got {len(truth.trace)}")
    terms = np.zeros(len(TERMS))
    loss, rest = _loss(truth, deployment, limits, terms, half)
    feelers = _FEELERS
    for _ in range(_ROUNDS):
        # one column per term, in feelers, so that the columns are of like size
        columns = [
            _loss(truth, deployment, limits, terms + each, half)[1] - rest for each in np.diag(feelers)
        ]
        move = feelers * np.linalg.lstsq(np.array(columns).T, -rest, rcond=1e-3)[0]
        feelers = feelers / 2
        for share in (1.0, 0.5, 0.25):
            tried = np.maximum(0.0, terms + share * move)
            found, left = _loss(truth, deployment, limits, tried, half)
            if found < loss:
                terms, loss, rest = tried, found, left
                break
    overhead = Overhead(*terms.tolist())
    ours = simulated(truth.trace, deployment, limits, overhead)
    checks = _checks("fit", "half not fitted: ", truth.seen, ours, slice(half, None), source)
    return Fit(overhead, checks, half)


def simulated(trace: Trace, deployment: Deployment, limits: Limits, overhead: Overhead) -> dict[str, Floats]:
    """The replay's TTFT, TPOT and latency per request."""
    sizes = format_sizes("bf16")
    cost = step_cost(
        deployment.model,
        deployment.gpu,
        sizes,
        deployment.weights,
        deployment.tp,
        deployment.costs,
        deployment.strict_costs,
        overhead,
    )
    found: Run = run(
        Scenario(
            trace=trace,
            cost=cost,
            budget=deployment.budget(sizes),
            max_context_tokens=deployment.max_context_tokens,
            limits=limits,
            async_scheduling=True,
        )
    )
    calls = found.calls
    ttft_s, e2e_s = calls.first_token_s - calls.arrival_s, calls.last_token_s - calls.arrival_s
    return _seen(calls.arrival_s, ttft_s, e2e_s, calls.output_tokens)


def _seen(arrival_s: Floats, ttft_s: Floats, e2e_s: Floats, tokens: object) -> dict[str, Floats]:
    found = latency(arrival_s, arrival_s, arrival_s + ttft_s, arrival_s + e2e_s, np.asarray(tokens))
    return {"TTFT": found.ttft_s, "TPOT": found.tpot_s, "latency": found.e2e_s}


def _loss(
    truth: Truth, deployment: Deployment, limits: Limits, terms: Floats, half: int
) -> tuple[float, Floats]:
    ours = simulated(truth.trace, deployment, limits, Overhead(*terms.tolist()))
    parts = []
    for metric in ("TTFT", "TPOT"):
        ratio = ours[metric][:half] / truth.seen[metric][:half]
        # a request without this figure on either side says nothing about the terms
        parts.append(np.log(np.where(ratio > 0, ratio, 1.0)))
    rest = np.concatenate(parts)
    return float(rest @ rest), rest


def _checks(
    family: str, prefix: str, real: dict[str, Floats], ours: dict[str, Floats], part: slice, source: str
) -> list[Check]:
    return [
        compared(
            family,
            f"{prefix}{metric} {statistic}",
            source,
            statistic_of(real[metric][part], statistic),
            statistic_of(ours[metric][part], statistic),
            unit="s",
        )
        for metric in METRICS
        for statistic in STATISTICS
        if not np.isnan(real[metric][part]).all()
    ]
