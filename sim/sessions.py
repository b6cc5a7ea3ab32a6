"""When calls arrive: roots on the trace's clock or one live session after another, children when parents end.

A call with parents arrives when all of them have ended and each edge's wait is over, so a slower engine delays a
session as it does in life. Waits that the trace does not know are replayed as 0 and counted.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.sim.errors import ConfigError
from kvfold.sim.run import FS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.sim.clock import Clock
    from kvfold.traces.table import Trace


@dataclass(frozen=True, slots=True)
class Load:
    """How a trace is offered. With `live_sessions` N sessions (or single calls) are live at once, in trace order,
    each followed by the next when it ends; without, roots arrive on the trace's clock, `rate_scale` times as fast.
    `open_loop` replays recorded arrivals for children too. `rotation` gives session i the start (or the turn) of
    session i + rotation, so that other sessions meet: another draw of the same load.
    """

    live_sessions: int | None = None
    rate_scale: float = 1.0
    open_loop: bool = False
    rotation: int = 0

    def __post_init__(self) -> None:
        if self.live_sessions is not None and self.live_sessions < 1:
            raise ConfigError(f"the number of live sessions must be at least 1, got {self.live_sessions}")
        if not (0 < self.rate_scale < float("inf")):
            raise ConfigError(f"rate scale must be a positive number, got {self.rate_scale}")
        if self.open_loop and self.live_sessions is not None:
            raise ConfigError("an open loop has no number of live sessions; give one of the two")


class Sessions:
    """Arrivals as SimPy events. `arrive(call)` is called at each arrival and must lead to `ended(call)`."""

    def __init__(self, clock: Clock, trace: Trace, load: Load, arrive: Callable[[int], None]) -> None:
        if load.live_sessions is None and trace.meta.clock != "common":
            raise ConfigError(
                f"{trace.meta.source} has no clock common to its sessions, so it cannot be replayed at recorded "
                "arrivals; give --concurrency N for N live sessions"
            )
        self.unknown_waits = 0
        self.wait_before_s = array("d", [float("nan")]) * len(trace)
        self._clock = clock
        self._arrive = arrive
        self._load = load
        self._parents_left = [0] * len(trace)
        self._ready_fs = [0] * len(trace)
        self._children: dict[int, list[tuple[int, int]]] = {}
        if not load.open_loop:
            self._link(trace)
        self._roots = [call for call, parents in enumerate(self._parents_left) if parents == 0]
        if np.isnan(trace.arrival_time_s[self._roots]).any():
            rule = "every call that follows no other needs an arrival time"
            raise ConfigError(f"{trace.meta.source}: {rule}; replay the sessions closed-loop")
        arrivals_s = np.nan_to_num(trace.arrival_time_s / load.rate_scale)  # NaN where a parent decides
        self._offset_fs = [round(arrival * FS_PER_S) for arrival in arrivals_s.tolist()]
        self._session_of, self._session_roots, self._calls_left = self._group(trace)
        if load.rotation:
            self._rotate(load.rotation)
        self._next_session = 0
        self._ended: deque[int] = deque()

    def start(self) -> None:
        """Offer the first calls; a call that is refused at once ends within this."""
        if self._load.live_sessions is None:
            self._schedule_root(0)
            return
        for _ in range(min(self._load.live_sessions, len(self._session_roots))):
            self._start_session()

    def ended(self, call: int) -> None:
        """The call completed or was refused: its children become due, and its session may end."""
        if self._load.live_sessions is None and call not in self._children:
            return  # nothing waits for it
        self._ended.append(call)
        if len(self._ended) > 1:
            return  # the loop below, further up the stack, takes it: chains of refusals must not recurse
        while self._ended:
            self._end_one(self._ended[0])
            self._ended.popleft()

    def _end_one(self, call: int) -> None:
        now = self._clock.now_fs
        for child, wait_fs in self._children.get(call, ()):
            self._parents_left[child] -= 1
            if now + wait_fs >= self._ready_fs[child]:
                self._ready_fs[child] = now + wait_fs
                self.wait_before_s[child] = wait_fs / FS_PER_S
            if self._parents_left[child] == 0:
                self._at(max(self._ready_fs[child], now), [child])
        if self._load.live_sessions is not None:
            session = self._session_of[call]
            self._calls_left[session] -= 1
            if self._calls_left[session] == 0:
                self._start_session()

    def _start_session(self) -> None:
        if self._next_session < len(self._session_roots):
            roots = self._session_roots[self._next_session]
            self._next_session += 1
            origin = self._offset_fs[roots[0]]
            for root in roots:
                self._at(self._clock.now_fs + max(0, self._offset_fs[root] - origin), [root])

    def _schedule_root(self, position: int) -> None:
        """All roots of the next instant in one event, and the event after it from there."""
        if position >= len(self._roots):
            return
        at = self._offset_fs[self._roots[position]]
        end = position
        while end < len(self._roots) and self._offset_fs[self._roots[end]] == at:
            end += 1
        self._clock.call_in(max(0, at - self._clock.now_fs), self._on_roots, (position, end))

    def _on_roots(self, event: Any) -> None:
        position, end = event.value
        self._schedule_root(end)
        for root in self._roots[position:end]:
            self._arrive(root)

    def _at(self, time_fs: int, calls: list[int]) -> None:
        if time_fs <= self._clock.now_fs:
            for call in calls:
                self._arrive(call)
            return
        self._clock.call_in(time_fs - self._clock.now_fs, self._on_calls, calls)

    def _on_calls(self, event: Any) -> None:
        for call in event.value:
            self._arrive(call)

    def _link(self, trace: Trace) -> None:
        waits = trace.edge_wait_s
        self.unknown_waits = int(np.isnan(waits).sum())
        waits_fs = [round(wait * FS_PER_S) for wait in np.nan_to_num(waits, nan=0.0).tolist()]
        for child, parent, wait_fs in zip(
            trace.edge_child.tolist(), trace.edge_parent.tolist(), waits_fs, strict=True
        ):
            self._children.setdefault(parent, []).append((child, wait_fs))
            self._parents_left[child] += 1

    def _rotate(self, by: int) -> None:
        """Move every session to the start of another; in a closed loop only their order matters."""
        first = [self._offset_fs[roots[0]] for roots in self._session_roots]
        for session, roots in enumerate(self._session_roots):
            moved_fs = first[(session + by) % len(first)] - first[session]
            for root in roots:
                self._offset_fs[root] += moved_fs
        turn = len(first) - by % len(first)
        self._session_roots = self._session_roots[turn:] + self._session_roots[:turn]
        self._roots.sort(key=lambda root: (self._offset_fs[root], root))

    def _group(self, trace: Trace) -> tuple[array[int], list[tuple[int, ...]], array[int]]:
        """Sessions in order of their first call; a single-shot call is a session of its own."""
        session_of, calls = array("q"), array("q")
        roots: list[tuple[int, ...]] = []
        known: dict[int, int] = {}
        for call, session_id in enumerate(trace.session_id.tolist()):
            session = known.get(session_id, -1) if session_id >= 0 else -1
            if session < 0:
                session = len(calls)
                calls.append(0)
                roots.append(())
                if session_id >= 0:
                    known[session_id] = session
            session_of.append(session)
            calls[session] += 1
            if self._parents_left[call] == 0:
                roots[session] += (call,)
        if not all(roots):
            raise ConfigError(
                f"{trace.meta.source}: every session needs a call without parents to start with"
            )
        return session_of, roots, calls
