"""Searches over replays: the most live sessions, or the highest load, at which the SLO still holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

from kvfold.analysis.slo import good

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.analysis.slo import Slo
    from kvfold.sim.run import Run

#: A load is served when at least this share of the offered requests meets the SLO.
ATTAINMENT = 0.99
#: The load search stops when the bracket is this narrow (or, of whole loads, when they are neighbours).
BRACKET = 1.03
#: First stride of a search that starts near its answer, and of one that starts anywhere; no stride is longer than
#: FAR. NEAR is less than BRACKET, so that one stride is a bracket narrow enough.
NEAR, FAR = 1.029, 2.0
#: No lower load is tried: sessions that start so far apart hardly ever meet.
LOWEST = 2.0**-12
#: A trace is exhausted when twice the load shortens its replay by no more than this share: it holds too little.
EXHAUSTED = 0.03


@dataclass(frozen=True, slots=True)
class Outcome:
    """One replay at one load. `attainment` leaves out requests longer than the model's context."""

    load: float
    run: Run
    attainment: float


@dataclass(frozen=True, slots=True)
class Found:
    """`best` is the highest load that was served (None: none was), `failed_load` the lowest that was not.

    `exhausted`: the trace holds too little work to load the engine to its limit, so `best` is no limit.
    """

    best: Outcome | None
    failed_load: float | None
    tried: tuple[Outcome, ...]
    exhausted: bool = False

    @property
    def is_limit(self) -> bool:
        """Whether the highest load lies between one that was served and one that was not."""
        return self.best is not None and self.failed_load is not None

    @property
    def resolution(self) -> float:
        """By which share the lowest load that failed is above the highest that was served; NaN without both."""
        if self.best is None or self.failed_load is None:
            return float("nan")
        return self.failed_load / self.best.load - 1

    @property
    def lowest(self) -> Outcome:
        """The replay at the lowest load that was tried."""
        return min(self.tried, key=lambda outcome: outcome.load)

    @property
    def failed(self) -> Outcome | None:
        """The replay at the lowest load that was not served."""
        return next((outcome for outcome in self.tried if outcome.load == self.failed_load), None)


def judge(load: float, run: Run, slo: Slo) -> Outcome:
    """Share of good requests among those offered that the model's context can hold at all."""
    too_long = run.reject_reasons.get("longer_than_model_context", 0)
    offered = len(run.calls.outcome) - too_long
    return Outcome(load, run, float(good(slo, run.calls).sum()) / offered if offered else 1.0)


def highest_load(
    replay: Callable[[float], Outcome], start: float, gate: float, whole: bool, stride: float = FAR
) -> Found:
    """The highest load that is served: strides from `start`, each twice as long, up or down, then bisection.

    A load is served when the attainment is at least `gate`. `whole`: loads are whole numbers from 1 up (live
    sessions). Strides and bisection are ratios.
    """
    best: Outcome | None = None
    failed: Outcome | None = None
    tried: list[Outcome] = []
    load = max(1, round(start)) if whole else start
    while True:
        outcome = replay(load)
        tried.append(outcome)
        if outcome.attainment >= gate:
            if failed is None and _is_exhausted(tried):
                return Found(best, None, tuple(tried), exhausted=True)
            best = outcome
        else:
            failed = outcome
        if best is not None and failed is not None:
            load = sqrt(best.load * failed.load)
            if failed.load / best.load <= BRACKET or (whole and failed.load - best.load <= 1):
                break
        else:
            load = outcome.load * stride if failed is None else outcome.load / stride
            stride = min(stride**2, FAR)
        if whole:
            low, high = best.load if best else 0, failed.load if failed else inf
            load = round(min(max(load, low + 1), high - 1))
        if load < (1 if whole else LOWEST):
            break
    return Found(best, failed.load if failed else None, tuple(tried))


def _is_exhausted(served: list[Outcome]) -> bool:
    """Whether the last of these loads, all served and ascending, ends no sooner than half of it did."""
    last = served[-1]
    below = [outcome for outcome in served if outcome.load <= last.load / 2]
    return bool(below) and not _replay_s(last) < (1 - EXHAUSTED) * _replay_s(below[-1])


def _replay_s(outcome: Outcome) -> float:
    """Simulated time from the first arrival to the last token, NaN where nothing ran."""
    calls = outcome.run.calls
    return float(np.fmax.reduce(calls.last_token_s) - np.fmin.reduce(calls.arrival_s))


def largest_power_of_two(replay: Callable[[float], Outcome], start: int, gate: float, most: int) -> Found:
    """The largest power of two, up to `most`, at which a closed loop of so many sessions is served.

    Doubles from `start` while it is served, or halves until it is.
    """
    best: Outcome | None = None
    failed: Outcome | None = None
    tried: list[Outcome] = []
    load = 1
    while load * 2 <= min(start, most):
        load *= 2
    while 1 <= load <= most:
        outcome = replay(load)
        tried.append(outcome)
        if outcome.attainment >= gate:
            best = outcome
            if failed is not None:
                break
            load *= 2
        else:
            failed = outcome
            if best is not None:
                break
            load //= 2
    return Found(best, failed.load if failed else None, tuple(tried))
