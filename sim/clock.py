"""SimPy's environment with a clock in integer femtoseconds."""

from __future__ import annotations

from math import inf
from typing import cast

import simpy
from simpy.core import EventPriority


class Clock(simpy.Environment):
    """Delays must be integers, so that times add without rounding."""

    @property
    def now_fs(self) -> int:
        return cast(int, self.now)

    def next_event_fs(self) -> int | None:
        """Femtoseconds until the next event, None if there is none."""
        at = self.peek()
        return None if at == inf else cast(int, at) - self.now_fs


class StepEnd(simpy.Event):
    """The end of an engine step: fires after every arrival of the same instant."""

    def __init__(self, clock: Clock, delay_fs: int) -> None:
        super().__init__(clock)
        self._ok = True
        self._value = None
        clock.schedule(self, priority=EventPriority(2), delay=delay_fs)
