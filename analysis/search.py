"""Searches over replays: the most live sessions, or the highest load, at which the SLO still holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from kvfold.analysis.slo import good

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.analysis.slo import Slo
    from kvfold.sim.run import Run

#: A load is served when at least this share of the offered requests meets the SLO.
ATTAINMENT = 0.99
#: The load search stops after so many replays, or when the bracket is this narrow.
MAX_REPLAYS = 8
BRACKET = 1.03
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


def judge(load: float, run: Run, slo: Slo) -> Outcome:
    """Share of good requests among those offered that the model's context can hold at all."""
    too_long = run.reject_reasons.get("longer_than_model_context", 0)
    offered = len(run.calls.outcome) - too_long
    return Outcome(load, run, float(good(slo, run.calls).sum()) / offered if offered else 1.0)


def highest_load(replay: Callable[[float], Outcome], start: float, gate: float, whole: bool) -> Found:
    """Bisection (in ratio) for the highest load that is served, doubling or halving until it is bracketed.

    A load is served when the attainment is at least `gate`. `whole`: loads are whole numbers from 1 up (live
    sessions).
    """
    best: Outcome | None = None
    failed: Outcome | None = None
    tried: list[Outcome] = []
    load = max(1, round(start)) if whole else start
    while len(tried) < MAX_REPLAYS:
        outcome = replay(load)
        tried.append(outcome)
        if outcome.attainment >= gate:
            if failed is None and best is not None and _replay_s(outcome) > (1 - EXHAUSTED) * _replay_s(best):
                return Found(best, None, tuple(tried), exhausted=True)
            best = outcome
        else:
            failed = outcome
        if best is None and failed is not None:
            load = failed.load / 2
        elif best is not None and failed is None:
            load = best.load * 2
        elif best is not None and failed is not None:
            if failed.load / best.load <= BRACKET or (whole and failed.load - best.load <= 1):
                break
            load = sqrt(best.load * failed.load)
        if whole:
            load = round(load)
            if load < 1 or load in (other.load for other in tried):
                break
    return Found(best, failed.load if failed else None, tuple(tried))


def _replay_s(outcome: Outcome) -> float:
    """Simulated time from the first arrival to the last token."""
    calls = outcome.run.calls
    return float(np.nanmax(calls.last_token_s) - np.nanmin(calls.arrival_s))


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
