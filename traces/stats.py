"""What a trace holds, in numbers: the summary that ``kvfold traces inspect`` prints."""

from __future__ import annotations

from dataclasses import fields
from math import isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.burst import arrivals_of, burst, gap_cv
from kvfold.traces.columns import KIND
from kvfold.traces.occupancy import occupancy
from kvfold.traces.prefix import prefix_hit_block_share, prefix_hit_token_share
from kvfold.traces.table import Trace


def inspect(trace: Trace) -> dict[str, Any]:
    """Counts, quantiles and meaning of a trace; NaN where a figure is undefined.

    ``rate_per_s`` is rows over the span from first to last arrival; ``interarrival_cv``, the dispersions and
    the peak are of `burst`: all only on a common clock. Waits are the recorded ones (``wait_before_s``), and
    so is the service that ``kv_occupancy`` compares them with (see `occupancy`; None without sessions). The
    prefix shares are of a cache that never evicts.
    """
    meta = trace.meta
    arrival_s = arrivals_of(trace)
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) > 1 else float("nan")
    second, minute = burst(arrival_s, 1.0), burst(arrival_s, 60.0)
    _, calls_per_session = np.unique(trace.session_id[trace.session_id >= 0], return_counts=True)
    return {
        "format": meta.format,
        "source": meta.source,
        "sha256": meta.sha256,
        "rows_read": meta.rows_read,
        "rows_kept": meta.rows_kept,
        "drops": meta.drops,
        "time_unit": meta.time_unit,
        "time_zone": meta.time_zone,
        "clock": meta.clock,
        "prompt_semantics": meta.prompt_semantics,
        "span_s": span_s,
        "rate_per_s": len(arrival_s) / span_s if span_s > 0 else float("nan"),
        "interarrival_cv": gap_cv(arrival_s),
        "dispersion_1_s": second.dispersion,
        "dispersion_60_s": minute.dispersion,
        "peak_over_mean_60_s": minute.peak_over_mean,
        "input_tokens": quantiles(trace.input_tokens),
        "output_tokens": quantiles(trace.output_tokens[trace.output_tokens >= 0]),
        "sessions": len(calls_per_session),
        "calls_per_session": quantiles(calls_per_session),
        "tool_wait_s": quantiles(_waits(trace, "tool")),
        "human_wait_s": quantiles(_waits(trace, "human")),
        "kv_occupancy": _occupancy(trace) if len(calls_per_session) else None,
        "block_size_tokens": meta.block_size_tokens or None,
        "partial_last": meta.partial_last,
        "hash_scope": meta.hash_scope,
        "prefix_hit_token_share": prefix_hit_token_share(trace),
        "prefix_hit_block_share": prefix_hit_block_share(trace),
        "bytes_per_row": _bytes(trace) / max(1, len(trace)),
        "warnings": list(meta.warnings),
    }


def quantiles(values: NDArray[Any]) -> dict[str, float | int]:
    """n, mean, p50, p90, p95, p99 (linear between order statistics) and max; NaN where there are no values."""
    if not len(values):
        return {"n": 0} | dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), float("nan"))
    marks = np.percentile(values, [50, 90, 95, 99]).tolist()
    named = dict(zip(("p50", "p90", "p95", "p99"), marks, strict=True))
    return {"n": len(values), "mean": float(values.mean()), **named, "max": values.max().item()}


def _occupancy(trace: Trace) -> dict[str, Any]:
    found = occupancy(trace)
    names = ["unlimited" if isinf(limit) else f"{limit:.0f}_s" for limit in found.limits_s]
    ratios = {kind: dict(zip(names, each, strict=True)) for kind, each in found.ratios.items()}
    unknown = {"calls_without_service": found.calls_without_service, "waits_unknown": found.waits_unknown}
    return {"over_service": ratios, **unknown}


def _waits(trace: Trace, kind: str) -> NDArray[np.float64]:
    waits = trace.wait_before_s[trace.wait_kind == KIND[kind]]
    return waits[~np.isnan(waits)]


def _bytes(trace: Trace) -> int:
    """Memory of the columns; a text counts as its pointer."""
    total = 0
    for column in fields(trace):
        values = getattr(trace, column.name)
        total += (
            values.nbytes
            if isinstance(values, np.ndarray)
            else 8 * len(values)
            if column.name != "meta"
            else 0
        )
    return total
