"""The lossless formats that a tuned kernel attends over: gate, fuzz and bench read this list.

A new one is a launcher with the arguments of `kvfold.kernels.fixed4`, what fills its pages, and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvfold.kernels import fixed3, fixed3_pack, fixed3_unpack, fixed4, fixed4_pack, fixed4_unpack
from kvfold.kernels.fixed3_pages import fill_fixed3, fixed3_pages, pack_fixed3
from kvfold.kernels.inputs import pack_fixed4

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvfold.kernels.inputs import Drawn
    from kvfold.kernels.pages import BlockTable, PagedKv


@dataclass(frozen=True, slots=True)
class Fused:
    """One format. What ``attend`` takes as its pages may be more than a `PagedKv`."""

    name: str
    attend: Callable[..., torch.Tensor]
    # A case's pages, the same tokens as raw pages only, and how many exceptions the packed ones list.
    pack_drawn: Callable[[Drawn], tuple[Any, Any, int]]
    # All blocks of raw_k and raw_v packed: raw pages by block, int32 [block, page of it], and block_tokens.
    # K and V, and the bytes of one block, both, all heads.
    fill: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[tuple[Any, Any], int]]
    # What ``attend`` takes, from what ``fill`` made, raw pages and a table.
    pages: Callable[[tuple[Any, Any], PagedKv, BlockTable], Any]
    # K or V alone: raw, raw pages, what is packed, places, kind and block_tokens; and the way back.
    pack: Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor, str, int], torch.Tensor]
    unpack: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, str, int], None]


def _fill_fixed4(
    raw_k: torch.Tensor, raw_v: torch.Tensor, listed: torch.Tensor, block_tokens: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    slot = fixed4_pack.slot_bytes(block_tokens, raw_k.shape[3])
    places = torch.arange(len(listed), dtype=torch.int32, device=raw_k.device)
    sides = []
    for kind, raw in (("k", raw_k), ("v", raw_v)):
        records = torch.zeros((len(listed), raw.shape[1], slot), dtype=torch.uint8, device=raw.device)
        fixed4_pack.pack(raw, listed, records, places, kind, block_tokens)
        sides.append(records)
    return (sides[0], sides[1]), 2 * raw_k.shape[1] * slot


def _fixed4_pages(filled: tuple[torch.Tensor, torch.Tensor], raw: PagedKv, table: BlockTable) -> PagedKv:
    return replace(raw, packed_k=filled[0], packed_v=filled[1], table=table)


FIXED4 = Fused(
    name="fixed4",
    attend=fixed4.attend,
    pack_drawn=pack_fixed4,
    fill=_fill_fixed4,
    pages=_fixed4_pages,
    pack=fixed4_pack.pack,
    unpack=fixed4_unpack.unpack,
)
FIXED3 = Fused(
    name="fixed3",
    attend=fixed3.attend,
    pack_drawn=pack_fixed3,
    fill=fill_fixed3,
    pages=fixed3_pages,
    pack=fixed3_pack.pack,
    unpack=fixed3_unpack.unpack,
)
FUSED = (FIXED4, FIXED3)
