"""SimPy's environment with a clock in integer femtoseconds."""

from __future__ import annotations

from math import inf
from typing import cast

import simpy
from simpy.core import EventPriority


class Clock(simpy.Environment):
    """Delays must be integers, so that times add without rounding."""

    _now: int

    @property
    def now_fs(self) -> int:
        return self._now

    def next_event_fs(self) -> int | None:
        """Femtoseconds until the next event, None if there is none."""
        at = self.peek()
        return None if at == inf else cast(int, at) - self._now


#: After SimPy's own urgent (0) and normal (1) events of the same instant.
LATE = EventPriority(2)


class StepEnd(simpy.Event):
    """The end of an engine step: fires after every arrival of the same instant."""

    def __init__(self, clock: Clock, delay_fs: int) -> None:
        super().__init__(clock)
        self._ok = True
        self._value = None
        clock.schedule(self, priority=LATE, delay=delay_fs)
