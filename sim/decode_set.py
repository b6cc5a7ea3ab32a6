"""The sequences that decode: sums over them that stay exact while k steps pass at once.

Every decoding sequence gains one token per step, so with a common step counter a sequence needs no update: the
sums grow by the number of sequences, and what happens at a fixed length (the end of an output, the next unit of
the pool, a full sliding window) happens at a step number known when the sequence joins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.sim.prefix import Node
    from kvfold.sim.units import Units


@dataclass(slots=True, eq=False)
class Sequence:
    """One admitted call. `prompt_tokens` are computed before its next output token: the input, and the output
    handed out before a preemption; `generated` counts all output tokens when it was last out of the decode set.
    """

    call: int
    order: int  # admission number; the highest of the lowest priority is preempted first
    rank: int  # number of its arrival
    priority: int
    input_tokens: int
    output_tokens: int
    generated: int
    prompt_tokens: int
    preemptions: int
    computed: int = 0  # prompt tokens in the pool
    node: Node | None = None  # pinned prefix
    pinned_units: int = 0
    decoding: bool = False
    joined_step: int = 0
    finish_step: int = 0
    window_step: int = 0  # step after which its sliding window is full; 0: full from the start


@dataclass(slots=True)
class DecodeSet:
    """Sums over decoding sequences. `kv_tokens` and `window_tokens` are what the next step attends to."""

    units: Units
    window: int
    step: int = 0  # decode steps done since the start of the run
    count: int = 0
    kv_tokens: int = 0
    window_tokens: int = 0
    growing_windows: int = 0
    # sequences that take a unit at step % unit: how many, and where units differ in size, which [unit_tokens]
    _unit_phase: list[int] = field(default_factory=list)
    _members: list[dict[Sequence, None]] = field(default_factory=list)
    _finish: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _windows: list[tuple[int, int, Sequence]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unit_phase = [0] * self.units.tokens
        if self.units.drawn:
            self._members = [{} for _ in range(self.units.tokens)]

    def length(self, sequence: Sequence) -> int:
        """Tokens of a decoding sequence in the pool now."""
        return sequence.prompt_tokens + self.step - sequence.joined_step

    def lengths(self) -> list[int]:
        """Tokens that the next step attends to, of every sequence, longest first."""
        return sorted(
            (
                self.length(sequence) + 1
                for at_step, _, sequence in self._finish
                if sequence.decoding and sequence.finish_step == at_step
            ),
            reverse=True,
        )

    def join(self, sequence: Sequence) -> None:
        """Start decoding after the prompt, with at least one output token to go."""
        length = sequence.prompt_tokens
        sequence.decoding = True
        sequence.joined_step = self.step
        sequence.finish_step = self.step + sequence.output_tokens - sequence.generated
        heappush(self._finish, (sequence.finish_step, sequence.order, sequence))
        phase = self._phase(sequence)
        self._unit_phase[phase] += 1
        if self._members:
            self._members[phase][sequence] = None
        self.count += 1
        self.kv_tokens += length + 1
        if self.window:
            self.window_tokens += min(length + 1, self.window)
            sequence.window_step = 0
            if length + 1 < self.window:
                sequence.window_step = self.step + self.window - length - 1
                self.growing_windows += 1
                heappush(self._windows, (sequence.window_step, sequence.order, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Stop decoding: at the end of the output or by preemption."""
        length = self.length(sequence)
        sequence.generated += self.step - sequence.joined_step
        phase = self._phase(sequence)
        self._unit_phase[phase] -= 1
        if self._members:
            del self._members[phase][sequence]
        sequence.decoding = False
        self.count -= 1
        self.kv_tokens -= length + 1
        if self.window:
            self.window_tokens -= min(length + 1, self.window)
            if sequence.window_step > self.step:
                self.growing_windows -= 1

    def advance(self, steps: int) -> None:
        """Let `steps` steps pass; no sequence may end and no window fill before the last of them."""
        self.step += steps
        self.kv_tokens += self.count * steps
        self.window_tokens += self.growing_windows * steps
        while self._windows and self._windows[0][0] <= self.step:
            at_step, _, sequence = heappop(self._windows)
            if sequence.decoding and sequence.window_step == at_step:
                self.growing_windows -= 1

    def steps_to_event(self) -> int:
        """Steps up to and including the next that ends an output or fills a window."""
        at_step, _, sequence = self._finish[0]
        while not (sequence.decoding and sequence.finish_step == at_step):
            heappop(self._finish)
            at_step, _, sequence = self._finish[0]
        steps = at_step - self.step
        if self._windows:
            steps = min(steps, self._windows[0][0] - self.step)
        return steps

    def pop_finished(self) -> list[Sequence]:
        """Sequences whose last token came with the step just done, in order of admission."""
        done: list[Sequence] = []
        finish = self._finish
        while finish and finish[0][0] <= self.step:
            at_step, _, sequence = heappop(finish)
            if sequence.decoding and sequence.finish_step == at_step:
                done.append(sequence)
        return done

    def bytes_at(self, steps: int) -> int:
        """Pool bytes that the `steps`-th step from now takes (1 is the next one)."""
        phase = (self.step + steps) % self.units.tokens
        if not self._members:
            return self._unit_phase[phase] * self.units.mean_bytes
        return sum(self._grown_bytes(sequence, steps - 1, steps) for sequence in self._members[phase])

    def bytes_in(self, steps: int) -> int:
        """Pool bytes that the next `steps` steps take."""
        unit_tokens = self.units.tokens
        rounds, rest = divmod(steps, unit_tokens)
        first = (self.step + 1) % unit_tokens
        wrapped = max(0, first + rest - unit_tokens)
        if not self._members:
            taken = rounds * self.count
            if rest:
                taken += sum(self._unit_phase[first : first + rest])
                if wrapped:
                    taken += sum(self._unit_phase[:wrapped])
            return taken * self.units.mean_bytes
        phases = self._members
        if not rounds:
            phases = self._members[first : first + rest] + self._members[:wrapped]
        return sum(self._grown_bytes(sequence, 0, steps) for phase in phases for sequence in phase)

    def steps_within(self, size_bytes: int, most: int) -> tuple[int, int]:
        """The most steps, up to `most`, that take no more than `size_bytes` of the pool; and what they take."""
        taken = self.bytes_in(most)
        if taken <= size_bytes:
            return most, taken
        steps = taken = 0
        if not self._members:
            rounds = size_bytes // self.units.mean_bytes // self.count
            steps, taken = rounds * self.units.tokens, rounds * self.count * self.units.mean_bytes
        while steps < most:
            more = self.bytes_at(steps + 1)
            if taken + more > size_bytes:
                break
            taken += more
            steps += 1
        return steps, taken

    def _grown_bytes(self, sequence: Sequence, first: int, last: int) -> int:
        """Bytes of the units that a sequence takes with the steps after the `first`, up to the `last` from now."""
        length, units = self.length(sequence), self.units
        return units.run_bytes(sequence.call, units.blocks(length + first), units.blocks(length + last))

    def _phase(self, sequence: Sequence) -> int:
        """Step number, modulo the unit, with which the sequence takes a unit.

        Growing from length L to L + 1 begins a page where L is a multiple of it (BF16), and fills a codec block
        where L + 1 is one (packed).
        """
        start = sequence.joined_step - sequence.prompt_tokens  # the step number at which its length was 0
        return (start if self.units.packed else start + 1) % self.units.tokens
