"""Decode attention over `fixed4` pages, raw pages and a raw tail in one sequence: launches the Gluon kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvfold.codec.fixed4 import exception_capacity
from kvfold.kernels.bf16 import LOG2_E, check_query
from kvfold.kernels.fixed4_gluon import attend_kernel
from kvfold.kernels.fixed4_layout import nibble_layout, weight_layouts
from kvfold.kernels.fixed4_pack import slot_bytes
from kvfold.kernels.merge import merge_shares, merge_splits, parts_for
from kvfold.kernels.shares import copies_at_once, schedule

if TYPE_CHECKING:
    from kvfold.kernels.pages import PagedKv

MOST_GROUP = 16


def attend(
    q: torch.Tensor,
    kv: PagedKv,
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
    are divided evenly among that many instead (`kvfold.kernels.shares`), which suits ragged batches: twice as many
    as there are multiprocessors. ``in_tile`` puts exceptions where the raw pages have them: slow, and equal to the
    same call on raw pages by ``torch.equal``. ``has_skips`` says that the table has skips (a sliding window).
    ``exceptions=False`` leaves them out, to time what they cost: the result is wrong. ``copies`` is 1 or 2, by
    default what `kvfold.kernels.shares.copies_at_once` says; the result is the same. Raises ValueError for shapes
    that do not fit, packed pages of other than 128 or 256 tokens and heads of other than 64, 128 or 256 channels.
    """
    check_query(q, kv, MOST_GROUP)
    batch, q_heads, head_dim = q.shape
    group = q_heads // kv.kv_heads
    if head_dim not in (64, 128, 256) or kv.block_tokens not in (128, 256):
        raise ValueError(
            f"head_dim must be 64, 128 or 256 and packed pages of 128 or 256 tokens, "
            f"got {head_dim} and {kv.block_tokens}"
        )
    if kv.raw_page_tokens % 16 or kv.block_tokens % kv.raw_page_tokens:
        raise ValueError(
            f"raw pages must hold a multiple of 16 tokens that divides {kv.block_tokens}, got {kv.raw_page_tokens}"
        )
    slot = slot_bytes(kv.block_tokens, head_dim)
    for name, records in (("packed_k", kv.packed_k), ("packed_v", kv.packed_v)):
        if records.dtype != torch.uint8 or records.shape[1:] != (kv.kv_heads, slot):
            raise ValueError(
                f"{name} must be uint8 [page, {kv.kv_heads}, {slot}], got {records.dtype} {list(records.shape)}"
            )
    rows = 8 if group <= 8 else 16
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out is None else out
    parts, lse = parts_for(q, out, kv.kv_heads, rows, splits, programs)
    table = kv.table
    warps = kv.block_tokens // 64 * max(1, head_dim // 128)
    written, read = weight_layouts(kv.block_tokens // 8, rows)
    launched = batch * kv.kv_heads * splits if programs is None else programs
    attend_kernel[(launched,)](
        q,
        kv.packed_k.view(torch.uint32),
        kv.packed_v.view(torch.uint32),
        kv.raw_k,
        kv.raw_v,
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
        kv.kv_heads,
        splits,
        scale * LOG2_E,
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=kv.block_tokens,
        RAW_TOKENS=kv.raw_page_tokens,
        SLOT_BYTES=slot,
        CAPACITY=exception_capacity(head_dim),
        NIBBLES=nibble_layout(kv.block_tokens // 8, head_dim),
        WRITTEN=written,
        READ=read,
        WARPS=warps,
        WINDOW=has_skips,
        IN_TILE=in_tile,
        EXCEPTIONS=exceptions,
        COPIES=copies_at_once(launched, q.device) if copies is None else copies,
        **schedule(batch, splits, programs),
        num_warps=warps,
    )
    if programs is not None:
        merge_shares(parts, lse, out, kv.kv_heads, programs, rows, table, kv.block_tokens, has_packed=True)
    elif splits > 1:
        merge_splits(parts, lse, out, kv.kv_heads, splits, rows)
    return out


def split_count(batch: int, kv_heads: int, blocks: int, programs_at_once: int) -> int:
    """Splits that fill the GPU once: as many equal parts as all programs that run at a time can take.

    ``blocks`` is the longest sequence's, ``programs_at_once`` multiprocessors times programs on each.
    """
    most = max(1, programs_at_once // (batch * kv_heads))
    per_split = -(-blocks // min(most, blocks))
    return -(-blocks // per_split)
