"""`fixed3` pages of the codec as pools: main parts of one size, lists one after another, and who has which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvfold.codec import fixed3 as codec
from kvfold.kernels.fixed3 import LARGEST_K_BASE, LIST_UNIT_BYTES, Fixed3Kv
from kvfold.kernels.inputs import POISON, Drawn, patterns_of, raw_pages, tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.kernels.pages import BlockTable, PagedKv

# Sums of V stand as 2 ** (64 - base) of what they are, never larger; from block to block they are rescaled by
# 2 ** (base - next base), which is a float32 between any two of these.
V_BASES = (65, 191)
MOST_LIST_UNITS = 1 << 24  # that an entry can count


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """K or V of pages of one format; what a raw page has of a main part and a list is not used."""

    mains: NDArray[np.uint8]  # [page, kv_head, main_bytes]
    lists: NDArray[np.uint8]  # [bytes]
    entries: NDArray[np.int64]  # [page, kv_head], start << 8 | length, in units of 16 bytes
    exceptions: NDArray[np.int64]  # [page]
    is_raw: NDArray[np.bool_]  # [page]


def encode_side(patterns: NDArray[np.uint16], block_tokens: int, kind: codec.Kind) -> Side:
    """Patterns ``[kv_head, token, head_dim]``, whole blocks of them, by the codec."""
    kv_heads, _, head_dim = patterns.shape
    packed = codec.encode(patterns, None, block_tokens, kind)
    pages, main = packed.page_count, codec.head_main_bytes(block_tokens, head_dim)
    mains = np.zeros((pages, kv_heads, main), np.uint8)
    is_raw = packed.page_bytes == 2 * packed.page_elements
    lists = [np.zeros(LIST_UNIT_BYTES, np.uint8)]  # pages without exceptions still need a list to point to
    for page in np.flatnonzero(~is_raw):
        data = packed.pages[packed.page_starts[page] : packed.page_starts[page + 1]]
        mains[page] = data[: kv_heads * main].reshape(kv_heads, main)
        lists.append(data[kv_heads * main :])
    rows = codec.row_count(block_tokens, head_dim)
    ends = mains[:, :, codec.word_bytes(block_tokens, head_dim) + head_dim :][:, :, :rows]
    counts = ends[:, :, codec.GROUP_ROWS - 1 :: codec.GROUP_ROWS].astype(np.int64).sum(2)  # [page, kv_head]
    units = (2 * counts + LIST_UNIT_BYTES - 1) // LIST_UNIT_BYTES
    starts = 1 + np.cumsum(units).reshape(units.shape) - units
    words = codec.word_bytes(block_tokens, head_dim)
    bases = mains[:, :, words : words + head_dim]  # [page, kv_head, head_dim]
    lowest, highest = (0, LARGEST_K_BASE) if kind == "k" else V_BASES
    is_raw |= ((bases < lowest) | (bases > highest)).any(axis=(1, 2))
    return Side(mains, np.concatenate(lists), starts << 8 | units, counts.sum(1), is_raw)


def pack_fixed3(drawn: Drawn) -> tuple[Fixed3Kv, Fixed3Kv, int]:
    """The pages in `fixed3`, the same tokens as raw pages only, and how many exceptions the packed ones list."""
    case, device = drawn.case, drawn.q.device
    k_patterns, v_patterns = drawn.patterns()
    k, v = encode_side(k_patterns, case.block_tokens, "k"), encode_side(v_patterns, case.block_tokens, "v")
    table, only_raw = tables(drawn, (k.is_raw | v.is_raw).tolist())
    used = [table.packed_pages[b, : int(table.packed_counts[b])] for b in range(table.batch)]
    exceptions = int((k.exceptions + v.exceptions)[torch.cat(used).cpu().numpy()].sum())
    guarded = []
    for side in (k, v):
        memory = np.full((len(side.mains) + 2, *side.mains.shape[1:]), POISON, np.uint8)
        memory[1:-1] = side.mains
        guarded.append(torch.from_numpy(memory).to(device)[1:-1])
    kv = Fixed3Kv(
        replace(raw_pages(drawn), packed_k=guarded[0], packed_v=guarded[1], table=table),
        *(torch.from_numpy(side.lists).to(device) for side in (k, v)),
        *(_as_words(side.entries, device) for side in (k, v)),
    )
    return kv, replace(kv, pages=kv.pages.with_table(only_raw)), exceptions


def fill_fixed3(
    raw_k: torch.Tensor, raw_v: torch.Tensor, listed: torch.Tensor, block_tokens: int, encoded: int = 32
) -> tuple[tuple[torch.Tensor, ...], int]:
    """As many packed blocks as are listed, and the bytes of one: the first few encoded, over and over.

    Lists are repeated with their pages, as far as entries can count.
    """
    sides, size = [], 0
    count = len(listed)
    few = min(encoded, count)
    kinds: tuple[codec.Kind, ...] = ("k", "v")
    for kind, raw in zip(kinds, (raw_k, raw_v), strict=True):
        side = encode_side(patterns_of(raw[listed[:few].long().flatten()]), block_tokens, kind)
        if side.is_raw.any():
            raise ValueError(f"{int(side.is_raw.sum())} of {few} blocks do not fit `fixed3`")
        number = torch.arange(count, device=raw.device)
        repeats = min(-(-count // few), MOST_LIST_UNITS * LIST_UNIT_BYTES // len(side.lists))
        shift = (number // few % repeats * (len(side.lists) // LIST_UNIT_BYTES)) << 8
        mains = torch.from_numpy(side.mains).to(raw.device)[number % few]
        entries = torch.from_numpy(side.entries).to(raw.device)[number % few] + shift[:, None]
        lists = torch.from_numpy(side.lists).to(raw.device).repeat(repeats)
        sides.append((mains, lists, _as_words(entries.cpu().numpy(), raw.device)))
        size += side.mains[0].nbytes + round(16 * (side.entries & 0xFF).sum() / few)
    (mains_k, lists_k, entries_k), (mains_v, lists_v, entries_v) = sides
    return (mains_k, mains_v, lists_k, lists_v, entries_k, entries_v), size


def fixed3_pages(filled: tuple[torch.Tensor, ...], raw: PagedKv, table: BlockTable) -> Fixed3Kv:
    """What the kernel takes, from what `fill_fixed3` made."""
    return Fixed3Kv(replace(raw, packed_k=filled[0], packed_v=filled[1], table=table), *filled[2:])


def _as_words(entries: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(entries.astype(np.uint32).view(np.int32)).to(device)
