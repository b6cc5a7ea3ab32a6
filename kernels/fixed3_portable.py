"""Decode attention over `fixed3` pages in plain Triton: any GPU that Triton supports, and its interpreter.

Not tuned, and slower than the Gluon kernel: a program unpacks each block into memory of its own, which stays in
the cache, and attends over that. Packed pages and raw pages are attended by two kernels and merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvfold.codec.fixed3 import head_main_bytes
from kvfold.kernels.bf16 import LOG2_E, ROWS, check_query
from kvfold.kernels.fixed3_pack import HEAD_DIMS, MOST_LISTED
from kvfold.kernels.fixed3_unpack import unpack_head
from kvfold.kernels.fixed4_portable import merge_with_raw
from kvfold.kernels.merge import empty_parts

if TYPE_CHECKING:
    from kvfold.kernels.fixed3 import Fixed3Kv

TILE_TOKENS = 64


# Entries are read one by one, so their alignment makes no other kernel.
@triton.jit(do_not_specialize_on_alignment=["k_entries_ptr", "v_entries_ptr"])
def _attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_words_ptr,  # uint32 view of [page, kv_heads, MAIN_BYTES]
    v_words_ptr,
    k_lists_ptr,  # int16 view of lists
    v_lists_ptr,
    k_entries_ptr,  # int32 [page, kv_heads]
    v_entries_ptr,
    values_ptr,  # bfloat16 [2, program, BLOCK_TOKENS, HEAD_DIM], written first
    pairs_ptr,  # int32 view of the same
    patterns_ptr,  # int16 view of the same
    numbers_ptr,  # int32 [2 * programs], 0, 1, ...
    table_ptr,  # int32 [batch, table_width]
    counts_ptr,  # int32 [batch]
    skips_ptr,  # int32 [batch]
    part_ptr,  # float32 [batch, kv_heads, splits, ROWS, HEAD_DIM]
    lse_ptr,  # float32 [batch, kv_heads, splits, ROWS]
    table_width,
    kv_heads,
    splits,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    LIST_TILE: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 products
):
    program = tl.program_id(0)
    split = program % splits
    head = program // splits % kv_heads
    b = program // splits // kv_heads
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, TILE)
    blocks = tl.load(counts_ptr + b)
    skip = tl.load(skips_ptr + b)
    per_split = tl.cdiv(blocks, splits)
    first = split * per_split
    k_place = numbers_ptr + program
    v_place = numbers_ptr + tl.num_programs(0) + program
    held = lane[:, None] * HEAD_DIM + channel[None, :]
    k_ptr = values_ptr + program.to(tl.int64) * (BLOCK_TOKENS * HEAD_DIM)
    v_ptr = k_ptr + tl.num_programs(0).to(tl.int64) * (BLOCK_TOKENS * HEAD_DIM)
    q_offset = (b * kv_heads + head) * GROUP * HEAD_DIM + row[:, None] * HEAD_DIM + channel[None, :]
    q = tl.load(q_ptr + q_offset, mask=row[:, None] < GROUP, other=0.0)  # [ROWS, HEAD_DIM]
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for block in range(first, tl.minimum(first + per_split, blocks)):
        slot = tl.load(table_ptr + b * table_width + block).to(tl.int64) * kv_heads + head
        k_start = (tl.load(k_entries_ptr + slot) >> 8 & 0xFFFFFF).to(tl.int64) * 8
        v_start = (tl.load(v_entries_ptr + slot) >> 8 & 0xFFFFFF).to(tl.int64) * 8
        tl.debug_barrier()  # all have read the block before
        unpack_head(
            k_words_ptr + slot * (MAIN_BYTES // 4),
            k_lists_ptr + k_start,
            pairs_ptr,
            patterns_ptr,
            k_place,
            0,
            1,
            BLOCK_TOKENS,
            BLOCK_TOKENS,
            HEAD_DIM,
            LIST_TILE,
            False,
        )
        unpack_head(
            v_words_ptr + slot * (MAIN_BYTES // 4),
            v_lists_ptr + v_start,
            pairs_ptr,
            patterns_ptr,
            v_place,
            0,
            1,
            BLOCK_TOKENS,
            BLOCK_TOKENS,
            HEAD_DIM,
            LIST_TILE,
            True,
        )
        tl.debug_barrier()
        for tile in tl.range(0, BLOCK_TOKENS // TILE, num_stages=1):
            k = tl.load(k_ptr + tile * (TILE * HEAD_DIM) + held)
            if UPCAST:
                k = k.to(tl.float32)
            score = tl.dot(q, tl.trans(k)) * scale_log2  # [ROWS, TILE]
            is_kept = (block > 0) | (tile * TILE + lane >= skip)
            score = tl.where(is_kept[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - finite_top[:, None])
            decay = tl.exp2(top - finite_top)
            total = total * decay + tl.sum(weight, 1)
            acc = acc * decay[:, None]
            v = tl.load(v_ptr + tile * (TILE * HEAD_DIM) + held)
            if UPCAST:
                acc += tl.dot(weight.to(tl.bfloat16).to(tl.float32), v.to(tl.float32))
            else:
                acc = tl.dot(weight.to(tl.bfloat16), v, acc)
            top = new_top
    part_row = program * ROWS + row
    held_total = tl.where(total > 0, total, 1.0)
    tl.store(part_ptr + part_row[:, None] * HEAD_DIM + channel[None, :], acc / held_total[:, None])
    tl.store(lse_ptr + part_row, tl.where(total > 0, top + tl.log2(held_total), float("-inf")))


def attend(
    q: torch.Tensor, kv: Fixed3Kv, scale: float, splits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over ``kv``: float32 of that shape.

    Packed pages are split over ``splits`` programs per KV head, raw pages over two more. Raises ValueError when
    shapes do not fit.
    """
    pages = kv.pages
    check_query(q, pages, ROWS.value)
    batch, q_heads, head_dim = q.shape
    kv_heads, block_tokens = pages.kv_heads, pages.block_tokens
    if head_dim not in HEAD_DIMS or block_tokens not in (64, 128, 256):
        raise ValueError(
            f"head_dim must be 64 or 128 and packed pages of 64, 128 or 256 tokens, "
            f"got {head_dim} and {block_tokens}"
        )
    main = head_main_bytes(block_tokens, head_dim)
    for mains in (pages.packed_k, pages.packed_v):
        if mains.shape[1:] != (kv_heads, main):
            raise ValueError(f"packed pages must be [page, {kv_heads}, {main}], got {list(mains.shape)}")
    programs = batch * kv_heads * splits
    parts, lse = empty_parts(q, kv_heads * splits * ROWS.value)
    values = torch.empty((2 * programs, block_tokens, head_dim), dtype=torch.bfloat16, device=q.device)
    table = pages.table
    _attend_kernel[(programs,)](
        q,
        pages.packed_k.view(torch.uint32),
        pages.packed_v.view(torch.uint32),
        kv.k_lists.view(torch.int16),
        kv.v_lists.view(torch.int16),
        kv.k_entries,
        kv.v_entries,
        values,
        values.view(torch.int32),
        values.view(torch.int16),
        torch.arange(2 * programs, dtype=torch.int32, device=q.device),
        table.packed_pages,
        table.packed_counts,
        table.packed_skips,
        parts,
        lse,
        table.packed_pages.shape[1],
        kv_heads,
        splits,
        scale * LOG2_E,
        GROUP=q_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        MAIN_BYTES=main,
        LIST_TILE=triton.next_power_of_2(head_dim // 32 * MOST_LISTED.value),
        TILE=TILE_TOKENS,
        UPCAST=not q.is_cuda,
        num_warps=8,
    )
    return merge_with_raw(q, pages, scale, splits, parts, lse, out)
