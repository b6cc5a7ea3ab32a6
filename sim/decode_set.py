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


@dataclass(slots=True, eq=False)
class Sequence:
    """One admitted call. `prompt_tokens` are computed before its next output token: the input, and the output
    handed out before a preemption; `generated` counts all output tokens when it was last out of the decode set.
    """

    call: int
    order: int  # admission number; the highest is preempted first
    input_tokens: int
    output_tokens: int
    generated: int
    prompt_tokens: int
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

    unit_tokens: int
    packed: bool
    window: int
    step: int = 0  # decode steps done since the start of the run
    count: int = 0
    kv_tokens: int = 0
    window_tokens: int = 0
    growing_windows: int = 0
    _unit_phase: list[int] = field(
        default_factory=list
    )  # [unit_tokens] sequences that take a unit at step % unit
    _finish: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _windows: list[tuple[int, int, Sequence]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unit_phase = [0] * self.unit_tokens

    def length(self, sequence: Sequence) -> int:
        """Tokens of a decoding sequence in the pool now."""
        return sequence.prompt_tokens + self.step - sequence.joined_step

    def join(self, sequence: Sequence) -> None:
        """Start decoding after the prompt, with at least one output token to go."""
        length = sequence.prompt_tokens
        sequence.decoding = True
        sequence.joined_step = self.step
        sequence.finish_step = self.step + sequence.output_tokens - sequence.generated
        heappush(self._finish, (sequence.finish_step, sequence.order, sequence))
        self._unit_phase[self._phase(sequence)] += 1
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
        self._unit_phase[self._phase(sequence)] -= 1
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
        while not self._is_current(self._finish[0]):
            heappop(self._finish)
        steps = self._finish[0][0] - self.step
        if self._windows:
            steps = min(steps, self._windows[0][0] - self.step)
        return steps

    def pop_finished(self) -> list[Sequence]:
        """Sequences whose last token came with the step just done, in order of admission."""
        done = []
        while self._finish and self._finish[0][0] <= self.step:
            entry = heappop(self._finish)
            if self._is_current(entry):
                done.append(entry[2])
        return done

    def units_in(self, steps: int) -> int:
        """Pool units that the next `steps` steps take."""
        rounds, rest = divmod(steps, self.unit_tokens)
        units = rounds * self.count
        if rest:
            first = (self.step + 1) % self.unit_tokens
            units += sum(self._unit_phase[first : first + rest])
            units += sum(self._unit_phase[: max(0, first + rest - self.unit_tokens)])
        return units

    def units_at(self, steps: int) -> int:
        """Pool units that the `steps`-th step from now takes (1 is the next one)."""
        return self._unit_phase[(self.step + steps) % self.unit_tokens]

    def steps_within(self, units: int, most: int) -> int:
        """The most steps, up to `most`, that take no more than `units` pool units."""
        if self.units_in(most) <= units:
            return most
        steps = units // self.count * self.unit_tokens
        left = units - units // self.count * self.count
        while steps < most:
            left -= self._unit_phase[(self.step + steps + 1) % self.unit_tokens]
            if left < 0:
                break
            steps += 1
        return steps

    def _phase(self, sequence: Sequence) -> int:
        """Step number, modulo the unit, with which the sequence takes a unit.

        Growing from length L to L + 1 begins a page where L is a multiple of it (BF16), and fills a codec block
        where L + 1 is one (packed).
        """
        start = sequence.joined_step - sequence.prompt_tokens  # the step number at which its length was 0
        return (start if self.packed else start + 1) % self.unit_tokens

    @staticmethod
    def _is_current(entry: tuple[int, int, Sequence]) -> bool:
        return entry[2].decoding and entry[2].finish_step == entry[0]
