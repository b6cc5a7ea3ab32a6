"""Rows of the two comparisons: a metric of the baseline, of the format, the change, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.analysis import bootstrap
from kvfold.analysis.latency import COMPLETED, Floats, call_latency
from kvfold.analysis.metrics import itl, makespan_share_s, quantiles
from kvfold.analysis.slo import Slo, good

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.sim.run import Run

#: Draws of the bootstrap behind each interval.
REPLICATES = 400


@dataclass(frozen=True, slots=True)
class Metric:
    """`values(run, slo)` gives one row per request for `statistic`; scaled by `scale` for printing."""

    name: str
    unit: str
    values: Callable[[Run, Slo], Floats]
    statistic: bootstrap.Statistic
    scale: float = 1.0


def _with_share(run: Run, produced: Floats) -> Floats:
    return np.stack([produced, makespan_share_s(run.calls)], axis=1)  # [requests, 2]


def _output(run: Run, _: Slo) -> Floats:
    return _with_share(run, run.calls.output_tokens.astype(np.float64))


def _goodput(run: Run, slo: Slo) -> Floats:
    return _with_share(run, good(slo, run.calls).astype(np.float64))


def _ttft(run: Run, _: Slo) -> Floats:
    return call_latency(run.calls).ttft_s


def _tpot(run: Run, _: Slo) -> Floats:
    return call_latency(run.calls).tpot_s


def _e2e(run: Run, _: Slo) -> Floats:
    return call_latency(run.calls).e2e_s


def _own_rate(run: Run, _: Slo) -> Floats:
    with np.errstate(divide="ignore"):
        return 1 / call_latency(run.calls).tpot_s


METRICS = (
    Metric("output tokens", "tok/s", _output, bootstrap.rate),
    Metric("goodput", "requests/s", _goodput, bootstrap.rate),
    Metric("per-request rate, mean", "tok/s", _own_rate, bootstrap.mean),
    Metric("TTFT, P50", "s", _ttft, bootstrap.quantile(0.5)),
    Metric("TTFT, P99", "s", _ttft, bootstrap.quantile(0.99)),
    Metric("TPOT, mean", "ms", _tpot, bootstrap.mean, 1e3),
    Metric("TPOT, P99", "ms", _tpot, bootstrap.quantile(0.99), 1e3),
    Metric("E2E latency, P50", "s", _e2e, bootstrap.quantile(0.5)),
)


def row(
    metric: str,
    format_name: str,
    unit: str,
    baseline: float | None,
    value: float | None,
    *,
    n: int,
    ci95: tuple[float, float] | None = None,
    origin: str = "modelled",
) -> dict[str, Any]:
    """One row; change = value / baseline - 1, None where it is not defined."""
    change = None
    if baseline is not None and value is not None and baseline != 0:
        change = value / baseline - 1
    return {
        "metric": metric,
        "format": format_name,
        "unit": unit,
        "baseline": baseline,
        "value": value,
        "change": change,
        "ci95": list(ci95) if ci95 is not None else None,
        "n": n,
        "origin": origin,
    }


def compare_runs(format_name: str, baseline: Run, run: Run, slo: Slo, seed: int) -> list[dict[str, Any]]:
    """Rows for two runs of the same calls; intervals draw requests, or sessions where there are any."""
    sessions = run.calls.session_id
    unit = None
    if (sessions >= 0).any():
        # single-shot calls among sessions are units of their own
        unit = np.where(sessions >= 0, sessions, sessions.max() + 1 + np.arange(len(sessions)))
    result = []
    for metric in METRICS:
        before, after = metric.values(baseline, slo), metric.values(run, slo)
        ci95 = bootstrap.ci95(before, after, metric.statistic, seed=seed, replicates=REPLICATES, unit=unit)
        done = int((run.calls.outcome == COMPLETED).sum())
        result.append(
            row(
                metric.name,
                format_name,
                metric.unit,
                _whole(metric, before),
                _whole(metric, after),
                n=int((~np.isnan(after)).sum()) if after.ndim == 1 else done,
                ci95=ci95,
            )
        )
    result.append(_itl_row(format_name, baseline, run))
    result.extend(_session_rows(format_name, baseline, run))
    result.extend(_total_rows(format_name, baseline, run))
    return result


def _whole(metric: Metric, values: Floats) -> float | None:
    found = float(metric.statistic(values, np.ones((1, len(values)), np.int32))[0]) * metric.scale
    return found if np.isfinite(found) else None


def _itl_row(format_name: str, baseline: Run, run: Run) -> dict[str, Any]:
    def p99(of: Run) -> float | None:
        values, weights = itl(of)
        if not weights.sum():
            return None
        return float(quantiles(values, np.array([0.99]), weights)[0]) * 1e3

    return row("ITL, P99", format_name, "ms", p99(baseline), p99(run), n=int(itl(run)[1].sum()))


def _session_rows(format_name: str, baseline: Run, run: Run) -> list[dict[str, Any]]:
    from kvfold.analysis.metrics import sessions

    if not (run.calls.session_id >= 0).any():
        return []
    before, after = (sessions(of.calls, call_latency(of.calls)) for of in (baseline, run))
    task = "task_completion_s"
    return [
        row(
            f"task completion, {name}",
            format_name,
            "s",
            before[task][key],
            after[task][key],
            n=after[task]["n"],
        )
        for name, key in (("P50", "p50"), ("P90", "p90"))
    ]


def _total_rows(format_name: str, baseline: Run, run: Run) -> list[dict[str, Any]]:
    def per_token(of: Run) -> float | None:
        tokens = int(of.calls.output_tokens.sum())
        return of.energy_j / tokens if tokens and np.isfinite(of.energy_j) else None

    requests = len(run.calls.outcome)
    return [
        row(
            "preemptions",
            format_name,
            "",
            int(baseline.calls.preemptions.sum()),
            int(run.calls.preemptions.sum()),
            n=requests,
        ),
        row(
            "prefix hits",
            format_name,
            "% of tokens",
            100 * baseline.kv["prefix_hit_token_share"],
            100 * run.kv["prefix_hit_token_share"],
            n=requests,
        ),
        row(
            "KV held, peak",
            format_name,
            "GiB",
            baseline.kv["peak_bytes"] / 2**30,
            run.kv["peak_bytes"] / 2**30,
            n=requests,
        ),
        row("energy per output token", format_name, "J", per_token(baseline), per_token(run), n=requests),
    ]
