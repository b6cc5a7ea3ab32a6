"""A case's tokens, or a pool's, as `fixed3` pages, packed on the device; and what the codec makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvfold.codec.fixed3 import head_main_bytes
from kvfold.kernels.fixed3 import Fixed3Kv
from kvfold.kernels.fixed3_pack import LIST_UNIT_BYTES, Slots, empty_slots, pack
from kvfold.kernels.inputs import POISON, Drawn, raw_pages, tables

if TYPE_CHECKING:
    from kvfold.codec.packed import Packed
    from kvfold.kernels.pages import BlockTable, PagedKv

LIST_BYTES = (
    1280  # of a slot: 640 exceptions among 32,768 elements; the samples' longest lists have 352 to 672
)


def pack_fixed3(drawn: Drawn) -> tuple[Fixed3Kv, Fixed3Kv, int]:
    """The pages in `fixed3`, the same tokens as raw pages only, and how many exceptions the packed ones list.

    Blocks that do not fit are raw in both.
    """
    case, listed, device = drawn.case, drawn.listed(), drawn.q.device
    places = torch.arange(len(listed), dtype=torch.int32, device=device)
    sides, counts = [], []
    for kind, raw in (("k", drawn.raw_k), ("v", drawn.raw_v)):
        memory = empty_slots(
            len(listed) + 2, case.kv_heads, case.block_tokens, case.head_dim, LIST_BYTES, device
        )
        memory.mains.fill_(POISON)
        memory.lists.fill_(POISON)
        sides.append(Slots(memory.mains[1:-1], memory.lists[1:-1], memory.entries[1:-1]))
        counts.append(pack(raw, listed, sides[-1], places, kind, case.block_tokens))
    most = torch.maximum(*counts)
    table, only_raw = tables(drawn, most.amax(1).gt(LIST_BYTES // 2).tolist() if len(listed) else [])
    used = [table.packed_pages[b, : int(table.packed_counts[b])] for b in range(table.batch)]
    exceptions = int((counts[0] + counts[1])[torch.cat(used).long()].sum())
    kv = _as_pages(sides[0], sides[1], replace(raw_pages(drawn), table=table))
    return kv, replace(kv, pages=kv.pages.with_table(only_raw)), exceptions


def fill_fixed3(
    raw_k: torch.Tensor, raw_v: torch.Tensor, listed: torch.Tensor, block_tokens: int
) -> tuple[tuple[Slots, Slots], int]:
    """All listed blocks packed, and the mean bytes of one that attention reads, K and V, all heads.

    Raises ValueError if any must stay raw.
    """
    places = torch.arange(len(listed), dtype=torch.int32, device=raw_k.device)
    _, kv_heads, _, head_dim = raw_k.shape
    sides, size = [], 0
    for kind, raw in (("k", raw_k), ("v", raw_v)):
        slots = empty_slots(len(listed), kv_heads, block_tokens, head_dim, LIST_BYTES, raw.device)
        counts = pack(raw, listed, slots, places, kind, block_tokens)
        if overfull := int(counts.amax(1).gt(LIST_BYTES // 2).sum()):
            raise ValueError(f"{overfull} of {len(listed)} blocks do not fit `fixed3`")
        units = (slots.entries & 0xFF).sum().item() / len(listed)
        size += kv_heads * head_main_bytes(block_tokens, head_dim) + round(LIST_UNIT_BYTES * units)
        sides.append(slots)
    return (sides[0], sides[1]), size


def fixed3_pages(filled: tuple[Slots, Slots], raw: PagedKv, table: BlockTable) -> Fixed3Kv:
    """What the kernel takes, from what `fill_fixed3` made."""
    return _as_pages(*filled, replace(raw, table=table))


def _as_pages(k: Slots, v: Slots, raw: PagedKv) -> Fixed3Kv:
    pages = replace(raw, packed_k=k.mains, packed_v=v.mains)
    return Fixed3Kv(pages, k.lists, v.lists, k.entries, v.entries)


def differing_bytes(slots: Slots, places: torch.Tensor, packed: Packed) -> int:
    """Bytes in which the pages at ``places`` differ from the codec's, none of them raw; -1 for other lengths."""
    lists = slots.lists.flatten().cpu().numpy()
    different = 0
    for number, place in enumerate(places.tolist()):
        entries = slots.entries[place].cpu().numpy().view(np.uint32)
        made = [slots.mains[place].flatten().cpu().numpy()]
        for entry in entries.tolist():
            start = LIST_UNIT_BYTES * (entry >> 8)
            made.append(lists[start : start + LIST_UNIT_BYTES * (entry & 0xFF)])
        page = packed.pages[packed.page_starts[number] : packed.page_starts[number + 1]]
        data = np.concatenate(made)
        if len(data) != len(page):
            return -1
        different += int(np.count_nonzero(data != page))
    return different
