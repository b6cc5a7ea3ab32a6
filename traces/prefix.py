"""Prefix chains in delta form, and what an unlimited prefix cache would hit.

A call's prompt is a chain of blocks; equal ids mean equal blocks *and* equal prefixes, so a known id pins the
whole chain before it. A call then needs only its parent in the chain, the length that they share, and the run
of new ids: the 94.3 million ids of the WEKA archive become 3.5 million.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Ints, Trace


class Chains:
    """Builds the delta columns from whole chains, fed in row order."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}  # block id -> row that brought it
        self._chain: dict[int, Sequence[int]] = {}  # row -> its whole chain
        self._place: dict[int, str] = {}
        self.shared_parent: list[int] = []
        self.shared_blocks: list[int] = []
        self.new_blocks: list[int] = []
        self.ids: list[int] = []

    def forget(self) -> None:
        """Start a new scope: ids seen so far say nothing about later ones."""
        self._owner.clear()
        self._chain.clear()
        self._place.clear()

    def add(self, chain: Sequence[int], place: str) -> None:
        """Append the next row. Raises BadTraceError if an id does not always follow the same blocks."""
        row = len(self.shared_parent)
        shared = bisect_left(chain, True, key=lambda block: block not in self._owner)
        parent = self._owner[chain[shared - 1]] if shared else -1
        new = chain[shared:]
        known = self._chain[parent] if shared else chain
        if (
            known[:shared] != chain[:shared]
            or not self._owner.keys().isdisjoint(new)
            or len(set(new)) != len(new)
        ):
            raise self._broken(chain, place)
        self._owner.update(dict.fromkeys(new, row))
        self._chain[row], self._place[row] = chain, place
        self.shared_parent.append(parent)
        self.shared_blocks.append(shared)
        self.new_blocks.append(len(new))
        self.ids.extend(new)

    def _broken(self, chain: Sequence[int], place: str) -> BadTraceError:
        mend = "these ids are not chained prefix blocks: leave them out"
        for position, block in enumerate(chain):
            before = list(chain[:position])
            if block in before:
                return BadTraceError(f"a block id may stand once in a chain, got {block} twice", place, mend)
            if block in self._owner:
                row = self._owner[block]
                known = self._chain[row]
                if list(known[: known.index(block)]) != before:
                    rule = f"a block id must always follow the same blocks, got {block} after others than in"
                    return BadTraceError(f"{rule} {self._place[row]}", place, mend)
        raise AssertionError("the chain is sound")

    def columns(self, local_ids: bool = False) -> dict[str, Any]:
        """The five delta columns of Trace. ``local_ids``: renumber so that no two scopes share a number."""
        new_blocks = np.array(self.new_blocks, dtype=np.int64)
        ids = np.arange(len(self.ids)) if local_ids else np.array(self.ids, dtype=np.int64)
        return {
            "shared_parent": self.shared_parent,
            "shared_blocks": self.shared_blocks,
            "new_block_start": np.cumsum(new_blocks) - new_blocks,
            "new_blocks": new_blocks,
            "block_ids": ids,
        }


def partial_last(
    columns: Mapping[str, Any], input_tokens: Ints, block_tokens: int, places: Sequence[str]
) -> str:
    """Whether a prompt's last, partial block has an id: ``kept`` (Mooncake), ``dropped`` (WEKA) or ``mixed``.

    ``none`` if no prompt ends in a partial block. Raises BadTraceError where the number of ids fits neither.
    """
    blocks = np.asarray(columns["shared_blocks"]) + columns["new_blocks"]
    floor, partial = np.divmod(input_tokens, block_tokens)
    extra = blocks - floor
    wrong = np.flatnonzero((extra != 0) & ((extra != 1) | (partial == 0)))
    if wrong.size:
        row = int(wrong[0])
        raise BadTraceError(
            f"{input_tokens[row]} tokens in blocks of {block_tokens} must have {floor[row]} ids"
            + (f" (or {floor[row] + 1} with the partial block)" if partial[row] else "")
            + f", got {blocks[row]} ({wrong.size} such rows)",
            places[row],
            "check the block size and that the prompt length is the whole prompt",
        )
    cut = extra[partial > 0]
    return "none" if not cut.size else "kept" if cut.all() else "mixed" if cut.any() else "dropped"


def chain_of(trace: Trace, row: int) -> Ints:
    """All block ids of one call's prompt, in order."""
    parts: list[Ints] = []
    length = int(trace.shared_blocks[row] + trace.new_blocks[row])
    while length:
        shared, start = int(trace.shared_blocks[row]), int(trace.new_block_start[row])
        if length > shared:
            parts.append(trace.block_ids[start : start + length - shared])
            length = shared
        row = int(trace.shared_parent[row])
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)


def prefix_hit_block_share(trace: Trace) -> float:
    """Share of all prompt blocks that an earlier call had, if the cache never evicts; NaN without hashes."""
    blocks = int(trace.shared_blocks.sum() + trace.new_blocks.sum())
    return int(trace.shared_blocks.sum()) / blocks if blocks else float("nan")


def prefix_hit_token_share(trace: Trace) -> float:
    """Share of all prompt tokens in blocks that an earlier call had, with a cache that never evicts.

    NaN where the source has no hashes. A partial block counts with the tokens that it holds.
    """
    if trace.meta.hash_scope == "none" or not len(trace):
        return float("nan")
    hit = np.minimum(trace.shared_blocks.astype(np.int64) * trace.meta.block_size_tokens, trace.input_tokens)
    return int(hit.sum()) / int(trace.input_tokens.sum())
