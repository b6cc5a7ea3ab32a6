"""Decode attention over `fixed3` pages, raw pages and a raw tail in one sequence: launches the Gluon kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfold.codec.fixed3 import head_main_bytes
from kvfold.kernels.bf16 import LOG2_E, check_query
from kvfold.kernels.fixed3_gluon import attend_kernel
from kvfold.kernels.fixed3_layout import BLOCK_TOKENS, HEAD_DIM, QUAD, QUADS, WARPS, columns
from kvfold.kernels.fixed4_pack import check_page_tokens
from kvfold.kernels.merge import merge_shares, merge_splits, parts_for
from kvfold.kernels.shares import copies_at_once, schedule

if TYPE_CHECKING:
    from kvfold.kernels.pages import PagedKv

MOST_GROUP = QUAD * QUADS[-1]
MAIN_BYTES = head_main_bytes(BLOCK_TOKENS, HEAD_DIM)


@dataclass(frozen=True, slots=True, eq=False)
class Fixed3Kv:
    """Pages whose packed ones are main parts, ``uint8 [page, kv_head, MAIN_BYTES]``, and where their lists are.

    An entry says where a head's list starts and how long it is: ``start << 8 | length``, in units of 16 bytes.
    """

    pages: PagedKv
    k_lists: torch.Tensor  # uint8, whose last axis is a multiple of 16
    v_lists: torch.Tensor
    k_entries: torch.Tensor  # int32 [page, kv_head], read as unsigned
    v_entries: torch.Tensor


def attend(
    q: torch.Tensor,
    kv: Fixed3Kv,
    scale: float,
    splits: int,
    out: torch.Tensor | None = None,
    in_tile: bool = False,
    has_skips: bool = False,
    exceptions: bool = True,
    programs: int | None = None,
    copies: int | None = None,
) -> torch.Tensor:
    """Attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over ``kv``: float32 of that shape.

    The softmax is split over ``splits`` programs per KV head and merged; with ``programs`` all blocks of the batch
    are divided evenly among that many instead (`kvfold.kernels.shares`). ``in_tile`` puts exceptions where the raw
    pages have them: slow, and equal to the same call on raw pages by ``torch.equal``. ``has_skips`` says that the
    table has skips (a sliding window). ``exceptions=False`` leaves them out, to time what they cost: the result is
    wrong. ``copies`` is 1 or 2, by default what `kvfold.kernels.shares.copies_at_once` says; the result is the
    same. Raises ValueError when shapes do not fit, for packed pages of other than 256 tokens, heads of other than
    128 channels and more than 16 query heads per KV head.
    """
    pages = kv.pages
    check_query(q, pages, MOST_GROUP)
    batch, q_heads, head_dim = q.shape
    group = q_heads // pages.kv_heads
    if head_dim != HEAD_DIM or pages.block_tokens != BLOCK_TOKENS:
        raise ValueError(
            f"head_dim must be {HEAD_DIM} and packed pages of {BLOCK_TOKENS} tokens, "
            f"got {head_dim} and {pages.block_tokens}"
        )
    check_page_tokens(pages.raw_page_tokens, BLOCK_TOKENS)
    for name, mains in (("packed_k", pages.packed_k), ("packed_v", pages.packed_v)):
        if mains.dtype != torch.uint8 or mains.shape[1:] != (pages.kv_heads, MAIN_BYTES):
            raise ValueError(
                f"{name} must be uint8 [page, {pages.kv_heads}, {MAIN_BYTES}], "
                f"got {mains.dtype} {list(mains.shape)}"
            )
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out is None else out
    quads = next(quads for quads in QUADS if QUAD * quads >= group)
    rows = columns(quads)
    parts, lse = parts_for(q, out, pages.kv_heads, rows, splits, programs)
    table = pages.table
    launched = batch * pages.kv_heads * splits if programs is None else programs
    attend_kernel[(launched,)](
        q,
        pages.packed_k.view(torch.uint32),
        pages.packed_v.view(torch.uint32),
        kv.k_lists.view(torch.uint32),
        kv.v_lists.view(torch.uint32),
        kv.k_entries.view(torch.uint32),
        kv.v_entries.view(torch.uint32),
        pages.raw_k,
        pages.raw_v,
        table.packed_pages,
        table.packed_counts,
        table.packed_skips,
        table.raw_pages,
        table.raw_tokens,
        table.raw_skips,
        out,
        parts,
        lse,
        table.packed_pages.shape[1],
        table.raw_pages.shape[1],
        batch,
        pages.kv_heads,
        splits,
        scale * LOG2_E,
        GROUP=group,
        QUADS=quads,
        HEADS=rows,
        RAW_TOKENS=pages.raw_page_tokens,
        WINDOW=has_skips,
        IN_TILE=in_tile,
        EXCEPTIONS=exceptions,
        COPIES=copies_at_once(launched, q.device) if copies is None else copies,
        **schedule(batch, splits, programs),
        num_warps=WARPS,
        # Shared memory has room for two programs on a multiprocessor, or for one of 16 columns.
        maxnreg=128 if rows == 8 else 255,
    )
    if programs is not None:
        merge_shares(parts, lse, out, pages.kv_heads, programs, rows, table, BLOCK_TOKENS, has_packed=True)
    elif splits > 1:
        merge_splits(parts, lse, out, pages.kv_heads, splits, rows)
    return out
