"""One serving engine as a discrete-event simulation on SimPy.

Between two events that change what a step computes (an arrival, the end of an output or a prompt, a full window,
an empty pool) steps cost d, d + g, d + 2g, ...: one SimPy event covers the whole stretch. With `stepwise` every
step is an event of its own, and every record comes out the same, because all times are integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isqrt
from typing import TYPE_CHECKING

from kvfold.sim.clock import Clock, StepEnd
from kvfold.sim.decode_set import DecodeSet
from kvfold.sim.errors import ConfigError
from kvfold.sim.pool import KvPool
from kvfold.sim.prefix import PrefixTree
from kvfold.sim.recorder import Recorder
from kvfold.sim.scheduler import Limits, State, Waiting, end_prompt, next_step, release
from kvfold.sim.sessions import Load, Sessions

if TYPE_CHECKING:
    from collections.abc import Generator

    import simpy

    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.run import Run
    from kvfold.sim.scheduler import Step
    from kvfold.sim.step import StepCost
    from kvfold.traces.table import Trace


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on. `max_context_tokens` bounds prompt plus output of a call."""

    trace: Trace
    cost: StepCost
    budget: MemoryBudget
    max_context_tokens: int
    load: Load = field(default_factory=Load)
    limits: Limits = field(default_factory=Limits)
    prefix_caching: bool = True
    stepwise: bool = False

    def __post_init__(self) -> None:
        if self.limits.max_num_batched_tokens < self.limits.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.limits.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.limits.max_num_seqs}), or running sequences would starve"
            )
        if self.limits.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, got {self.limits.max_num_seqs}")


def run(scenario: Scenario) -> Run:
    """Replay the trace and return its records; a pure function of the scenario."""
    clock = Clock()
    engine = _Engine(clock, scenario)
    engine.sessions.start()
    clock.process(engine.serve())
    clock.run()
    return engine.recorder.finish(scenario, engine.sessions.unknown_waits, engine.sessions.wait_before_fs)


