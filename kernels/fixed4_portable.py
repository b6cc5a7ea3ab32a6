"""Decode attention over `fixed4` pages in plain Triton: any GPU that Triton supports, and its interpreter.

Not tuned, and slower than the Gluon kernel: tiles are decoded to values in registers and pass through shared
memory to become operands. Packed pages and raw pages (a tail, blocks that did not fit) are attended by two kernels
and merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvfold.codec.fixed4 import exception_capacity
from kvfold.kernels import bf16
from kvfold.kernels.bf16 import LOG2_E, ROWS, check_query
from kvfold.kernels.fixed4_pack import BYTE_BITS, NIBBLE_BITS, rotate, slot_bytes
from kvfold.kernels.fixed4_unpack import values_of
from kvfold.kernels.merge import empty_parts, merge_splits

if TYPE_CHECKING:
    from kvfold.kernels.pages import PagedKv

RAW_SPLITS = 2


@triton.jit
def _pair_values(
    words_ptr, nibbles_ptr, place: tl.constexpr, low_base, high_base, ALONG_TOKENS: tl.constexpr
):
    """Both patterns of the pairs of one place; pointers are to byte word 0 and nibble word 0 of plane 0 and 1."""
    byte_word = tl.load(words_ptr + place % 4 // 2)
    nibbles = tl.load(nibbles_ptr + place // 4)
    if ALONG_TOKENS:
        byte_word = tl.trans(byte_word)
        nibbles = tl.trans(nibbles)
    pairs = rotate(byte_word, 8 * (place % 2)) & BYTE_BITS
    pairs |= rotate(nibbles, 32 - 4 * (place % 4)) & NIBBLE_BITS
    both = values_of(pairs, low_base | (high_base << 16))
    return both & 0xFFFF, both >> 16


@triton.jit
def _as_operand(pattern, UPCAST: tl.constexpr):
    value = pattern.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(tl.float32) if UPCAST else value


@triton.jit
def _attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_words_ptr,  # uint32 view of [page, kv_heads, SLOT_BYTES]
    v_words_ptr,
    k_bytes_ptr,  # uint8 view of the same
    v_bytes_ptr,
    table_ptr,  # int32 [batch, table_width]
    counts_ptr,  # int32 [batch]
    skips_ptr,  # int32 [batch]
    part_ptr,  # float32 [batch, kv_heads, splits, ROWS, HEAD_DIM]
    lse_ptr,  # float32 [batch, kv_heads, splits, ROWS]
    table_width,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    CAPACITY: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 products
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    kv_heads = tl.num_programs(0)
    split_count = tl.num_programs(1)
    UNITS: tl.constexpr = BLOCK_TOKENS // 8
    PAIRS: tl.constexpr = UNITS // 2
    v_plane: tl.constexpr = HEAD_DIM * UNITS
    list_start: tl.constexpr = BLOCK_TOKENS * HEAD_DIM * 3 // 2
    base_start: tl.constexpr = list_start + 4 * CAPACITY
    row = tl.arange(0, ROWS)
    unit = tl.arange(0, UNITS)
    pair = tl.arange(0, PAIRS)
    channel = tl.arange(0, HEAD_DIM)
    half = tl.arange(0, HEAD_DIM // 2)
    blocks = tl.load(counts_ptr + b)
    skip = tl.load(skips_ptr + b)
    per_split = tl.cdiv(blocks, split_count)
    first = split * per_split

    q_offset = (b * kv_heads + head) * GROUP * HEAD_DIM + row[:, None] * HEAD_DIM + 2 * half[None, :]
    q_even = tl.load(q_ptr + q_offset, mask=row[:, None] < GROUP, other=0.0)  # [ROWS, HEAD_DIM / 2]
    q_odd = tl.load(q_ptr + q_offset + 1, mask=row[:, None] < GROUP, other=0.0)
    if UPCAST:
        q_even = q_even.to(tl.float32)
        q_odd = q_odd.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for block in range(first, tl.minimum(first + per_split, blocks)):
        page = tl.load(table_ptr + b * table_width + block).to(tl.int64)
        slot_start = (page * kv_heads + head) * SLOT_BYTES
        k_base_ptr = k_bytes_ptr + slot_start + base_start + 2 * half
        low_base = (tl.load(k_base_ptr).to(tl.uint32) << 7)[None, :]
        high_base = (tl.load(k_base_ptr + 1).to(tl.uint32) << 7)[None, :]
        v_base = (tl.load(v_bytes_ptr + slot_start + base_start + channel).to(tl.uint32) << 7)[None, :]
        k_ptr = k_words_ptr + slot_start // 4 + unit[:, None] * (3 * HEAD_DIM) + 2 * half[None, :]
        v_ptr = v_words_ptr + slot_start // 4 + channel[:, None] * UNITS + 2 * pair[None, :]
        k_count = tl.load(k_words_ptr + (slot_start + base_start + HEAD_DIM) // 4).to(tl.int32)
        v_count = tl.load(v_words_ptr + (slot_start + base_start + HEAD_DIM) // 4).to(tl.int32)
        k_list_ptr = k_words_ptr + (slot_start + list_start) // 4
        v_list_ptr = v_words_ptr + (slot_start + list_start) // 4
        for place in tl.static_range(8):
            low, high = _pair_values(
                k_ptr + place // 4 * HEAD_DIM, k_ptr + 2 * HEAD_DIM, place, low_base, high_base, False
            )
            for e in range(k_count):
                entry = tl.load(k_list_ptr + e)
                token = (entry >> 24).to(tl.int32)
                at = ((entry >> 16) & 0xFF).to(tl.int32)
                here = (unit * 8 + place == token)[:, None]
                low = tl.where(here & (2 * half == at)[None, :], entry & 0xFFFF, low)
                high = tl.where(here & (2 * half + 1 == at)[None, :], entry & 0xFFFF, high)
            score = tl.dot(q_even, tl.trans(_as_operand(low, UPCAST)))
            score += tl.dot(q_odd, tl.trans(_as_operand(high, UPCAST)))  # [ROWS, UNITS]
            is_kept = (block > 0) | (unit * 8 + place >= skip)
            score = tl.where(is_kept[None, :], score * scale_log2, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - finite_top[:, None])
            decay = tl.exp2(top - finite_top)
            total = total * decay + tl.sum(weight, 1)
            acc = acc * decay[:, None]
            top = new_top

            low, high = _pair_values(
                v_ptr + place // 4 * v_plane, v_ptr + 2 * v_plane, place, v_base, v_base, True
            )
            for e in range(v_count):
                entry = tl.load(v_list_ptr + e)
                token = (entry >> 24).to(tl.int32)
                is_channel = (channel == ((entry >> 16) & 0xFF).to(tl.int32))[None, :]
                low = tl.where((pair * 16 + place == token)[:, None] & is_channel, entry & 0xFFFF, low)
                high = tl.where((pair * 16 + 8 + place == token)[:, None] & is_channel, entry & 0xFFFF, high)
            even, odd = tl.split(tl.reshape(weight.to(tl.bfloat16), (ROWS, PAIRS, 2)))
            if UPCAST:
                even = even.to(tl.float32)
                odd = odd.to(tl.float32)
            acc = tl.dot(even, _as_operand(low, UPCAST), acc)
            acc = tl.dot(odd, _as_operand(high, UPCAST), acc)
    part = ((b * kv_heads + head) * split_count + split) * ROWS + row
    held_total = tl.where(total > 0, total, 1.0)
    tl.store(part_ptr + part[:, None] * HEAD_DIM + channel[None, :], acc / held_total[:, None])
    tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(held_total), float("-inf")))


def attend(
    q: torch.Tensor, kv: PagedKv, scale: float, splits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over ``kv``: float32 of that shape.

    Packed pages are split over ``splits`` programs per KV head, raw pages over two more. Raises ValueError when
    shapes do not fit; a GPU needs packed pages of 256 tokens, whose tiles are as large as its products.
    """
    check_query(q, kv, ROWS.value)
    if q.is_cuda and kv.block_tokens != 256:
        raise ValueError(f"packed pages must have 256 tokens on a GPU, got {kv.block_tokens}")
    batch, q_heads, head_dim = q.shape
    group = q_heads // kv.kv_heads
    slot = slot_bytes(kv.block_tokens, head_dim)
    if kv.packed_k.shape[1:] != (kv.kv_heads, slot) or kv.packed_v.shape[1:] != (kv.kv_heads, slot):
        raise ValueError(f"packed pages must be [page, {kv.kv_heads}, {slot}], got {list(kv.packed_k.shape)}")
    parts, lse = empty_parts(q, kv.kv_heads * splits * ROWS.value)
    table = kv.table
    _attend_kernel[(kv.kv_heads, splits, batch)](
        q,
        kv.packed_k.view(torch.uint32),
        kv.packed_v.view(torch.uint32),
        kv.packed_k,
        kv.packed_v,
        table.packed_pages,
        table.packed_counts,
        table.packed_skips,
        parts,
        lse,
        table.packed_pages.shape[1],
        scale * LOG2_E,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=kv.block_tokens,
        SLOT_BYTES=slot,
        CAPACITY=exception_capacity(head_dim),
        UPCAST=not q.is_cuda,
        num_warps=4,
    )
    return merge_with_raw(q, kv, scale, splits, parts, lse, out)


def merge_with_raw(
    q: torch.Tensor,
    kv: PagedKv,
    scale: float,
    splits: int,
    parts: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The parts of packed pages, ``splits`` of each head, with those of raw pages, which are attended here."""
    raw_parts, raw_lse = bf16.attend_parts(q, kv, scale, RAW_SPLITS)
    by_head = (len(q) * kv.kv_heads, -1, ROWS.value)
    all_parts = torch.cat([parts.view(*by_head, q.shape[2]), raw_parts.view(*by_head, q.shape[2])], dim=1)
    all_lse = torch.cat([lse.view(by_head), raw_lse.view(by_head)], dim=1)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out is None else out
    merge_splits(all_parts, all_lse, out, kv.kv_heads, splits + RAW_SPLITS, ROWS.value)
    return out
