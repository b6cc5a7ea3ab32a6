"""Whole prefix chains to delta form in a few passes over arrays: what `Chains` does, for millions of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.traces.prefix import Chains
from kvfold.traces.table import Ints


def delta_columns(
    ids: Ints, lengths: Ints, places: Sequence[str], scopes: Ints | None = None
) -> dict[str, Any]:
    """The five delta columns of Trace from the chains of all rows, one after another. Raises BadTraceError.

    ``ids`` [blocks] are the chains in row order, ``lengths`` [rows] how many belong to each row. ``scopes`` [rows]
    says inside which calls equal ids mean equal blocks; None: inside all. Chains that break the law of prefix
    chains are refused as `Chains` refuses them.
    """
    starts = np.cumsum(lengths) - lengths
    codes = _codes(ids, None if scopes is None else np.repeat(scopes, lengths))
    positions = np.arange(ids.size, dtype=codes.dtype)
    first = np.zeros(int(codes.max(initial=-1)) + 1, codes.dtype)  # [codes] where each block stands first
    first[codes[::-1]] = positions[::-1]  # of several writes to one place the last one stays
    brought = first[codes]  # [blocks]
    new = brought == positions
    before = np.empty_like(codes)  # [blocks] the block before each, -1 at the start of a chain
    before[1:] = codes[:-1]
    before[starts[lengths > 0]] = -1
    after_new = new[:-1] & ~new[1:] & (before[1:] >= 0)
    if after_new.any() or not np.array_equal(before, before[brought]):
        return _one_by_one(ids, starts, lengths, places, scopes)
    del positions, first, before, after_new  # hundreds of MB each where there are 10^8 blocks
    new_before = np.zeros(ids.size + 1, codes.dtype)  # [blocks + 1] how many of the blocks before are new
    np.cumsum(new, out=new_before[1:])
    new_blocks = (new_before[starts + lengths] - new_before[starts]).astype(np.int64)
    shared = lengths - new_blocks
    parent = np.full(lengths.size, -1)
    rows = np.flatnonzero(shared)
    last_shared = brought[starts[rows] + shared[rows] - 1]
    filled = np.flatnonzero(lengths)  # rows without blocks start where the next one does
    parent[rows] = filled[np.searchsorted(starts[filled], last_shared, "right") - 1]
    return {
        "shared_parent": parent,
        "shared_blocks": shared,
        "new_block_start": new_before[starts],
        "new_blocks": new_blocks,
        "block_ids": ids[new] if scopes is None else np.arange(int(new.sum())),
    }


def _codes(ids: Ints, scopes: Ints | None) -> NDArray[Any]:
    """Numbers from 0 that are equal where id and scope are; the ids themselves where they are small."""
    kind = np.int32 if 4 * ids.size < 2**31 else np.int64
    if scopes is None:
        dense = int(ids.max(initial=0)) < 4 * ids.size
        return (ids if dense else np.unique(ids, return_inverse=True)[1]).astype(kind)
    order = np.lexsort((ids, scopes))
    changes = (np.diff(ids[order]) != 0) | (np.diff(scopes[order]) != 0)
    codes = np.zeros(ids.size, kind)
    codes[order[1:]] = np.cumsum(changes)
    return codes


def _one_by_one(
    ids: Ints, starts: Ints, lengths: Ints, places: Sequence[str], scopes: Ints | None
) -> dict[str, Any]:
    """The slow way, which names the first block that stands where it must not."""
    chains = Chains()
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        chain: list[Any] = ids[start : start + length].tolist()
        if scopes is not None:
            chain = [(int(scopes[row]), block) for block in chain]
        chains.add(chain, places[row])
    return chains.columns(local_ids=scopes is not None)
