"""Continuous batching with chunked prefill, as vLLM's V1 scheduler does it.

Each step has a token budget: running sequences get one token each, prompts share the rest in order of the queue. A
waiting call is admitted when its whole prompt fits into the pool, all of it or nothing. When decoding sequences
need more units than there are, KV held for waiting sessions goes first; then, of the sequences of the lowest
priority, the youngest is preempted, to be computed again later or to come back from host memory. The oldest of the
highest priority is never preempted and fits alone, so something always ends. Plain functions over `State`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfold.sim.decode_set import DecodeSet, Sequence
from kvfold.sim.errors import ConfigError
from kvfold.sim.waiting import Queue, Waiting, check_order
from kvfold.sim.work import Chunk

if TYPE_CHECKING:
    from kvfold.sim.pool import KvPool
    from kvfold.sim.prefix import Node


PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_num_seqs` sequences live at once; `max_num_batched_tokens` tokens computed in one step.

    `order`: who goes first and is preempted last (kvfold.sim.waiting). `max_queue` refuses calls that would wait
    behind so many; `queue_timeout_s` gives up on calls that have waited so long; `max_preemptions` on calls that
    are preempted more often. `worst_case_admission` lets a call in only if all its units would fit were they raw.
    Raises ConfigError for limits that break a rule.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    order: str = "fcfs"
    preemption: str = "recompute"
    max_queue: int | None = None
    queue_timeout_s: float | None = None
    max_preemptions: int | None = None
    worst_case_admission: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}), or running sequences would starve"
            )
        check_order(self.order)
        if self.preemption not in PREEMPTIONS:
            raise ConfigError(
                f"--preemption must be one of {', '.join(PREEMPTIONS)}, got {self.preemption!r}"
            )
        if self.max_queue is not None and self.max_queue < 0:
            raise ConfigError(f"--max-queue must be at least 0, got {self.max_queue}")
        if self.max_preemptions is not None and self.max_preemptions < 0:
            raise ConfigError(f"--max-preemptions must be at least 0, got {self.max_preemptions}")
        if self.queue_timeout_s is not None and not 0 < self.queue_timeout_s < float("inf"):
            raise ConfigError(
                f"--queue-timeout must be a positive number of seconds, got {self.queue_timeout_s}"
            )


@dataclass(frozen=True, slots=True)
class Hold:
    """KV of an ended call that is held for the next call of its session."""

    node: Node
    position: int
    size_bytes: int
    since_fs: int


@dataclass(slots=True)
class State:
    """Everything the scheduler decides on. `running` is in order of admission; its last may be in prefill.

    `recalls`: every prefix that was ever computed comes back from outside the pool, at no cost.
    """

    limits: Limits
    pool: KvPool
    decoding: DecodeSet
    recalls: bool = False
    waiting: Queue = field(default_factory=Queue)
    running: dict[int, Sequence] = field(default_factory=dict)  # order -> sequence
    holds: dict[int, Hold] = field(default_factory=dict)  # ended call -> what is held, oldest first
    prefilling: Sequence | None = None  # the one whose prompt did not fit into the last step
    admissions: int = 0
    held_byte_time: int = 0  # bytes x femtoseconds of all holds that have ended
    # holds given up because a running sequence or the only waiting call needed the room
    forced_releases: int = 0
    host_bytes: int = 0  # in host memory now


@dataclass(slots=True)
class Step:
    """What the next step computes: one token for every decoding sequence, and these chunks of prompts.

    `failed` were preempted too often and do not come back. `blocked`: a call waits that cannot be admitted until
    a running one ends, so no arrival changes the next step. `moved_bytes` go over the link to host memory or back
    while the step computes; `grown_bytes` of the pool were taken for the new tokens.
    """

    chunks: list[tuple[Sequence, Chunk]]
    admitted: list[Sequence]
    preempted: list[Sequence]
    failed: list[Sequence]
    blocked: bool
    moved_bytes: int
    grown_bytes: int


def next_step(state: State, now: int) -> Step:
    """Take the units for one decode step, preempting if need be, then fill the budget with prompts."""
    pool, decoding = state.pool, state.decoding
    step = Step([], [], [], [], False, 0, decoding.bytes_at(1))
    if step.grown_bytes:
        while step.grown_bytes > pool.available_bytes():
            if state.holds:
                release_oldest_hold(state, now)
                continue
            if len(state.running) == 1:
                raise RuntimeError(
                    f"a lone sequence outgrew the pool; it needs {step.grown_bytes} more bytes"
                )
            _preempt(state, step, now)
            step.grown_bytes = decoding.bytes_at(1)
        pool.take(step.grown_bytes)

    budget = state.limits.max_num_batched_tokens - decoding.count
    if state.prefilling is not None:
        budget -= _add_chunk(step.chunks, state.prefilling, budget)
    step.blocked = bool(step.preempted) or budget <= 0
    while not step.blocked and state.waiting:
        sequence = _admit(state, step)
        if sequence is None and not state.running and state.holds:
            release_oldest_hold(state, now)  # or nothing would ever run again
            continue
        if sequence is None:
            step.blocked = True
            break
        step.admitted.append(sequence)
        budget -= _add_chunk(step.chunks, sequence, budget)
        step.blocked = budget <= 0
    if not step.chunks and not decoding.count:
        raise RuntimeError("nothing runs and nothing can be admitted")  # rather than the same step for ever
    return step


def queue_is_full(state: State, call: int, prompt_tokens: int) -> bool:
    """Whether a new call would wait behind `max_queue` calls that neither a free slot nor the pool lets in now.

    Prefix hits are left out of account, so a call may be counted as waiting that will just fit.
    """
    assert state.limits.max_queue is not None
    slots = state.limits.max_num_seqs - len(state.running)
    left = len(state.waiting)
    needed = 0
    prompts = [
        (waiting.call, waiting.input_tokens + waiting.generated) for waiting in state.waiting.in_order()
    ]
    for sequences, (each, tokens) in enumerate([*prompts, (call, prompt_tokens)], start=1):
        needed += _claimed_bytes(state, each, 0, state.pool.blocks(tokens))
        if sequences > slots or needed > state.pool.available_bytes(sequences):
            return left >= state.limits.max_queue
        left -= 1
    return False


def release_hold(state: State, call: int, now: int) -> None:
    """Let go of what was held after a call, if anything was."""
    hold = state.holds.pop(call, None)
    if hold is not None:
        assert state.pool.tree is not None
        state.pool.tree.unpin(hold.node, hold.position, now)
        state.held_byte_time += hold.size_bytes * (now - hold.since_fs)


def release_oldest_hold(state: State, now: int) -> None:
    """Give up the oldest hold because somebody needs the room now."""
    release_hold(state, next(iter(state.holds)), now)
    state.forced_releases += 1


def release(state: State, sequence: Sequence, now: int) -> None:
    """Give back everything a sequence holds; what it left in the prefix cache may be evicted from now on."""
    pool = state.pool
    length = state.decoding.length(sequence) if sequence.decoding else sequence.prompt_tokens
    if sequence.decoding:
        state.decoding.leave(sequence)
    pool.give_back(
        pool.run_bytes(sequence.call, sequence.pinned_units, pool.blocks(length)), fewer_sequences=1
    )
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
        held = state.pool.run_bytes(sequence.call, sequence.pinned_units, end)
        state.pool.give_back(held)
        assert added <= held, (added, held)
        sequence.node, sequence.pinned_units = node, end


def _claimed_bytes(state: State, call: int, first: int, last: int) -> int:
    """What admission asks the pool for on behalf of the units [first, last) of a call."""
    if state.limits.worst_case_admission:
        return (last - first) * state.pool.units.raw_bytes
    return state.pool.run_bytes(call, first, last)


def _admit(state: State, step: Step) -> Sequence | None:
    """The head of the queue as a running sequence, or None if it has to wait."""
    if len(state.running) >= state.limits.max_num_seqs:
        return None
    pool, head = state.pool, state.waiting.head()
    tree, node, hit = pool.tree, None, 0
    if tree is not None:
        node, hit = tree.lookup(head.call)
        tree.pin(node, hit)
    prompt_tokens = head.input_tokens + head.generated
    blocks = pool.blocks(prompt_tokens)
    if _claimed_bytes(state, head.call, hit, blocks) > pool.available_bytes(more_sequences=1):
        if tree is not None and node is not None:
            tree.unpin(node, hit, None)
        return None
    pool.take(pool.run_bytes(head.call, hit, blocks), more_sequences=1)
    state.waiting.take()
    state.admissions += 1
    computed = hit * pool.unit_tokens
    if state.recalls and tree is not None:
        computed = max(computed, min(tree.ever(head.call) * pool.unit_tokens, head.input_tokens - 1))
    if head.host_tokens > computed:
        # what is in the pool already stays out of the transfer
        step.moved_bytes += pool.run_bytes(head.call, hit, max(hit, pool.blocks(head.host_tokens)))
        computed = head.host_tokens
    state.host_bytes -= head.host_bytes
    sequence = Sequence(
        call=head.call,
        order=state.admissions,
        rank=head.rank,
        priority=head.priority,
        input_tokens=head.input_tokens,
        output_tokens=head.output_tokens,
        generated=head.generated,
        prompt_tokens=prompt_tokens,
        preemptions=head.preemptions,
        computed=computed,
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


def _preempt(state: State, step: Step, now: int) -> None:
    """Put the youngest sequence of the lowest priority back into the queue, or give up on it."""
    sequence = max(state.running.values(), key=lambda each: (each.priority, each.order))
    step.preempted.append(sequence)
    host_tokens = host_bytes = 0
    most = state.limits.max_preemptions
    given_up = most is not None and sequence.preemptions >= most
    if state.limits.preemption == "swap" and sequence.decoding and not given_up:
        host_tokens = state.decoding.length(sequence)
        host_bytes = state.pool.run_bytes(sequence.call, 0, state.pool.blocks(host_tokens))
        state.host_bytes += host_bytes
        step.moved_bytes += host_bytes
    release(state, sequence, now)
    if given_up:
        step.failed.append(sequence)
        return
    state.waiting.push(
        Waiting(
            sequence.call,
            sequence.input_tokens,
            sequence.output_tokens,
            priority=sequence.priority,
            rank=sequence.rank,
            generated=sequence.generated,
            preemptions=sequence.preemptions + 1,
            host_tokens=host_tokens,
            host_bytes=host_bytes,
        )
    )
