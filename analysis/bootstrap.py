"""Confidence intervals for a change between two runs of one load: a paired moving-block bootstrap.

Requests that follow one another share a queue, so they are not independent: whole blocks of consecutive units
are drawn, and a unit is a request, or a session with all of its calls. Both runs are drawn with the same
blocks (the load is the same, so most of the noise is too) and the change is taken within each draw.

Method: H. R. Künsch, The Jackknife and the Bootstrap for General Stationary Observations, Annals of
Statistics 17 (1989), with the ends joined to a circle (D. N. Politis, J. P. Romano, 1992) so that every unit
is drawn equally often on average; percentile interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int32]
#: (values [rows] or [rows, 2], counts [draws, rows]) -> statistic of each draw [draws]; NaN where undefined.
Statistic = Callable[[Floats, Counts], Floats]

METHOD = (
    "95 % percentile interval of a paired circular moving-block bootstrap "
    "(units in order of arrival, same blocks in both runs)"
)
#: Fewer units than this give no interval.
MIN_UNITS = 20
#: Draws are made in batches of about this many counts, so that memory stays below 100 MB.
_BATCH_COUNTS = 2_000_000


def mean(values: Floats, counts: Counts) -> Floats:
    """Mean of the defined (not NaN) values of each draw."""
    defined = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (counts @ np.where(defined, values, 0.0)) / (counts @ defined.astype(np.float64))


def rate(values: Floats, counts: Counts) -> Floats:
    """Total of column 0 over total of column 1, both without NaN.

    Tokens and makespan shares (kvfold.analysis.metrics.makespan_share_s) give tokens per second; with good
    requests in column 0 it is goodput, with joules over tokens energy per token.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return (counts @ values[:, 0]) / (counts @ values[:, 1])


def quantile(at: float) -> Statistic:
    """The quantile ``at`` of the defined values of each draw, by NumPy's ``linear`` method."""

    def statistic(values: Floats, counts: Counts) -> Floats:
        rows = np.argsort(values)[: np.count_nonzero(~np.isnan(values))]
        if len(rows) == 0:
            return np.full(len(counts), np.nan)
        ordered = values[rows]
        ends = np.cumsum(counts[:, rows], axis=1, dtype=np.int32)  # [draws, rows]
        size = ends[:, -1]
        position = np.maximum(size - 1, 0) * at
        lower = np.floor(position)
        low, high = (
            ordered[np.minimum((ends <= rank[:, None]).sum(axis=1), len(rows) - 1)]
            for rank in (lower, np.minimum(lower + 1, np.maximum(size - 1, 0)))
        )
        return np.where(size > 0, low + (high - low) * (position - lower), np.nan)

    return statistic


def change(baseline_values: Floats, values: Floats, statistic: Statistic) -> float | None:
    """value / baseline - 1 of the whole sample; None when either is undefined or the baseline is 0."""
    once = np.ones((1, len(values)), np.int32)
    before, after = float(statistic(baseline_values, once)[0]), float(statistic(values, once)[0])
    result = after / before - 1 if before != 0 else math.nan
    return result if math.isfinite(result) else None


def default_block(units: int) -> int:
    """Block length in units: the square root of their number, the usual choice of batch means."""
    return max(1, math.isqrt(units))


def ci95(
    baseline_values: Floats,
    values: Floats,
    statistic: Statistic,
    block: int | None = None,
    seed: int = 0,
    replicates: int = 1000,
    unit: NDArray[np.integer] | None = None,
) -> tuple[float, float] | None:
    """95 % confidence interval of value / baseline - 1.

    Rows of both arrays belong to the same requests in order of arrival; NaN is undefined. ``unit`` gives each
    row's session (any integers; units are drawn in order of first appearance), by default each row is its own
    unit. ``block`` is in units, by default ``default_block``. The same arguments give the same bits.

    None when there are fewer than ``MIN_UNITS`` units, or when the change is undefined in any draw.
    Raises ValueError when the arrays differ in length or ``block`` or ``replicates`` is not positive.
    """
    rows = len(values)
    if len(baseline_values) != rows or (unit is not None and len(unit) != rows):
        raise ValueError(f"both runs must have one value per request, got {len(baseline_values)} and {rows}")
    member, units = (None, rows) if unit is None else _in_order(unit)
    block = default_block(units) if block is None else block
    if block < 1 or replicates < 1:
        raise ValueError(f"block and replicates must be at least 1, got {block} and {replicates}")
    if units < MIN_UNITS:
        return None
    block = min(block, units)
    rng = np.random.default_rng(seed)
    batch = max(1, _BATCH_COUNTS // rows)
    changes = []
    for first in range(0, replicates, batch):
        counts = _draw(rng, units, block, min(batch, replicates - first))
        if member is not None:
            counts = counts[:, member]
        with np.errstate(invalid="ignore", divide="ignore"):
            changes.append(statistic(values, counts) / statistic(baseline_values, counts) - 1)
    drawn = np.concatenate(changes)
    if not np.isfinite(drawn).all():
        return None
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _draw(rng: np.random.Generator, units: int, block: int, draws: int) -> Counts:
    """How often each unit is drawn, [draws, units]: blocks from all over the circle, the last cut short."""
    blocks = -(-units // block)
    lengths = np.full(blocks, block)
    lengths[-1] = units - block * (blocks - 1)
    starts = rng.integers(0, units, (draws, blocks))
    ends = starts + lengths
    # +1 where a block starts, -1 where it ends; a block over the end goes on at 0
    edges = np.zeros((draws, units + 1), np.int32)
    row = np.broadcast_to(np.arange(draws)[:, None], starts.shape)
    np.add.at(edges, (row, starts), 1)
    np.add.at(edges, (row, np.where(ends > units, ends - units, ends)), -1)
    edges[:, 0] += (ends > units).sum(axis=1, dtype=np.int32)
    return np.cumsum(edges[:, :-1], axis=1, dtype=np.int32)


def _in_order(unit: NDArray[np.integer]) -> tuple[NDArray[np.intp], int]:
    """Units numbered by first appearance, for each row, and how many there are."""
    _, first, member = np.unique(unit, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[member], len(first)
