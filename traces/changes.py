"""Several changes to a trace at once, always in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.traces.table import Trace

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Changes:
    """What to change; the defaults change nothing. ``seed`` is of the spread clock and of the sample."""

    infer_turns: bool = False
    spread_clock: bool = False
    window_s: Range | None = None
    model: tuple[str, ...] = ()
    tenant: tuple[str, ...] = ()
    session: tuple[int, ...] = ()
    input_tokens: Range | None = None
    output_tokens: Range | None = None
    sessions: int | None = None
    idle_s: float | None = None
    rate: float | None = None
    scale_waits: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        if self.scale_waits and self.rate is None:
            raise ValueError("waits are scaled together with the rate: give its factor")

    def apply(self, trace: Trace) -> tuple[Trace, list[str]]:
        """The changed trace and a line for each change, which are also its warnings.

        In this order: turns inferred, the clock spread, the window, the filters, the sample, the cap on idle
        time, the rate.
        Raises ValueError for a change that this trace does not allow.
        """
        steps = list(self._steps(trace))
        return (steps[-1][0] if steps else trace), [line for _, line in steps]

    def _steps(self, trace: Trace) -> Iterator[tuple[Trace, str]]:
        # here, so that the options of a command cost no NumPy
        from kvfold.traces import transform
        from kvfold.traces.columns import with_warnings

        if self.infer_turns:
            from kvfold.traces.turns import infer_turns

            trace, line = infer_turns(trace)
            yield trace, line
        if self.spread_clock:
            trace, line = transform.spread_ticks(trace, self.seed)
            trace = with_warnings(trace, line)
            yield trace, line
        if self.window_s is not None:
            trace, line = transform.window(trace, *self.window_s)
            yield trace, line
        names, ranges = (self.model, self.tenant, self.session), (self.input_tokens, self.output_tokens)
        if any((*names, *ranges)):
            trace, line = transform.keep_matching(trace, *names, *ranges)
            yield trace, line
        if self.sessions is not None:
            trace, line = transform.sample_sessions(trace, self.sessions, self.seed)
            yield trace, line
        if self.idle_s is not None:
            trace, line = transform.cap_idle(trace, self.idle_s)
            yield trace, line
        if self.rate is not None:
            yield transform.scale_rate(trace, self.rate, self.scale_waits)
