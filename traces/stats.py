"""What a trace holds, in numbers: the summary that ``kvfold traces inspect`` prints."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.columns import KIND
from kvfold.traces.prefix import prefix_hit_block_share, prefix_hit_token_share
from kvfold.traces.table import Trace


def inspect(trace: Trace) -> dict[str, Any]:
    """Counts, quantiles and meaning of a trace; NaN where a figure is undefined.

    ``rate_per_s`` is rows over the span from first to last arrival and ``interarrival_cv`` the coefficient of
    variation of the gaps (1 for a Poisson stream): both only on a common clock. Waits are the recorded ones
    (``wait_before_s``). The prefix shares are of a cache that never evicts.
    """
    meta = trace.meta
    arrival_time_s = trace.arrival_time_s[~np.isnan(trace.arrival_time_s)]
    on_clock = meta.clock == "common" and len(arrival_time_s) > 1
    span_s = float(arrival_time_s.max() - arrival_time_s.min()) if on_clock else float("nan")
    gaps = np.diff(np.sort(arrival_time_s)) if on_clock else np.empty(0)
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
        "rate_per_s": len(arrival_time_s) / span_s if span_s > 0 else float("nan"),
        "interarrival_cv": float(gaps.std() / gaps.mean()) if span_s > 0 else float("nan"),
        "input_tokens": quantiles(trace.input_tokens),
        "output_tokens": quantiles(trace.output_tokens[trace.output_tokens >= 0]),
        "sessions": len(calls_per_session),
        "calls_per_session": quantiles(calls_per_session),
        "tool_wait_s": quantiles(_waits(trace, "tool")),
        "human_wait_s": quantiles(_waits(trace, "human")),
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
