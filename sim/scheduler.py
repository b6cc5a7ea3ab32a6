"""Continuous batching with chunked prefill, first come first served, as vLLM's V1 scheduler does it.

Each step has a token budget: running sequences get one token each, prompts share the rest in order of arrival. A
waiting call is admitted when its whole prompt fits into the pool, all of it or nothing. When decoding sequences
need more units than there are, the youngest is preempted and computed again later. Plain functions over `State`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvfold.sim.decode_set import DecodeSet, Sequence
from kvfold.sim.step import Chunk

if TYPE_CHECKING:
    from kvfold.sim.pool import KvPool


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_num_seqs` sequences live at once; `max_num_batched_tokens` tokens computed in one step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


@dataclass(slots=True)
class Waiting:
    """A call in the queue; `generated` output tokens were handed out before a preemption."""

    call: int
    input_tokens: int
    output_tokens: int
    generated: int = 0


@dataclass(slots=True)
class State:
    """Everything the scheduler decides on. `running` is in order of admission; its last may be in prefill."""

    limits: Limits
    pool: KvPool
    decoding: DecodeSet
    waiting: deque[Waiting] = field(default_factory=deque)
    running: dict[int, Sequence] = field(default_factory=dict)  # order -> sequence
    prefilling: Sequence | None = None  # the one whose prompt did not fit into the last step
    admissions: int = 0


@dataclass(slots=True)
class Step:
    """What the next step computes: one token for every decoding sequence, and these chunks of prompts.

    `blocked`: a call waits that cannot be admitted until a running one ends, so no arrival changes the next step.
    """

    chunks: list[tuple[Sequence, Chunk]]
    admitted: list[Sequence]
    preempted: list[Sequence]
    blocked: bool


def next_step(state: State, now: int) -> Step:
    """Take the units for one decode step, preempting if need be, then fill the budget with prompts."""
    pool, decoding = state.pool, state.decoding
    preempted: list[Sequence] = []
    growth = decoding.units_in(1)
    while growth > pool.available_units():
        if len(state.running) == 1:
            raise RuntimeError(f"a lone sequence outgrew the pool; it needs {growth} more units")
        preempted.append(_preempt(state, now))
        growth = decoding.units_in(1)
    pool.take(growth)

    budget = state.limits.max_num_batched_tokens - decoding.count
    chunks: list[tuple[Sequence, Chunk]] = []
    if state.prefilling is not None:
        budget -= _add_chunk(chunks, state.prefilling, budget)
    admitted: list[Sequence] = []
    blocked = bool(preempted) or budget <= 0
    while state.waiting and not blocked:
        sequence = _admit(state)
        blocked = sequence is None
        if sequence is not None:
            admitted.append(sequence)
            budget -= _add_chunk(chunks, sequence, budget)
            blocked = budget <= 0
    return Step(chunks, admitted, preempted, blocked)


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
        computed=hit * pool.unit_tokens,
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


def _preempt(state: State, now: int) -> Sequence:
    """Drop the youngest running sequence back to the head of the queue, to be computed again."""
    order = next(reversed(state.running))
    sequence = state.running[order]
    release(state, sequence, now)
    state.waiting.appendleft(
        Waiting(sequence.call, sequence.input_tokens, sequence.output_tokens, sequence.generated)
    )
    return sequence
