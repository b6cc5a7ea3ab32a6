"""Arrivals as a sum of few clients that each come and go, not one Poisson stream.

A client sends a Poisson stream while it is active and nothing while it is not; both states last exponential
times. For windows of w seconds the index of dispersion (variance over mean) of a client's counts is

    IoD(w) = 1 + 2 c / theta * (1 - (1 - exp(-theta w)) / (theta w))

with c = (rate while active) * (share of time inactive) and theta = 1 / mean active time + 1 / mean inactive
time (the on-off case of the Markov-modulated Poisson process: Fischer and Meier-Hellstern, Performance
Evaluation 18, 1993). Clients are independent, so that of the sum is the mean over clients weighted by rate.
Two measured dispersions therefore give c and theta; the number of clients and how unequal they are is free.
That production traffic is a sum of few bursty clients: ServeGen (arXiv 2505.09999).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfold.traces.draws import exponentials, stream, zipf_shares
from kvfold.traces.table import Floats, Ints

_SHORTEST_MEMORY_S = 1e-3


@dataclass(frozen=True, slots=True)
class Clients:
    """``count`` clients whose rates fall as rank to the power ``-skew``; ``memory_s`` is 1 / theta.

    Each is active for ``active_share`` of the time: 1 is a Poisson stream. Raises ValueError unless the rate,
    the memory and the number of clients are positive and the share is in (0, 1].
    """

    rate_per_s: float
    active_share: float = 1.0
    memory_s: float = 100.0
    count: int = 20
    skew: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.rate_per_s < np.inf and 0 < self.memory_s < np.inf and self.count >= 1):
            raise ValueError(f"rate, memory and number of clients must be positive, got {self}")
        if not 0 < self.active_share <= 1:
            raise ValueError(f"active_share must be in (0, 1], got {self.active_share}")

    @property
    def dispersion_per_s(self) -> float:
        """c of the sum."""
        return (
            _mean_rate(self.rate_per_s, self.count, self.skew) * (1 - self.active_share) / self.active_share
        )

    def index_of_dispersion(self, window_s: float) -> float:
        """Of the sum, by the formula above."""
        return 1 + self.dispersion_per_s * _excess(window_s, 1 / self.memory_s)

    def arrivals(self, count: int, seed: int) -> tuple[Floats, Ints]:
        """``count`` arrivals after 0 in seconds, ascending, and the client of each.

        Each client has its own stream of random numbers. All times are stretched so that the last arrival
        is at count / rate: a few bursty clients would else miss the rate by far.
        """
        horizon_s = 1.2 * count / self.rate_per_s + 1e-9
        shares = zipf_shares(self.count, self.skew).tolist()
        while True:
            each = [self._client(at, share, horizon_s, seed) for at, share in enumerate(shares)]
            arrival_s = np.concatenate(each)
            if len(arrival_s) >= count:
                order = np.argsort(arrival_s, kind="stable")[:count]
                client = np.repeat(np.arange(self.count), [len(times) for times in each])
                arrival_s = arrival_s[order]
                return arrival_s * (count / self.rate_per_s / arrival_s[-1]), client[order]
            horizon_s *= 2

    def _client(self, client: int, share: float, horizon_s: float, seed: int) -> Floats:
        """Arrivals of one client up to the horizon; a longer one only adds to them."""
        gaps, states = (stream(seed, "arrivals", name, client) for name in ("gaps", "states"))
        on_s, off_s = self._states(horizon_s, states)
        ends_s = np.cumsum(on_s)  # of active times, on a clock that runs only while the client is active
        rate_per_s = share * self.rate_per_s / self.active_share
        active_s = _poisson(rate_per_s, min(float(ends_s[-1]), horizon_s), gaps)
        paused_s = np.concatenate([[0.0], np.cumsum(off_s)])
        arrival_s = active_s + paused_s[np.searchsorted(ends_s, active_s, side="right")]
        return arrival_s[arrival_s < horizon_s]

    def _states(self, horizon_s: float, rng: np.random.Generator) -> tuple[list[float], list[float]]:
        """Times active, each with the inactive one after it; the first is 0 for a client that starts inactive."""
        active = self.active_share
        if active == 1:
            return [horizon_s], [0.0]
        on_mean_s, off_mean_s = self.memory_s / (1 - active), self.memory_s / active
        on_s: list[float] = []
        off_s: list[float] = []
        starts_active, reached_s = rng.random() < active, 0.0
        while reached_s < horizon_s:
            on, off = exponentials(rng.random(2)).tolist()
            on_s.append(on * on_mean_s if on_s or starts_active else 0.0)
            off_s.append(off * off_mean_s)
            reached_s += on_s[-1] + off_s[-1]
        return on_s, off_s


def fitted(
    rate_per_s: float,
    short: tuple[float, float],
    long: tuple[float, float],
    count: int,
    longest_memory_s: float,
) -> Clients:
    """Clients with the given (window in seconds, index of dispersion) at a short and a long window.

    Where no on-off clients have both, the long one is met and the short one as closely as it goes: with no
    memory beyond ``longest_memory_s`` (a trace says nothing about states that outlast it).
    """
    (short_s, short_iod), (long_s, long_iod) = short, long
    if not long_iod > 1:
        return Clients(rate_per_s, count=count)
    skew = 1.0
    wanted = max(short_iod - 1, 0.0) / (long_iod - 1)
    low, high = np.log(1 / longest_memory_s), np.log(1 / _SHORTEST_MEMORY_S)
    for _ in range(100):  # the ratio of the excesses rises with theta from short / long towards 1
        middle = (low + high) / 2
        theta = float(np.exp(middle))
        low, high = (
            (middle, high) if _excess(short_s, theta) / _excess(long_s, theta) < wanted else (low, middle)
        )
    theta = float(np.exp((low + high) / 2))
    mean_rate = _mean_rate(rate_per_s, count, skew)
    dispersion_per_s = (long_iod - 1) / _excess(long_s, theta)
    return Clients(rate_per_s, mean_rate / (mean_rate + dispersion_per_s), 1 / theta, count, skew)


def _mean_rate(rate_per_s: float, count: int, skew: float) -> float:
    """Mean rate of a client, weighted by rate: what an arrival sees of its own."""
    return rate_per_s * float((zipf_shares(count, skew) ** 2).sum())


def _excess(window_s: float, theta: float) -> float:
    """(IoD - 1) / c; by its series where the difference would cancel."""
    x = theta * window_s
    inner = x / 2 - x * x / 6 if x < 1e-4 else 1 + np.expm1(-x) / x
    return float(2 / theta * inner)


def _poisson(rate_per_s: float, until_s: float, rng: np.random.Generator) -> Floats:
    chunks, reached_s = [], 0.0
    while reached_s < until_s:
        times = reached_s + np.cumsum(exponentials(rng.random(256)) / rate_per_s)
        chunks.append(times)
        reached_s = float(times[-1])
    times = np.concatenate(chunks) if chunks else np.empty(0)
    return times[times < until_s]
