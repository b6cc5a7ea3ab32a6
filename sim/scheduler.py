"""Continuous batching with chunked prefill, as vLLM's V1 scheduler does it.

Each step has a token budget: running sequences get one token each, prompts share the rest in order of the queue. A
waiting call is admitted when its whole prompt fits into the pool, all of it or nothing. When decoding sequences
need more units than there are, KV held for waiting sessions goes first; then the youngest sequence is preempted,
to be computed again later or to come back from host memory. Plain functions over `State`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfold.sim.decode_set import DecodeSet, Sequence
from kvfold.sim.errors import ConfigError
from kvfold.sim.step import Chunk

if TYPE_CHECKING:
    from kvfold.sim.pool import KvPool
    from kvfold.sim.prefix import Node


ORDERS = ("fcfs", "sessions-first")
PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_num_seqs` sequences live at once; `max_num_batched_tokens` tokens computed in one step.

    `order`: `fcfs`, or `sessions-first`, later calls of a session before first calls. `max_queue` refuses calls
    that would wait behind so many; `queue_timeout_s` gives up on calls that have waited so long. Raises
    ConfigError for limits that break a rule.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    order: str = "fcfs"
    preemption: str = "recompute"
    max_queue: int | None = None
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or running sequences would starve"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"--scheduler must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.preemption not in PREEMPTIONS:
            raise ConfigError(
                f"--preemption must be one of {', '.join(PREEMPTIONS)}, got {self.preemption!r}"
            )
        if self.max_queue is not None and self.max_queue < 0:
            raise ConfigError(f"--max-queue must be at least 0, got {self.max_queue}")
        if self.queue_timeout_s is not None and not 0 < self.queue_timeout_s < float("inf"):
            raise ConfigError(
                f"--queue-timeout must be a positive number of seconds, got {self.queue_timeout_s}"
            )


@dataclass(slots=True, eq=False)
class Waiting:
    """A call in the queue; `generated` output tokens were handed out before a preemption.

    `host_tokens` of its prompt lie in host memory and come back over the link.
    """

    call: int
    input_tokens: int
    output_tokens: int
    first: bool = True  # the first call of its session, or a single-shot one
    generated: int = 0
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """KV of an ended call that is held for the next call of its session."""

    node: Node
    position: int
    since_fs: int


@dataclass(slots=True)
class State:
    """Everything the scheduler decides on. `running` is in order of admission; its last may be in prefill."""

    limits: Limits
    pool: KvPool
    decoding: DecodeSet
    waiting: deque[Waiting] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)  # order -> sequence
    holds: dict[int, Hold] = field(default_factory=dict)  # ended call -> what is held, oldest first
    prefilling: Sequence | None = None  # the one whose prompt did not fit into the last step
    admissions: int = 0
    held_unit_time: int = 0  # units x femtoseconds of all holds that have ended
    forced_releases: int = (
        0  # holds given up because a running sequence or the only waiting call needed the room
    )
    host_units: int = 0  # units in host memory now


@dataclass(slots=True)
class Step:
    """What the next step computes: one token for every decoding sequence, and these chunks of prompts.

    `blocked`: a call waits that cannot be admitted until a running one ends, so no arrival changes the next step.
    `moved_units` go over the link to host memory or back while the step computes.
    """

    chunks: list[tuple[Sequence, Chunk]]
    admitted: list[Sequence]
    preempted: list[Sequence]
    blocked: bool
    moved_units: int


def next_step(state: State, now: int) -> Step:
    """Take the units for one decode step, preempting if need be, then fill the budget with prompts."""
    pool, decoding = state.pool, state.decoding
    preempted: list[Sequence] = []
    moved_units = 0
    growth = decoding.units_at(1)
    while growth > pool.available_units():
        if state.holds:
            release_oldest_hold(state, now)
            continue
        if len(state.running) == 1:
            raise RuntimeError(f"a lone sequence outgrew the pool; it needs {growth} more units")
        youngest, units = _preempt(state, now)
        preempted.append(youngest)
        moved_units += units
        growth = decoding.units_at(1)
    pool.take(growth)

    budget = state.limits.max_num_batched_tokens - decoding.count
    chunks: list[tuple[Sequence, Chunk]] = []
    if state.prefilling is not None:
        budget -= _add_chunk(chunks, state.prefilling, budget)
    admitted: list[Sequence] = []
    blocked = bool(preempted) or budget <= 0
    while state.waiting and not blocked:
        head = state.waiting[0]
        sequence = _admit(state)
        if sequence is None and not state.running and state.holds:
            release_oldest_hold(state, now)  # or nothing would ever run again
            continue
        if sequence is None:
            blocked = True
            break
        admitted.append(sequence)
        if head.host_tokens:
            units = pool.blocks(head.host_tokens)
            state.host_units -= units
            moved_units += units
        budget -= _add_chunk(chunks, sequence, budget)
        blocked = budget <= 0
    return Step(chunks, admitted, preempted, blocked, moved_units)


def enqueue(state: State, waiting: Waiting) -> None:
    """Put a call into the queue: at its end, or before all first calls of sessions if the order says so."""
    position = len(state.waiting)
    if state.limits.order == "sessions-first" and not waiting.first:
        while position and state.waiting[position - 1].first:
            position -= 1
    state.waiting.insert(position, waiting)


def queue_is_full(state: State, prompt_tokens: int) -> bool:
    """Whether a new call would wait behind `max_queue` calls that neither a free slot nor the pool lets in now.

    Prefix hits are left out of account, so a call may be counted as waiting that will just fit.
    """
    if state.limits.max_queue is None:
        return False
    slots = state.limits.max_num_seqs - len(state.running)
    left = len(state.waiting)
    units = 0
    prompts = [*(waiting.input_tokens + waiting.generated for waiting in state.waiting), prompt_tokens]
    for sequences, tokens in enumerate(prompts, start=1):
        units += state.pool.blocks(tokens)
        if sequences > slots or units > state.pool.available_units(sequences):
            return left >= state.limits.max_queue
        left -= 1
    return False


def release_hold(state: State, call: int, now: int) -> int:
    """Let go of what was held after a call; returns units x femtoseconds held, 0 if nothing was."""
    hold = state.holds.pop(call, None)
    if hold is None:
        return 0
    assert state.pool.tree is not None
    state.pool.tree.unpin(hold.node, hold.position, now)
    return hold.position * (now - hold.since_fs)


def release_oldest_hold(state: State, now: int) -> None:
    """Give up the oldest hold because somebody needs the room now."""
    state.held_unit_time += release_hold(state, next(iter(state.holds)), now)
    state.forced_releases += 1


def release(state: State, sequence: Sequence, now: int) -> None:
    """Give back everything a sequence holds; what it left in the prefix cache may be evicted from now on."""
    pool = state.pool
    length = state.decoding.length(sequence) if sequence.decoding else sequence.prompt_tokens
    if sequence.decoding:
        state.decoding.leave(sequence)
    pool.give_back(pool.blocks(length) - sequence.pinned_units, fewer_sequences=1)
    if pool.tree is not None and sequence.node is not None:
        pool.tree.unpin(sequence.node, sequence.pinned_units, now)
    del state.running[sequence.order]
    if state.prefilling is sequence:
        state.prefilling = None


def end_prompt(state: State, sequence: Sequence, now: int) -> None:
    """The whole prompt is in the pool: its full units become shareable, and stay pinned while it lives."""
    tree = state.pool.tree
    if tree is not None:
        node, end, added = tree.insert(sequence.call)
        tree.pin(node, end)
        if sequence.node is not None:
            tree.unpin(sequence.node, sequence.pinned_units, now)
        # units that another call made resident meanwhile are held once
        held = end - sequence.pinned_units
        state.pool.give_back(held)
        assert added <= held, (added, held)
        sequence.node, sequence.pinned_units = node, end


def _admit(state: State) -> Sequence | None:
    """The head of the queue as a running sequence, or None if it has to wait."""
    if len(state.running) >= state.limits.max_num_seqs:
        return None
    pool, head = state.pool, state.waiting[0]
    node, hit = pool.tree.lookup(head.call) if pool.tree is not None else (None, 0)
    if node is not None and pool.tree is not None:
        pool.tree.pin(node, hit)
    prompt_tokens = head.input_tokens + head.generated
    needed = pool.blocks(prompt_tokens) - hit
    if needed > pool.available_units(more_sequences=1):
        if node is not None and pool.tree is not None:
            pool.tree.unpin(node, hit, None)
        return None
    pool.take(needed, more_sequences=1)
    state.waiting.popleft()
    state.admissions += 1
    sequence = Sequence(
        call=head.call,
        order=state.admissions,
        input_tokens=head.input_tokens,
        output_tokens=head.output_tokens,
        generated=head.generated,
        prompt_tokens=prompt_tokens,
        computed=max(hit * pool.unit_tokens, head.host_tokens),
        node=node,
        pinned_units=hit,
    )
    state.running[sequence.order] = sequence
    return sequence


def _add_chunk(chunks: list[tuple[Sequence, Chunk]], sequence: Sequence, budget: int) -> int:
    left = sequence.prompt_tokens - sequence.computed
    tokens = min(left, budget)
    if tokens > 0:
        chunks.append((sequence, Chunk(tokens, sequence.computed, tokens == left)))
    return tokens


def _preempt(state: State, now: int) -> tuple[Sequence, int]:
    """Put the youngest sequence back to the head of the queue; returns it and the units sent to the host."""
    order = next(reversed(state.running))
    sequence = state.running[order]
    host_tokens = units = 0
    if state.limits.preemption == "swap" and sequence.decoding:
        host_tokens = state.decoding.length(sequence)
        units = state.pool.blocks(host_tokens)
        state.host_units += units
    release(state, sequence, now)
    state.waiting.appendleft(
        Waiting(
            sequence.call,
            sequence.input_tokens,
            sequence.output_tokens,
            first=False,  # whatever the order, it stays ahead of those that have not started
            generated=sequence.generated,
            host_tokens=host_tokens,
        )
    )
    return sequence, units
