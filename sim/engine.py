"""One serving engine as a discrete-event simulation on SimPy.

Between two events that change what a step computes (an arrival, the end of an output or a prompt, a full window,
an empty pool) steps cost d, d + g, d + 2g, ...: one SimPy event covers the whole stretch. With `stepwise` every
step is an event of its own, and every record comes out the same, because all times are integers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from kvfold.sim.clock import Clock, StepEnd
from kvfold.sim.decode_set import DecodeSet
from kvfold.sim.pool import KvPool
from kvfold.sim.prefix import PrefixTree
from kvfold.sim.retention import Stake, choose, reprefill_s
from kvfold.sim.run import FS_PER_S
from kvfold.sim.scheduler import Hold, State, end_prompt, next_step, queue_is_full, release, release_hold
from kvfold.sim.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any

    import simpy

    from kvfold.sim.decode_set import Sequence
    from kvfold.sim.prefix import Node
    from kvfold.sim.recorder import Recorder
    from kvfold.sim.retention import Waits
    from kvfold.sim.scenario import Scenario
    from kvfold.sim.scheduler import Step


#: Steps of a stretch at most, so that its time, and sums of squares over its steps, fit 64 bits.
LONGEST = 1024


@dataclass(slots=True)
class HostCopy:
    """KV of an ended call in host memory, until `heirs` calls that go on from it have come."""

    node: Node
    position: int
    size_bytes: int
    heirs: int


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
        trace, budget, units = scenario.trace, scenario.budget, scenario.units
        tree = PrefixTree(trace, units) if scenario.shares_prefixes else None
        self.outstanding_tokens = 0
        self._index = index
        self._clock = clock
        self._scenario = scenario
        self._cost = scenario.cost
        self._waits = waits
        self._recorder = recorder
        self._ended = ended
        self._parents = scenario.parents
        self._priorities = scenario.priorities
        self._input_tokens = array("q", trace.input_tokens.tobytes())
        # a call without output still ends a prompt, which gives one token
        self._output_tokens = array("q", np.maximum(trace.output_tokens, 1).tobytes())
        self._idle: simpy.Event | None = None
        self._offered = 0
        self._moved_bytes = 0  # sent to host memory since the last step began
        self._host: dict[int, HostCopy] = {}  # by ended call
        self.state = State(
            scenario.limits,
            KvPool(budget, units, tree),
            DecodeSet(units, scenario.cost.model.window_tokens),
            recalls=scenario.retention.policy == "oracle",
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
            self._take_over(call, now)
            self._ended(call)
            return
        self._recorder.arrived(call, self._index, now)
        input_tokens, output_tokens = self._input_tokens[call], self._output_tokens[call]
        self.outstanding_tokens += input_tokens + output_tokens
        self._offered += 1
        host_tokens = self._host_tokens(call) if self._host else 0
        waiting = Waiting(
            call,
            input_tokens,
            output_tokens,
            priority=self._priorities[call],
            rank=self._offered,
            host_tokens=min(host_tokens, input_tokens - 1),
        )
        self.state.waiting.push(waiting)
        timeout_s = self._scenario.limits.queue_timeout_s
        if timeout_s is not None:
            self._clock.call_in(round(timeout_s * FS_PER_S), self._on_timeout, call)
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def serve(self) -> Generator[simpy.Event, None, None]:
        """The engine's loop: schedule, let a stretch of steps pass, hand out what it computed."""
        clock, state, recorder, index = self._clock, self.state, self._recorder, self._index
        # nothing lies idle without a prefix cache, nor in host memory without swapping
        lies = state.pool.tree is not None or state.limits.preemption == "swap"
        while True:
            if not state.running and not state.waiting:
                self._idle = clock.event()
                since = clock.now_fs
                yield self._idle
                self._idle = None
                recorder.account(index, state, clock.now_fs)
                if self._moved_bytes:
                    rest_s = (clock.now_fs - since) / FS_PER_S
                    moved = int(rest_s * self._scenario.host_link_bytes_per_s)
                    self._moved_bytes = max(0, self._moved_bytes - moved)
                yield StepEnd(clock, 0)
                continue
            now = clock.now_fs
            step = next_step(state, now)
            if step.admitted or step.preempted:
                self._admitted(step, now)
            step.moved_bytes += self._moved_bytes
            self._moved_bytes = 0
            steps, first_fs, growth_fs = self._stretch(step)
            duration_fs = recorder.stretch(index, state, step, now, steps, first_fs, growth_fs)
            if not clock.leap(duration_fs):
                yield StepEnd(clock, duration_fs)
            if lies:
                recorder.account(index, state, clock.now_fs)
            self._hand_out(step, steps)

    def _admitted(self, step: Step, now: int) -> None:
        """Who was let in needs no hold any more; who was preempted too often ends here."""
        for sequence in step.admitted:
            if self._parents[sequence.call]:
                self._take_over(sequence.call, now)
        self._recorder.scheduled(step, now)
        for sequence in step.failed:
            self._recorder.failed(sequence.call, "preempted_too_often")
            self._forget(sequence.call)
            self._ended(sequence.call)

    def _host_tokens(self, call: int) -> int:
        """Tokens of the call's prompt that lie in host memory."""
        tree = self.state.pool.tree
        copies = [self._host[parent] for parent in self._parents[call] if parent in self._host]
        if tree is None or not copies:
            return 0
        return (
            max(tree.shared(call, each.node, each.position) for each in copies) * self.state.pool.unit_tokens
        )

    def _take_over(self, call: int, now: int) -> None:
        """The call has come, or never will: what was held or copied for it may go."""
        for parent in self._parents[call]:
            copy = self._host.get(parent)
            if copy is not None or parent in self.state.holds:
                self._recorder.account(self._index, self.state, now)
            release_hold(self.state, parent, now)
            if copy is not None:
                copy.heirs -= 1
                if copy.heirs == 0:
                    self.state.host_bytes -= copy.size_bytes
                    del self._host[parent]

    def _refusal(self, call: int) -> str | None:
        tokens = self._input_tokens[call] + self._output_tokens[call]
        state = self.state
        if tokens > self._scenario.max_context_tokens:
            return "longer_than_model_context"
        if not state.pool.fits_alone(call, tokens):
            return "larger_than_kv_pool"
        if state.limits.worst_case_admission and not state.pool.fits_raw(tokens):
            return "larger_than_kv_pool_if_raw"
        if state.limits.max_queue is not None and queue_is_full(state, call, self._input_tokens[call]):
            return "queue_full"
        return None

    def _on_timeout(self, event: Any) -> None:
        """Give up on a call that still waits for its first admission."""
        waiting = self.state.waiting.give_up(event.value)
        if waiting is not None:
            self._recorder.timed_out(waiting.call)
            self._take_over(waiting.call, self._clock.now_fs)
            self._forget(waiting.call)
            self._ended(waiting.call)

    def _forget(self, call: int) -> None:
        self.outstanding_tokens -= self._input_tokens[call] + self._output_tokens[call]

    def _stretch(self, step: Step) -> tuple[int, int, int]:
        """(number of steps, femtoseconds of the first, growth per step) of the longest run of like steps."""
        state, decoding = self.state, self.state.decoding
        chunks = [chunk for _, chunk in step.chunks] if step.chunks else ()
        first_fs, growth_fs, even_steps, self._recorder.origin = self._cost.work(decoding, chunks)
        if step.moved_bytes:
            first_fs = max(first_fs, self._transfer_fs(step.moved_bytes))
        most = self._like_steps(step)
        if even_steps is not None and even_steps < most:
            most = even_steps
        if most > 1 and (self._always_cut or not step.blocked):
            most = self._steps_until_event(first_fs, growth_fs, most)
        if most == 1:
            return 1, first_fs, 0
        if decoding.count:
            room = state.pool.available_bytes() + step.grown_bytes
            most, grown_bytes = decoding.steps_within(room, most)
            if grown_bytes > step.grown_bytes:
                self._take_ahead(most, grown_bytes - step.grown_bytes, first_fs, growth_fs)
        return most, first_fs, growth_fs

    def _take_ahead(self, steps: int, size_bytes: int, first_fs: int, growth_fs: int) -> None:
        """Take the units of all steps of a stretch after the first, as if each were taken with its own step."""
        pool, decoding = self.state.pool, self.state.decoding
        if pool.tree is None or size_bytes <= pool.free_bytes():
            pool.take(size_bytes)
            return
        # cached units that a later step evicts were idle until then
        for ahead in range(1, steps):
            evicted = pool.take(decoding.bytes_at(ahead + 1))
            if evicted:
                past_fs = ahead * first_fs + growth_fs * (ahead * (ahead - 1) // 2)
                self._recorder.idled(evicted * past_fs)

    def _transfer_fs(self, size_bytes: int) -> int:
        """Time over the link to host memory."""
        return round(size_bytes / self._scenario.host_link_bytes_per_s * FS_PER_S)

    def _like_steps(self, step: Step) -> int:
        """Steps, this one included, that compute the same, arrivals and the pool aside."""
        if self._scenario.stepwise or step.preempted or step.moved_bytes or len(step.chunks) > 1:
            return 1
        decoding = self.state.decoding
        most = min(decoding.steps_to_event(), LONGEST) if decoding.count else LONGEST
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
        # smallest k with k d + g k (k - 1) / 2 >= t: the root in floating point, then its exact neighbours
        linear = float(2 * first_fs - growth_fs)
        k = max(1, int(4 * until_fs / (linear + sqrt(linear * linear + 8.0 * growth_fs * until_fs))))
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
        tree, node, position = state.pool.tree, sequence.node, sequence.pinned_units
        if tree is None or node is None:
            release(state, sequence, now)
        else:
            policy = self._policy(sequence)
            if policy in ("keep", "ttl"):
                tree.pin(node, position)
                state.holds[call] = Hold(node, position, tree.path_bytes(node, position), now)
            if policy == "ttl":
                self._clock.call_in(round(self._scenario.retention.ttl_s * FS_PER_S), self._on_ttl, call)
            release(state, sequence, now)
            if policy == "swap":
                copy = HostCopy(node, position, tree.path_bytes(node, position), self._scenario.heirs[call])
                self._host[call] = copy
                state.host_bytes += copy.size_bytes
                self._moved_bytes += copy.size_bytes
            if policy in ("drop", "swap"):
                tree.drop(node, position)
        self._recorder.completed(call, now)
        self._forget(call)
        self._ended(call)

    def _policy(self, sequence: Sequence) -> str:
        """What becomes of the KV of a call that is over; `lru` where its session does not go on."""
        retention = self._scenario.retention
        if self._waits.actual_s[sequence.call] is None:
            return "lru"
        if retention.policy != "least-waste":
            return retention.policy
        return choose(self._stake(sequence), self._waits.expected_s[sequence.call])

    def _on_ttl(self, event: Any) -> None:
        """The time of a hold is over, unless its session came back or somebody needed the room."""
        self._recorder.account(self._index, self.state, self._clock.now_fs)
        release_hold(self.state, event.value, self._clock.now_fs)

    def _stake(self, sequence: Sequence) -> Stake:
        pool = self.state.pool
        assert pool.tree is not None
        assert sequence.node is not None
        own_bytes = pool.tree.path_bytes(sequence.node, sequence.pinned_units)
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
