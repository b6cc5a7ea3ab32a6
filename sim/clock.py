"""SimPy's environment with a clock in integer femtoseconds."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import simpy
from simpy.core import EventPriority


class Clock(simpy.Environment):
    """Delays must be integers, so that times add without rounding."""

    _now: int

    now_fs = property(attrgetter("_now"))  # looked up several times in every step

    def call_in(self, delay_fs: int, callback: Callable[[Any], None], value: Any) -> None:
        """Call back with an event of this value when the delay is over."""
        simpy.Timeout(self, delay_fs, value).callbacks.append(callback)

    def next_event_fs(self) -> int | None:
        """Femtoseconds until the next event, None if there is none."""
        return cast(int, self._queue[0][0]) - self._now if self._queue else None

    def leap(self, delay_fs: int) -> bool:
        """Let the time pass at once where nothing else happens in it or at its end; whether it did."""
        until = self._now + delay_fs
        if self._queue and self._queue[0][0] <= until:
            return False
        self._now = until
        return True


#: After SimPy's own urgent (0) and normal (1) events of the same instant.
LATE = EventPriority(2)


class StepEnd(simpy.Event):
    """The end of an engine step: fires after every arrival of the same instant."""

    def __init__(self, clock: Clock, delay_fs: int) -> None:
        super().__init__(clock)
        self._ok = True
        self._value = None
        clock.schedule(self, priority=LATE, delay=delay_fs)
