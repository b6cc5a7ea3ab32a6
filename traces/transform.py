"""Changes to a trace that a user asks for or is told of; each says what it changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvfold.traces.table import Trace


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
