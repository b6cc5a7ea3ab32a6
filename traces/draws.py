"""Random numbers of synthetic traces: quantile tables, and one independent stream for each source.

Only uniform draws are taken from a generator, and every distribution is inverted here, so that a seed gives
the same trace on every platform and NumPy version. A stream depends on the seed and its own name alone: what
one source draws, or how much of it, changes no other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log1p
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.table import Floats

_CHUNK = 1_024
#: Shares at which `Quantiles.of` takes the values of a sample; both tails are finer than the middle.
MARKS = (
    *(0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75),
    *(0.8, 0.85, 0.875, 0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995, 0.999, 1),
)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution by knots (share, value >= 0); between two knots log(1 + value) is linear in the share,
    which keeps heavy tails and allows 0.

    Raises ValueError unless shares rise from 0 to 1 and values do not fall.
    """

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares, values = zip(*self.knots, strict=True)
        rises = all(a < b for a, b in pairwise(shares)) and all(a <= b for a, b in pairwise(values))
        if (shares[0], shares[-1]) != (0, 1) or not rises or values[0] < 0:
            raise ValueError(f"quantiles must rise over shares from 0 to 1, got {self.knots}")

    @classmethod
    def of(cls, sample: NDArray[np.generic]) -> Quantiles:
        """The quantiles of a sample at MARKS; the upper end is set so that the mean is the sample's, as far
        as it can be. Raises ValueError for an empty sample.
        """
        if not len(sample):
            raise ValueError("quantiles need a sample, got none")
        values = np.quantile(sample.astype(np.float64), MARKS).tolist()
        table = cls(tuple(zip(MARKS, values, strict=True)))
        low, high = values[-2], values[-1] + 100 * (values[-1] - values[-2])
        if table.with_end(low).mean() >= sample.mean():
            return table.with_end(low)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if table.with_end(middle).mean() < sample.mean() else (low, middle)
        return table.with_end(high)

    @classmethod
    def constant(cls, value: float) -> Quantiles:
        return cls(((0, value), (1, value)))

    def at(self, shares: Floats) -> Floats:
        known, values = zip(*self.knots, strict=True)
        return np.expm1(np.interp(shares, known, np.log1p(values)))

    def value(self, share: float) -> float:
        return float(self.at(np.array([share]))[0])

    def share_of(self, value: float) -> float:
        """Share of the draws that are at most ``value``."""
        shares, values = zip(*self.knots, strict=True)
        if value >= values[-1]:
            return 1.0
        return float(np.interp(np.log1p(value), np.log1p(values), shares))

    def mean(self) -> float:
        """Exact: between two knots 1 + value has the logarithmic mean of its ends."""
        total = 0.0
        for (share, low), (next_share, high) in pairwise(self.knots):
            ratio = log1p(high) - log1p(low)
            total += (next_share - share) * ((high - low) / ratio - 1 if ratio > 1e-9 else low)
        return total

    def up_to(self, value: float) -> Quantiles:
        """The same table with no value above this one."""
        return Quantiles(tuple((share, min(each, value)) for share, each in self.knots))

    def with_end(self, value: float) -> Quantiles:
        """The same table with another upper end."""
        return Quantiles((*self.knots[:-1], (1, value)))


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of one source, named by texts and numbers."""
    key = [name if isinstance(name, int) else crc32(name.encode()) for name in names]
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def uniforms(seed: int, *names: str | int) -> Iterator[float]:
    """Endless draws from [0, 1) of the named stream."""
    rng = stream(seed, *names)
    while True:
        yield from rng.random(_CHUNK).tolist()


def draws(table: Quantiles, seed: int, *names: str | int) -> Iterator[float]:
    """Endless draws from ``table`` by the named stream."""
    rng = stream(seed, *names)
    while True:
        yield from table.at(rng.random(_CHUNK)).tolist()


def chosen(shares: Sequence[float], at: float) -> int:
    """Which of the shares, laid end to end, the point ``at`` of [0, 1) falls into."""
    return min(bisect_right(list(accumulate(shares)), at), len(shares) - 1)


def rounded(seconds: float) -> float:
    """Seconds to the resolution of synthetic traces, a millisecond."""
    return round(seconds, 3)


def zipf_shares(count: int, exponent: float) -> Floats:
    """Shares of ``count`` ranks that fall as rank to the power ``-exponent``; they sum to 1."""
    weights = np.arange(1.0, count + 1) ** -exponent
    return weights / weights.sum()


def exponentials(uniform: Floats | Sequence[float]) -> Floats:
    """Unit exponential draws from uniform ones in [0, 1)."""
    return -np.log1p(-np.asarray(uniform))
