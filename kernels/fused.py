"""The lossless formats that a tuned kernel attends over: gate, fuzz and bench read this list.

A new one is a launcher with the arguments of `kvfold.kernels.fixed4`, what fills its pages, and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvfold.kernels import fixed3, fixed4
from kvfold.kernels.fixed3_pages import fill_fixed3, fixed3_pages, pack_fixed3
from kvfold.kernels.fixed4_pack import pack, slot_bytes
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
    # And the bytes of one block, K and V, all heads.
    fill: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[tuple[torch.Tensor, ...], int]]
    # What ``attend`` takes, from what ``fill`` made, raw pages and a table.
    pages: Callable[[tuple[torch.Tensor, ...], PagedKv, BlockTable], Any]
    has_shares: bool  # whether ``attend`` can divide the work evenly (`kvfold.kernels.shares`)


def _fill_fixed4(
    raw_k: torch.Tensor, raw_v: torch.Tensor, listed: torch.Tensor, block_tokens: int
) -> tuple[tuple[torch.Tensor, ...], int]:
    slot = slot_bytes(block_tokens, raw_k.shape[3])
    places = torch.arange(len(listed), dtype=torch.int32, device=raw_k.device)
    sides = []
    for kind, raw in (("k", raw_k), ("v", raw_v)):
        records = torch.zeros((len(listed), raw.shape[1], slot), dtype=torch.uint8, device=raw.device)
        pack(raw, listed, records, places, kind, block_tokens)
        sides.append(records)
    return tuple(sides), 2 * raw_k.shape[1] * slot


def _fixed4_pages(filled: tuple[torch.Tensor, ...], raw: PagedKv, table: BlockTable) -> PagedKv:
    return replace(raw, packed_k=filled[0], packed_v=filled[1], table=table)


FIXED4 = Fused(
    name="fixed4",
    attend=fixed4.attend,
    pack_drawn=pack_fixed4,
    fill=_fill_fixed4,
    pages=_fixed4_pages,
    has_shares=True,
)
FIXED3 = Fused(
    name="fixed3",
    attend=fixed3.attend,
    pack_drawn=pack_fixed3,
    fill=fill_fixed3,
    pages=fixed3_pages,
    has_shares=False,
)
FUSED = (FIXED4, FIXED3)
