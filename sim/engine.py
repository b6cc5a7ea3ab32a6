"""One serving engine as a discrete-event simulation on SimPy.

Between two events that change what a step computes (an arrival, the end of an output or a prompt, a full window,
an empty pool) steps cost d, d + g, d + 2g, ...: one SimPy event covers the whole stretch. With `stepwise` every
step is an event of its own, and every record comes out the same, because all times are integers.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from kvfold.sim.clock import Clock, StepEnd
from kvfold.sim.decode_set import DecodeSet
from kvfold.sim.pool import KvPool
from kvfold.sim.prefix import PrefixTree
from kvfold.sim.retention import Stake, choose, reprefill_s
from kvfold.sim.run import FS_PER_S
from kvfold.sim.scheduler import (
    Hold,
    State,
    Waiting,
    end_prompt,
    enqueue,
    next_step,
    queue_is_full,
    release,
    release_hold,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    import simpy

    from kvfold.sim.decode_set import Sequence
    from kvfold.sim.recorder import Recorder
    from kvfold.sim.retention import Waits
    from kvfold.sim.scenario import Scenario
    from kvfold.sim.scheduler import Step


class Engine:
    """One replica. `ended(call)` is called when a call has completed or was refused.

    `outstanding_tokens`: tokens still to compute or to generate, for routers.
    """

    def __init__(
        self,
        index: int,
        clock: Clock,
        scenario: Scenario,
        waits: Waits,
        recorder: Recorder,
        ended: Callable[[int], None],
    ) -> None:
        trace, budget = scenario.trace, scenario.budget
        tree = PrefixTree(trace, budget.unit_tokens) if scenario.shares_prefixes else None
        self.outstanding_tokens = 0
        self._index = index
        self._clock = clock
        self._scenario = scenario
        self._cost = scenario.cost
        self._waits = waits
        self._recorder = recorder
        self._ended = ended
        self._parents = scenario.parents
        self._input_tokens = trace.input_tokens.tolist()
        # a call without output still ends a prompt, which gives one token
        self._output_tokens = [max(1, tokens) for tokens in trace.output_tokens.tolist()]
        self._idle: simpy.Event | None = None
        self._moved_units = 0  # sent to host memory since the last step began
        self._host_tokens: dict[int, int] = {}  # ended call -> tokens of its chain in host memory
        self.state = State(
            scenario.limits,
            KvPool(budget, tree),
            DecodeSet(budget.unit_tokens, budget.packed, scenario.cost.model.window_tokens),
        )
        # a hold or a timeout can let a blocked call in without any sequence ending
        self._always_cut = scenario.retention.holds or scenario.limits.queue_timeout_s is not None
        self._always_cut |= scenario.limits.order != "fcfs"

    def cached_tokens(self, call: int) -> int:
        """Prompt tokens of a call that this replica has in its prefix cache now."""
        tree = self.state.pool.tree
        return tree.lookup(call)[1] * self.state.pool.unit_tokens if tree is not None else 0

    def offer(self, call: int) -> None:
        """A call arrives: into the queue, or refused with a reason."""
        now = self._clock.now_fs
        reason = self._refusal(call)
        if reason is not None:
            self._recorder.refused(call, reason, now)
            self._ended(call)
            return
        self._recorder.arrived(call, self._index, now)
        self.outstanding_tokens += self._input_tokens[call] + self._output_tokens[call]
        parents = self._parents[call]
        host_tokens = max((self._host_tokens.pop(parent, 0) for parent in parents), default=0)
        waiting = Waiting(
            call,
            self._input_tokens[call],
            self._output_tokens[call],
            first=not parents,
            host_tokens=min(host_tokens, self._input_tokens[call] - 1),
        )
        enqueue(self.state, waiting)
        timeout_s = self._scenario.limits.queue_timeout_s
        if timeout_s is not None:
            event = self._clock.timeout(round(timeout_s * FS_PER_S), waiting)
            event.callbacks.append(self._on_timeout)
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def serve(self) -> Generator[simpy.Event, None, None]:
        """The engine's loop: schedule, let a stretch of steps pass, hand out what it computed."""
        clock, state, recorder = self._clock, self.state, self._recorder
        while True:
            if not state.running and not state.waiting:
                self._idle = clock.event()
                since = clock.now_fs
                yield self._idle
                self._idle = None
                recorder.account(self._index, state, clock.now_fs)
                self._moved_units = max(0, self._moved_units - self._units_moved_in(clock.now_fs - since))
                yield StepEnd(clock, 0)
                continue
            now = clock.now_fs
            step = next_step(state, now)
            if state.holds:
                for sequence in step.admitted:
                    for parent in self._parents[sequence.call]:
                        state.held_unit_time += release_hold(state, parent, now)
            recorder.scheduled(step, now)
            step.moved_units += self._moved_units
            self._moved_units = 0
            steps, first_fs, growth_fs = self._stretch(step)
            duration_fs = steps * first_fs + growth_fs * (steps * (steps - 1) // 2)
            recorder.stretch(self._index, state, step, now, steps, first_fs, growth_fs)
            yield StepEnd(clock, duration_fs)
            recorder.account(self._index, state, clock.now_fs)
            self._hand_out(step, steps)

    def _refusal(self, call: int) -> str | None:
        tokens = self._input_tokens[call] + self._output_tokens[call]
        if tokens > self._scenario.max_context_tokens:
            return "longer_than_model_context"
        if not self.state.pool.fits_alone(tokens):
            return "larger_than_kv_pool"
        if queue_is_full(self.state, self._input_tokens[call]):
            return "queue_full"
        return None

    def _on_timeout(self, event: Any) -> None:
        """Give up on a call that still waits for its first admission."""
        waiting = event.value
        if waiting in self.state.waiting and waiting.generated == 0:
            self.state.waiting.remove(waiting)
            self._recorder.timed_out(waiting.call)
            self._forget(waiting.call)
            self._ended(waiting.call)

    def _forget(self, call: int) -> None:
        self.outstanding_tokens -= self._input_tokens[call] + self._output_tokens[call]

    def _stretch(self, step: Step) -> tuple[int, int, int]:
        """(number of steps, femtoseconds of the first, growth per step) of the longest run of like steps."""
        state, cost, decoding = self.state, self._cost, self.state.decoding
        prompt_tokens = ending = chunks_fs = 0
        for _, chunk in step.chunks:
            prompt_tokens += chunk.tokens
            ending += chunk.last
            chunks_fs += cost.chunk_fs(chunk)
        first_fs = cost.base_fs(decoding.count, prompt_tokens, ending) + chunks_fs
        first_fs += cost.window_token_fs * decoding.window_tokens
        token_fs, until_tokens = 0, None
        if decoding.count:
            attention = cost.attention(decoding.count, decoding.kv_tokens)
            token_fs, until_tokens = attention.token_fs, attention.until_tokens
            first_fs += attention.base_fs + token_fs * decoding.kv_tokens
            self._recorder.attended(attention.origin)
        if step.moved_units:
            first_fs = max(first_fs, self._transfer_fs(step.moved_units))
        most = self._like_steps(step)
        if most == 1:
            return 1, first_fs, 0
        growth_fs = token_fs * decoding.count + cost.window_token_fs * decoding.growing_windows
        if step.chunks:
            growth_fs += cost.history_token_fs(prompt_tokens) * prompt_tokens
        taken = decoding.units_at(1)
        if decoding.count:
            if until_tokens is not None:
                most = min(most, (until_tokens - decoding.kv_tokens) // decoding.count + 1)
            most = decoding.steps_within(state.pool.available_units() + taken, most)
        if self._always_cut or not step.blocked:
            most = self._steps_until_event(first_fs, growth_fs, most)
        if most > 1:
            self._take_ahead(most, decoding.units_in(most) - taken, first_fs, growth_fs)
        return most, first_fs, growth_fs

    def _take_ahead(self, steps: int, units: int, first_fs: int, growth_fs: int) -> None:
        """Take the units of all steps of a stretch after the first, as if each were taken with its own step."""
        pool, decoding = self.state.pool, self.state.decoding
        evicted = units - pool.free_units()
        pool.take(units)
        if pool.tree is None or evicted <= 0:
            return
        # cached units that a later step evicts were idle until then
        left, unit_time = evicted, evicted * first_fs
        free = units - evicted
        for step in range(1, steps):
            taken = decoding.units_at(step + 1)
            left -= max(0, taken - free)
            free = max(0, free - taken)
            unit_time += left * (first_fs + growth_fs * step)
        self._recorder.idled(unit_time)

    def _units_moved_in(self, time_fs: int) -> int:
        """Whole units that the link to host memory carries while the engine rests."""
        if not self._moved_units:
            return 0
        return int(time_fs / FS_PER_S * self._scenario.host_link_bytes_per_s / self.state.pool.unit_bytes)

    def _transfer_fs(self, units: int) -> int:
        """Time of units over the link to host memory."""
        link = self._scenario.host_link_bytes_per_s
        return round(units * self.state.pool.unit_bytes / link * FS_PER_S)

    def _like_steps(self, step: Step) -> int:
        """Steps, this one included, that compute the same, arrivals and the pool aside."""
        if self._scenario.stepwise or step.preempted or step.moved_units or len(step.chunks) > 1:
            return 1
        decoding = self.state.decoding
        most = decoding.steps_to_event() if decoding.count else 10**9
        if step.chunks:
            sequence, chunk = step.chunks[0]
            if chunk.last or chunk.history_tokens < self._cost.model.window_tokens:
                return 1
            most = min(most, (sequence.prompt_tokens - sequence.computed - 1) // chunk.tokens)
        return most

    def _steps_until_event(self, first_fs: int, growth_fs: int, most: int) -> int:
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
        state, now = self.state, self._clock.now_fs
        state.decoding.advance(steps)
        for sequence in state.decoding.pop_finished():
            self._complete(sequence, now)
        for sequence, chunk in step.chunks:
            sequence.computed += chunk.tokens * steps
            if not chunk.last:
                state.prefilling = sequence
                continue
            state.prefilling = None
            end_prompt(state, sequence, now)
            sequence.generated += 1
            self._recorder.prompt_ended(sequence.call, now)
            if sequence.generated == sequence.output_tokens:
                self._complete(sequence, now)
            else:
                state.decoding.join(sequence)

    def _complete(self, sequence: Sequence, now: int) -> None:
        """The last token is out: give back what is held but for what the retention policy keeps."""
        state, call = self.state, sequence.call
        policy = self._policy(sequence)
        node, position = sequence.node, sequence.pinned_units
        if policy in ("keep", "ttl") and node is not None and state.pool.tree is not None:
            state.pool.tree.pin(node, position)
            state.holds[call] = Hold(node, position, now)
            if policy == "ttl":
                event = self._clock.timeout(round(self._scenario.retention.ttl_s * FS_PER_S), call)
                event.callbacks.append(self._on_ttl)
        release(state, sequence, now)
        if policy in ("drop", "swap") and node is not None and state.pool.tree is not None:
            if policy == "swap":
                self._host_tokens[call] = position * state.pool.unit_tokens
                state.host_units += position
                self._moved_units += position
            state.pool.tree.drop(node, position)
        self._recorder.completed(call, now)
        self._forget(call)
        self._ended(call)

    def _policy(self, sequence: Sequence) -> str:
        """What becomes of the KV of a call that is over; `lru` where its session does not go on."""
        retention, wait_s = self._scenario.retention, self._waits.actual_s[sequence.call]
        if wait_s is None or sequence.node is None:
            return "lru"
        if retention.policy not in ("least-waste", "oracle"):
            return retention.policy
        return choose(retention, self._stake(sequence), wait_s, self._waits.expected_s[sequence.call])

    def _on_ttl(self, event: Any) -> None:
        """The time of a hold is over, unless its session came back or somebody needed the room."""
        self._recorder.account(self._index, self.state, self._clock.now_fs)
        self.state.held_unit_time += release_hold(self.state, event.value, self._clock.now_fs)

    def _stake(self, sequence: Sequence) -> Stake:
        pool = self.state.pool
        own_bytes = sequence.pinned_units * pool.unit_bytes
        transfer_s = own_bytes / self._scenario.host_link_bytes_per_s
        decoding = self.state.decoding
        step_fs = self._cost.decode_fs(decoding.count, decoding.kv_tokens, decoding.window_tokens)
        return Stake(
            own_bytes=own_bytes,
            others_bytes=max(0, pool.live_bytes() - own_bytes),
            reprefill_s=reprefill_s(
                self._cost,
                sequence.pinned_units * pool.unit_tokens,
                self._scenario.limits.max_num_batched_tokens,
            ),
            transfer_s=transfer_s,
            hidden_s=step_fs / FS_PER_S,
        )
