"""How bursty arrivals are: counts in windows of equal length, against those of a Poisson stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfold.traces.table import Floats, Trace


@dataclass(frozen=True, slots=True)
class Burst:
    """Of counts in windows from the first arrival on; the last window is cut short by the last arrival.

    ``dispersion`` is the index of dispersion, variance over mean: 1 for a Poisson stream.
    """

    window_s: float
    dispersion: float
    peak_over_mean: float


def arrivals_of(trace: Trace) -> Floats:
    """Known arrivals on a clock that all sessions share, in ascending order; none if there is no such clock."""
    known = trace.arrival_time_s[~np.isnan(trace.arrival_time_s)]
    return np.sort(known) if trace.meta.clock == "common" else np.empty(0)


def burst(arrival_s: Floats, window_s: float) -> Burst:
    """Of ascending arrivals; NaN where they fill fewer than two windows."""
    window = ((arrival_s - arrival_s[0]) // window_s).astype(np.int64) if len(arrival_s) else np.empty(0)
    if not len(window) or window[-1] < 1:
        return Burst(window_s, float("nan"), float("nan"))
    # windows without arrivals add nothing to the sums but count in the mean
    _, counts = np.unique(window, return_counts=True)
    windows, mean = int(window[-1]) + 1, len(arrival_s) / (int(window[-1]) + 1)
    variance = float((counts.astype(np.float64) ** 2).sum()) / windows - mean**2
    return Burst(window_s, variance / mean, float(counts.max()) / mean)


def gap_cv(arrival_s: Floats) -> float:
    """Coefficient of variation of the gaps between ascending arrivals: 1 for a Poisson stream."""
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean()) if len(gaps) and arrival_s[-1] > arrival_s[0] else float("nan")


def has_coarse_clock(trace: Trace) -> bool:
    """Whether most arrivals share their instant with another, so that the clock ticked and the load did not."""
    if trace.meta.clock != "common" or len(trace) < 100:
        return False
    return int((np.diff(trace.arrival_time_s) == 0).sum()) > (len(trace) - 1) / 2
