"""How much more load a format serves on the same bytes, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.analysis.search import Found

#: Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom, then the normal one.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 1.96)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Highest loads of baseline and format (means over seeds, None: none served) and the change between them.

    `change` is None unless every search of both found a limit; `ci95` is a t interval of the logarithm of the
    ratio over seeds, None with one seed: how finely one search resolves says nothing about another draw of the
    load. `exhausted`: some trace held too little work. `resolution`: of the coarsest search, by which share the
    lowest load that failed is above the highest that was served; NaN where a search has no such pair.
    """

    baseline: float | None
    value: float | None
    change: float | None
    ci95: tuple[float, float] | None
    exhausted: bool
    searches: int
    resolution: float


def capacity(before: Sequence[Found], after: Sequence[Found]) -> Capacity:
    """Paired by seed: both formats saw the same rotation of the sessions."""
    loads = [[found.best.load for found in each if found.best is not None] for each in (before, after)]
    known = [float(np.mean(each)) if len(each) == len(before) else None for each in loads]
    limits = all(found.is_limit for found in (*before, *after))
    change = ci95 = None
    if limits and known[0] and known[1]:
        change = known[1] / known[0] - 1
        ci95 = _over_seeds(*loads) if len(before) > 1 else None
    return Capacity(
        baseline=known[0],
        value=known[1],
        change=change,
        ci95=ci95,
        exhausted=any(found.exhausted for found in (*before, *after)),
        searches=len(before) + len(after),
        resolution=max(found.resolution for found in (*before, *after)) if limits else float("nan"),
    )


def _over_seeds(before: list[float], after: list[float]) -> tuple[float, float]:
    ratios = np.log(np.array(after) / np.array(before))
    t95 = _T95[min(len(ratios) - 2, len(_T95) - 1)]
    half = t95 * ratios.std(ddof=1) / np.sqrt(len(ratios))
    low, high = np.exp(ratios.mean() + np.array([-half, half])) - 1
    return float(low), float(high)
