"""Calls of a synthetic trace, made in any order and then laid out as a Trace.

Prompts form a tree: a prompt is the one before it with more tokens after. Two prompts have in common what
stands in their last common ancestor, and share its whole blocks, whoever sent them first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np

from kvfold.traces.columns import KIND, SOURCE, Edges, assemble, by_arrival
from kvfold.traces.prefix import partial_last
from kvfold.traces.table import Meta, Trace

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """``tokens`` is the whole length, that of ``before`` included."""

    tokens: int
    before: Prompt | None = None

    def then(self, tokens: float) -> Prompt:
        return Prompt(self.tokens + int(tokens), self)


@dataclass(slots=True, eq=False)
class Call:
    """One call; ``wait_s`` and ``kind`` are what the client would have recorded before it."""

    arrival_s: float
    prompt: Prompt
    output_tokens: int
    service_s: float = nan
    session: int = -1
    agent: int = 0
    parents: list[tuple[Call, float, str]] = field(default_factory=list)
    wait_s: float = nan
    kind: str = "none"
    tenant: str = ""

    @property
    def end_s(self) -> float:
        return self.arrival_s + self.service_s

    def follows(self, parent: Call, wait_s: float, kind: str) -> Call:
        """This call, with one parent."""
        self.parents, self.wait_s, self.kind = [(parent, wait_s, kind)], wait_s, kind
        return self


def laid_out(
    calls: Sequence[Call], source: str, warnings: Sequence[str], block_tokens: int = BLOCK_TOKENS
) -> Trace:
    """The Trace of all calls, sorted by arrival; no prefixes are shared where ``block_tokens`` is 0."""
    calls = [calls[at] for at in by_arrival(np.array([call.arrival_s for call in calls]))]
    row_of = {id(call): row for row, call in enumerate(calls)}
    edges = Edges()
    turn: Counter[int] = Counter()
    turns = []
    for row, call in enumerate(calls):
        for parent, wait_s, kind in call.parents:
            edges.add(row, row_of[id(parent)], wait_s, KIND[kind])
        turns.append(turn[call.session] if call.session >= 0 else 0)
        turn[call.session] += 1
    columns: dict[str, Any] = {
        "session_id": [call.session for call in calls],
        "turn_index": turns,
        "agent_id": [call.agent for call in calls],
        "parent_request_id": [row_of[id(call.parents[0][0])] if call.parents else -1 for call in calls],
        "arrival_time_s": [call.arrival_s for call in calls],
        "wait_before_s": [call.wait_s for call in calls],
        "wait_kind": [KIND[call.kind] for call in calls],
        "wait_source": [SOURCE["recorded" if call.parents else "none"] for call in calls],
        "input_tokens": [call.prompt.tokens for call in calls],
        "output_tokens": [call.output_tokens for call in calls],
        "recorded_e2e_s": [call.service_s or nan for call in calls],  # 0: of unknown service
        "tenant": [call.tenant for call in calls],
    }
    partial = "none"
    if block_tokens:
        columns |= _chains([call.prompt for call in calls], block_tokens)
        tokens = np.array(columns["input_tokens"])
        partial = partial_last(columns, tokens, block_tokens, [source] * len(calls))
    meta = Meta(
        format="canonical",
        source=source,
        sha256="",
        time_unit="s",
        block_size_tokens=block_tokens,
        partial_last=partial,
        hash_scope="global" if block_tokens else "none",
        rows_read=len(calls),
        rows_kept=len(calls),
        warnings=tuple(warnings),
    )
    return assemble(meta, columns, edges)


def _chains(prompts: Sequence[Prompt], block_tokens: int) -> dict[str, Any]:
    """The delta columns, block ids numbered in the order in which they are first seen."""
    owner: dict[int, int] = {}  # id of a prompt -> first row that it was the beginning of
    parents: list[int] = []
    shared: list[int] = []
    new: list[int] = []
    for row, prompt in enumerate(prompts):
        known: Prompt | None = prompt
        while known is not None and id(known) not in owner:
            owner[id(known)] = row
            known = known.before
        common = known.tokens // block_tokens if known is not None else 0
        parent = owner[id(known)] if common else -1
        parents.append(parent)
        shared.append(common)
        new.append(prompt.tokens // block_tokens - common)
    new_blocks = np.array(new, np.int64)
    return {
        "shared_parent": parents,
        "shared_blocks": shared,
        "new_block_start": np.cumsum(new_blocks) - new_blocks,
        "new_blocks": new_blocks,
        "block_ids": np.arange(new_blocks.sum()),
    }
