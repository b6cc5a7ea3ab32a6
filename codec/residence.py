"""Where packed pages live: in slots of one size, or in main planes of one size and a pool of small chunks.

Slots hold whole pages; one that does not fit its slot stays raw, and keeps no slot. Formats with lists may be
split instead: the main plane has one size and a computed place, and only the lists take chunks, side by side so
that a kernel reads them in one go. When the pool has no room for a page's lists, that page stays raw: nothing is
ever dropped, and the caller sees which pages it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvfold.codec.packed import Packed

CHUNK_BYTES = 64


class PoolFullError(Exception):
    """The lists of a page do not fit the pool, and the caller asked to be told."""


def raw_bytes(packed: Packed) -> int:
    """Bytes of a page that stays raw, in the element size of the array."""
    return packed.page_elements * packed.tail.itemsize


def slotted_bytes(packed: Packed, slot_bytes: int) -> NDArray[np.int64]:
    """Resident bytes of each page in a slot; raw where it does not fit."""
    return np.where(packed.page_bytes <= slot_bytes, slot_bytes, raw_bytes(packed))


def pooled_bytes(packed: Packed, main_bytes: int) -> NDArray[np.int64]:
    """Resident bytes of each page as main plane and chunks; raw where that would be smaller.

    A page's padding counts as list, so up to 15 bytes more than its lists may be in chunks.
    """
    split = main_bytes + -(-(packed.page_bytes - main_bytes) // CHUNK_BYTES) * CHUNK_BYTES
    return np.minimum(split, raw_bytes(packed))


@dataclass(slots=True, eq=False)
class ChunkPool:
    """Chunks for lists, and which of them are taken; ``chunks`` is all there will ever be."""

    chunks: int
    data: NDArray[np.uint8] = field(init=False)  # [chunks, CHUNK_BYTES]
    taken: NDArray[np.bool_] = field(init=False)  # [chunks]

    def __post_init__(self) -> None:
        if self.chunks < 0:
            raise ValueError(f"chunks must be at least 0, got {self.chunks}")
        self.data = np.zeros((self.chunks, CHUNK_BYTES), np.uint8)
        self.taken = np.zeros(self.chunks, np.bool_)

    def store(self, lists: NDArray[np.uint8]) -> int | None:
        """The first of the chunks that now hold ``lists``: the lowest free run, or None if there is none."""
        count = -(-len(lists) // CHUNK_BYTES)
        free = np.flatnonzero(~self.taken)
        if count == 0 or len(free) < count:
            return 0 if count == 0 else None
        starts = free[: len(free) - count + 1]
        runs = np.flatnonzero(free[count - 1 :] - starts == count - 1)
        if len(runs) == 0:
            return None
        first = int(starts[runs[0]])
        self.data[first : first + count].reshape(-1)[: len(lists)] = lists
        self.taken[first : first + count] = True
        return first

    def load(self, first: int, list_bytes: int) -> NDArray[np.uint8]:
        """The lists that were stored at ``first``."""
        start = first * CHUNK_BYTES
        return self.data.reshape(-1)[start : start + list_bytes]

    def release(self, first: int, list_bytes: int) -> None:
        """Give the chunks of these lists back."""
        self.taken[first : first + -(-list_bytes // CHUNK_BYTES)] = False


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """Pages of one array in memory: main planes, runs of chunks, and those that stayed raw."""

    packed: Packed  # all but the pages: shape, windows, tail
    mains: dict[int, NDArray[np.uint8]]  # by page
    lists: dict[int, tuple[int, int]]  # by page: first chunk, bytes of lists
    raw: dict[int, NDArray[np.uint16]]  # by page: patterns [kv_head, block_token, head_dim]


def store_pages(
    patterns: NDArray[np.uint16], packed: Packed, main_bytes: int, pool: ChunkPool, raw_when_full: bool = True
) -> Resident:
    """Keep the pages of ``patterns``, in order: split where that is smaller than raw and the pool has room.

    With ``raw_when_full=False`` a page that the pool cannot hold raises PoolFullError, and every chunk that
    this call took is given back first.
    """
    splits = pooled_bytes(packed, main_bytes) < raw_bytes(packed)
    resident = Resident(packed, {}, {}, {})
    for page, (start, end) in enumerate(zip(packed.page_starts[:-1], packed.page_starts[1:], strict=True)):
        lists = packed.pages[start + main_bytes : end]
        first = pool.store(lists) if splits[page] else None
        if splits[page] and first is None and not raw_when_full:
            release_pages(resident, pool)
            raise PoolFullError(
                f"page {page}: its lists need {-(-len(lists) // CHUNK_BYTES)} chunks side by side, which the pool "
                f"of {pool.chunks} chunks does not have"
            )
        if first is None:
            tokens = slice(page * packed.block_tokens, (page + 1) * packed.block_tokens)
            resident.raw[page] = patterns[:, tokens].copy()
        else:
            resident.mains[page] = packed.pages[start : start + main_bytes].copy()
            resident.lists[page] = first, len(lists)
    return resident


def load_pages(
    resident: Resident, pool: ChunkPool, decode: Callable[[Packed], NDArray[np.uint16]]
) -> NDArray[np.uint16]:
    """The patterns ``uint16 [kv_head, token, head_dim]``, from wherever their pages live."""
    packed = resident.packed
    kv_heads, _, head_dim = packed.shape
    patterns = np.empty(packed.shape, np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    for page in range(packed.page_count):
        tokens = slice(page * packed.block_tokens, (page + 1) * packed.block_tokens)
        if page in resident.raw:
            patterns[:, tokens] = resident.raw[page]
            continue
        data = np.concatenate([resident.mains[page], pool.load(*resident.lists[page])])
        alone = replace(
            packed,
            shape=(kv_heads, packed.block_tokens, head_dim),
            pages=data,
            page_starts=np.array([0, len(data)], np.int64),
            tail=np.empty((kv_heads, 0, head_dim), np.uint16),
        )
        patterns[:, tokens] = decode(alone)
    return patterns


def release_pages(resident: Resident, pool: ChunkPool) -> None:
    """Give all chunks of an array back."""
    for first, list_bytes in resident.lists.values():
        pool.release(first, list_bytes)