class _Engine:
    def __init__(self, clock: Clock, scenario: Scenario) -> None:
        trace, budget = scenario.trace, scenario.budget
        shares = scenario.prefix_caching and trace.meta.hash_scope != "none"
        tree = PrefixTree(trace, budget.unit_tokens) if shares else None
        self._clock = clock
        self._cost = scenario.cost
        self._stepwise = scenario.stepwise
        self._max_context_tokens = scenario.max_context_tokens
        self._window = scenario.cost.model.window_tokens
        self._input_tokens = trace.input_tokens.tolist()
        # a call without output still ends a prompt, which gives one token
        self._output_tokens = [max(1, tokens) for tokens in trace.output_tokens.tolist()]
        self._idle: simpy.Event | None = None
        self._state = State(
            scenario.limits,
            KvPool(budget, tree),
            DecodeSet(budget.unit_tokens, budget.packed, self._window),
        )
        self.recorder = Recorder(trace)
        self.sessions = Sessions(clock, trace, scenario.load, self._arrive)

    def serve(self) -> Generator[simpy.Event, None, None]:
        """The engine's loop: schedule, let a stretch of steps pass, hand out what it computed."""
        clock, state = self._clock, self._state
        while True:
            if not state.running and not state.waiting:
                if clock.next_event_fs() is None:
                    return
                self._idle = clock.event()
                yield self._idle
                self._idle = None
                yield StepEnd(clock, 0)
                continue
            step = next_step(state, clock.now_fs)
            self.recorder.scheduled(step, state.pool.unit_tokens, clock.now_fs)
            steps, first_fs, growth_fs = self._stretch(step)
            duration_fs = steps * first_fs + growth_fs * (steps * (steps - 1) // 2)
            self.recorder.stretch(state, step, clock.now_fs, steps, first_fs, growth_fs)
            yield StepEnd(clock, duration_fs)
            self._hand_out(step, steps)

    def _arrive(self, call: int) -> None:
        reason = self._refusal(call)
        if reason is not None:
            self.recorder.refused(call, reason, self._clock.now_fs)
            self.sessions.ended(call)
            return
        self.recorder.arrived(call, self._clock.now_fs)
        self._state.waiting.append(Waiting(call, self._input_tokens[call], self._output_tokens[call]))
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _refusal(self, call: int) -> str | None:
        tokens = self._input_tokens[call] + self._output_tokens[call]
        if tokens > self._max_context_tokens:
            return "longer_than_model_context"
        if not self._state.pool.fits_alone(tokens):
            return "larger_than_kv_pool"
        return None

    def _stretch(self, step: Step) -> tuple[int, int, int]:
        """(number of steps, femtoseconds of the first, growth per step) of the longest run of like steps."""
        state, cost, decoding = self._state, self._cost, self._state.decoding
        chunks = [chunk for _, chunk in step.chunks]
        prompt_tokens = sum(chunk.tokens for chunk in chunks)
        first_fs = cost.base_fs(decoding.count, prompt_tokens, sum(chunk.last for chunk in chunks))
        first_fs += cost.kv_token_fs * decoding.kv_tokens + cost.window_token_fs * decoding.window_tokens
        first_fs += sum(cost.chunk_fs(chunk) for chunk in chunks)
        most = self._like_steps(step)
        if most == 1:
            return 1, first_fs, 0
        growth_fs = cost.kv_token_fs * decoding.count + cost.window_token_fs * decoding.growing_windows
        if chunks:
            growth_fs += cost.history_token_fs(chunks[0].tokens) * chunks[0].tokens
        taken = decoding.units_in(1)
        if decoding.count:
            most = decoding.steps_within(state.pool.available_units() + taken, most)
        if not step.blocked:
            most = self._steps_until_arrival(first_fs, growth_fs, most)
        state.pool.take(decoding.units_in(most) - taken)
        return most, first_fs, growth_fs

    def _like_steps(self, step: Step) -> int:
        """Steps, this one included, that compute the same, arrivals and the pool aside."""
        if self._stepwise or step.preempted or len(step.chunks) > 1:
            return 1
        decoding = self._state.decoding
        most = decoding.steps_to_event() if decoding.count else 10**9
        if step.chunks:
            sequence, chunk = step.chunks[0]
            if chunk.last or chunk.history_tokens < self._window:
                return 1
            most = min(most, (sequence.prompt_tokens - sequence.computed - 1) // chunk.tokens)
        return most

    def _steps_until_arrival(self, first_fs: int, growth_fs: int, most: int) -> int:
        """The first step that ends at or after the next event of the simulation, or `most`."""
        until_fs = self._clock.next_event_fs()
        if until_fs is None or most * first_fs + growth_fs * (most * (most - 1) // 2) < until_fs:
            return most
        # smallest k with k d + g k (k - 1) / 2 >= t; isqrt rounds down, so look at its neighbours
        if growth_fs == 0:
            return max(1, min(most, -(-until_fs // first_fs)))
        linear = 2 * first_fs - growth_fs
        k = max(1, (isqrt(linear * linear + 8 * growth_fs * until_fs) - linear) // (2 * growth_fs))
        while k > 1 and (k - 1) * first_fs + growth_fs * ((k - 1) * (k - 2) // 2) >= until_fs:
            k -= 1
        while k * first_fs + growth_fs * (k * (k - 1) // 2) < until_fs:
            k += 1
        return min(most, k)

    def _hand_out(self, step: Step, steps: int) -> None:
        state, now = self._state, self._clock.now_fs
        state.decoding.advance(steps)
        for sequence in state.decoding.pop_finished():
            release(state, sequence, now)
            self.recorder.completed(sequence.call, now)
            self.sessions.ended(sequence.call)
        for sequence, chunk in step.chunks:
            sequence.computed += chunk.tokens * steps
            if not chunk.last:
                state.prefilling = sequence
                continue
            state.prefilling = None
            end_prompt(state, sequence, now)
            sequence.generated += 1
            self.recorder.prompt_ended(sequence.call, now)
            if sequence.generated == sequence.output_tokens:
                release(state, sequence, now)
                self.recorder.completed(sequence.call, now)
                self.sessions.ended(sequence.call)
            else:
                state.decoding.join(sequence)
