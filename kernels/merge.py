"""Merge the parts of a split attention: one program per query head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvfold.kernels.shares import batch_tile, block_counts, most_parts, program_of

if TYPE_CHECKING:
    from kvfold.kernels.pages import BlockTable


@triton.jit
def merge_kernel(
    part_ptr,  # float32 [part, ROWS, HEAD_DIM], each part normalised by its own sum
    lse_ptr,  # float32 [part, ROWS], log2 of each part's sum of exponentials, -inf where nothing was read
    out_ptr,  # [batch, query head, HEAD_DIM]
    split_count,  # parts of each head, in the order [batch, kv_head, split]; with shares, the number of programs
    SPLIT_TILE: tl.constexpr,  # power of two that holds all parts of a head
    ROWS: tl.constexpr,  # query heads of a KV head, padded to the tile of the attention kernel
    HEAD_DIM: tl.constexpr,
    raw_tokens_ptr=None,  # int32 [batch]: given, parts are those of `kvfold.kernels.shares`
    packed_counts_ptr=None,  # int32 [batch], or None where no sequence has packed pages
    batch=1,
    kv_heads=1,
    BLOCK_TOKENS: tl.constexpr = 1,
    BATCH_TILE: tl.constexpr = 1,
):
    kv = tl.program_id(0)  # batch * kv_heads + kv_head
    row = tl.program_id(1)
    split = tl.arange(0, SPLIT_TILE)
    channel = tl.arange(0, HEAD_DIM)
    if raw_tokens_ptr is None:
        count = split_count
        part = kv * split_count + split
    else:
        sequence = tl.arange(0, BATCH_TILE)
        counts = block_counts(sequence, batch, packed_counts_ptr, raw_tokens_ptr, BLOCK_TOKENS)
        all_blocks = tl.maximum(tl.sum(counts, 0) * kv_heads, 1)
        programs = tl.minimum(split_count, all_blocks)
        b = kv // kv_heads
        blocks = tl.sum(tl.where(sequence == b, counts, 0), 0)
        start = tl.sum(tl.where(sequence < b, counts, 0), 0) * kv_heads + kv % kv_heads * blocks
        first = program_of(start, programs, all_blocks)
        last = program_of(start + blocks - 1, programs, all_blocks)
        count = tl.where(blocks > 0, last - first + 1, 0)
        part = first + kv + split
    # The one program of a head that is not shared has written its result.
    if raw_tokens_ptr is None or count != 1:
        part = part * ROWS + row
        lse = tl.load(lse_ptr + part, mask=split < count, other=float("-inf"))
        top = tl.max(lse, 0)
        weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weight, 0)
        weight = weight / tl.where(total > 0, total, 1.0)
        part_offset = part[:, None] * HEAD_DIM + channel[None, :]
        parts = tl.load(part_ptr + part_offset, mask=split[:, None] < count, other=0.0)
        # An empty split has weight 0 and wrote nothing that counts.
        merged = tl.sum(tl.where(weight[:, None] > 0, parts * weight[:, None], 0.0), 0)
        tl.store(
            out_ptr + (kv * tl.num_programs(1) + row) * HEAD_DIM + channel,
            merged.to(out_ptr.dtype.element_ty),
        )


def empty_parts(
    q: torch.Tensor, rows_per_sequence: int, more_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts ``float32 [batch * rows_per_sequence + more_rows, head_dim]`` and their log2 sums."""
    rows = len(q) * rows_per_sequence + more_rows
    parts = torch.empty((rows, q.shape[2]), dtype=torch.float32, device=q.device)
    return parts, torch.empty(rows, dtype=torch.float32, device=q.device)


def parts_for(
    q: torch.Tensor, out: torch.Tensor, kv_heads: int, rows: int, splits: int, programs: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the parts of all splits, or of all shares if ``programs`` is given; ``out`` where none are."""
    if programs is not None:
        return empty_parts(q, kv_heads * rows, programs * rows)
    return (out, out) if splits == 1 else empty_parts(q, kv_heads * splits * rows)


def merge_splits(
    parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, kv_heads: int, splits: int, rows: int
) -> None:
    """Merge parts ``[batch, kv_head, split, row, head_dim]`` into ``out [batch, q_head, head_dim]``."""
    _merge(parts, lse, out, kv_heads, rows, splits, most=splits)


def merge_shares(
    parts: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    kv_heads: int,
    programs: int,
    rows: int,
    table: BlockTable,
    block_tokens: int,
    has_packed: bool,
) -> None:
    """Merge the parts of heads that several of ``programs`` share into ``out [batch, q_head, head_dim]``.

    Blocks are the packed pages of ``table``, where ``has_packed`` says that there are any, and ``block_tokens`` of
    its raw tokens each.
    """
    _merge(
        parts,
        lse,
        out,
        kv_heads,
        rows,
        programs,
        most=most_parts(programs, kv_heads),
        raw_tokens_ptr=table.raw_tokens,
        packed_counts_ptr=table.packed_counts if has_packed else None,
        batch=len(out),
        kv_heads=kv_heads,
        BLOCK_TOKENS=block_tokens,
        BATCH_TILE=batch_tile(len(out)),
    )


def _merge(
    parts: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    heads: int,
    rows: int,
    count: int,
    most: int,
    **shares: object,
) -> None:
    batch, q_heads, head_dim = out.shape
    merge_kernel[(batch * heads, q_heads // heads)](
        parts,
        lse,
        out,
        count,
        SPLIT_TILE=triton.next_power_of_2(most),
        ROWS=rows,
        HEAD_DIM=head_dim,
        **shares,
    )
