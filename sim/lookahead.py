"""An engine that schedules ahead: a step is put together while the one before it still runs.

vLLM calls it asynchronous scheduling. It hides the host's work, and it costs a step of latency: a step knows
neither the calls that arrived while its predecessor ran nor the room of those that ended with it. A call that
comes to an engine at rest starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfold.sim.engine import Engine
from kvfold.sim.lockstep import serve_together
from kvfold.sim.scheduler import next_step, release

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    import simpy

    from kvfold.sim.decode_set import Sequence
    from kvfold.sim.scheduler import Step


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that was put together: its tokens, what it takes alone, and where its attention's cost comes from."""

    step: Step
    tokens: int
    alone_fs: int
    origin: str


class LookaheadEngine(Engine):
    """One replica, one event per step; KV of ended calls goes to the prefix cache (retention `lru`)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._unseen: list[int] = []  # calls that arrived since the last step began
        self._leaving: list[Sequence] = []  # ended with the last step, their room not given back yet

    def offer(self, call: int) -> None:
        super().offer(call)
        self._unseen.append(call)

    def serve(self) -> Generator[simpy.Event, None, None]:
        return serve_together(self._clock, [self])

    def begin(self) -> Begun | None:
        """Put the next step together; None where there is nothing to compute."""
        state, now = self.state, self._clock.now_fs
        rest = len(state.running) - len(self._leaving)
        short = state.decoding.bytes_at(1) > state.pool.available_bytes()
        if rest == 0 or (rest == 1 and short):
            self._let_go(now)  # nothing else runs, so the next step waits for what has ended
        if not state.running:
            self._unseen.clear()
        if not state.running and not state.waiting:
            return None
        unseen = [waiting for call in self._unseen if (waiting := state.waiting.give_up(call)) is not None]
        self._unseen.clear()
        step = next_step(state, now)
        for waiting in unseen:
            state.waiting.push(waiting)
        if step.admitted or step.preempted:
            self._admitted(step, now)
        self._let_go(now)
        _, alone_fs, _ = self._stretch(step)
        tokens = state.decoding.count + sum(chunk.tokens for _, chunk in step.chunks)
        return Begun(step, tokens, alone_fs, self._recorder.origin)

    def take(self, begun: Begun, length_fs: int) -> None:
        """The step takes so long."""
        self._recorder.origin = begun.origin
        self._recorder.stretch(self._index, self.state, begun.step, self._clock.now_fs, 1, length_fs, 0)

    def end(self, begun: Begun) -> None:
        """The step is over: hand out what it computed."""
        self._recorder.account(self._index, self.state, self._clock.now_fs)
        self._hand_out(begun.step, 1)

    def rest(self, called: simpy.Event) -> None:
        """Nothing to do until a call comes, which the event then says."""
        self._idle = called

    def wake(self) -> None:
        self._idle = None
        self._recorder.account(self._index, self.state, self._clock.now_fs)

    def _like_steps(self, _: Step) -> int:
        return 1

    def _complete(self, sequence: Sequence, now: int) -> None:
        """The last token is out; the step that was put together meanwhile does not know that there is room."""
        decoding = self.state.decoding
        if sequence.decoding:
            length = decoding.length(sequence)
            decoding.leave(sequence)
            sequence.prompt_tokens = length
        sequence.priority = -1  # the last to be preempted
        self._leaving.append(sequence)
        self._recorder.completed(sequence.call, now)
        self._forget(sequence.call)
        self._ended(sequence.call)

    def _let_go(self, now: int) -> None:
        for sequence in self._leaving:
            release(self.state, sequence, now)
        self._leaving.clear()
