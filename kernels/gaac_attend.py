"""Decode attention over `gaac` pages, raw pages and a raw tail in plain Triton, and its interpreter.

The layout is that of `kvfold.codec.gaac` with groups along channels. A tile of tokens is decoded to BF16 bits in
registers, or loaded as they are from raw pages, and then attended by the same instructions: the sums over packed
pages are those over raw pages bit for bit. Not tuned: where a group starts depends on all groups before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvfold.codec.gaac import GROUP, MODE_BITS
from kvfold.codec.pages import PAGE_ALIGN_BYTES
from kvfold.kernels.bf16 import LOG2_E, ROWS, check_query
from kvfold.kernels.merge import empty_parts, merge_splits
from kvfold.kernels.pages import PagedKv

NARROW_BITS, WIDE_BITS, RAW_BITS = (tl.constexpr(bits) for bits in MODE_BITS)
LANES = tl.constexpr(GROUP)
TILE_ELEMENTS = 64 * 128  # of K and of V in registers at a time


@dataclass(frozen=True, slots=True, eq=False)
class GaacKv(PagedKv):
    """Packed pages are whole pages of the codec in slots of one size, ``uint8 [page, slot_bytes]``."""

    windows_k: torch.Tensor  # uint8 [2, kv_heads, head_dim], first exponents of narrow and wide windows
    windows_v: torch.Tensor


@triton.jit
def _decoded(
    page_ptr,  # uint8, the page
    head,
    kv_heads,
    place,  # byte of the page at which the payload of this tile starts
    tile,
    narrow,  # int32 [1, HEAD_DIM]
    wide,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """BF16 bits ``uint16 [TILE, HEAD_DIM]`` of one tile of a page, and the byte at which the next one starts."""
    elements: tl.constexpr = BLOCK_TOKENS * HEAD_DIM
    tag_bytes: tl.constexpr = (elements // LANES + 3) // 4
    RUNS: tl.constexpr = HEAD_DIM // LANES
    group = tl.arange(0, TILE * RUNS)
    number = tile * (TILE * RUNS) + group
    tags = tl.load(page_ptr + kv_heads * (4 + elements) + head * tag_bytes + number // 4).to(tl.int32)
    mode = (tags >> (number % 4 * 2)) & 3
    width = tl.where(mode == 0, NARROW_BITS, tl.where(mode == 1, WIDE_BITS, RAW_BITS))
    # Eight codes of w bits are w bytes. They lie in two words of the page, or in three.
    start = place + tl.cumsum(width, 0) - width
    inside = start % 4
    word_ptr = page_ptr.to(tl.pointer_type(tl.uint32)) + start // 4
    word = tl.load(word_ptr).to(tl.uint64)
    word |= tl.load(word_ptr + 1, mask=inside + width > 4, other=0).to(tl.uint64) << 32
    third = tl.load(word_ptr + 2, mask=inside + width > 8, other=0).to(tl.uint64)
    # In two steps: a shift by 64 would be undefined.
    codes = (word >> (8 * inside).to(tl.uint64)) | ((third << 32) << (32 - 8 * inside).to(tl.uint64))
    low = tl.reshape((codes & 0xFFFFFFFF).to(tl.uint32), (TILE, RUNS, 1))
    high = tl.reshape((codes >> 32).to(tl.uint32), (TILE, RUNS, 1))
    mode = tl.reshape(mode, (TILE, RUNS, 1))
    bits = tl.reshape(width, (TILE, RUNS, 1))
    first_bit = bits * tl.reshape(tl.arange(0, LANES), (1, 1, LANES))
    code = tl.where(first_bit < 32, low, high) >> (first_bit & 31).to(tl.uint32)
    code = code.to(tl.int32) & ((1 << bits) - 1)
    narrow = tl.reshape(narrow, (1, RUNS, LANES))
    wide = tl.reshape(wide, (1, RUNS, LANES))
    exponent = code + tl.where(mode == 0, narrow, tl.where(mode == 1, wide, 0))
    token = tile * TILE + tl.arange(0, TILE)
    sign_ptr = page_ptr + 4 * kv_heads + head * elements + token[:, None] * HEAD_DIM
    sign_mantissa = tl.load(sign_ptr + tl.arange(0, HEAD_DIM)[None, :]).to(tl.int32)
    pattern = ((sign_mantissa & 0x80) << 8) | (sign_mantissa & 0x7F)
    pattern |= tl.reshape(exponent, (TILE, HEAD_DIM)) << 7
    return pattern.to(tl.uint16), place + tl.sum(width, 0)


@triton.jit
def _operand(pattern, UPCAST: tl.constexpr):
    value = pattern.to(tl.bfloat16, bitcast=True)
    return value.to(tl.float32) if UPCAST else value


@triton.jit
def _attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_pages_ptr,  # uint8 [page, slot_bytes]
    v_pages_ptr,
    k_windows_ptr,  # uint8 [2, kv_heads, HEAD_DIM]
    v_windows_ptr,
    raw_k_ptr,  # uint16 view of bfloat16 [raw page, kv_heads, RAW_TOKENS, HEAD_DIM]
    raw_v_ptr,
    packed_table_ptr,  # int32 [batch, packed_width]
    packed_counts_ptr,  # int32 [batch]
    packed_skips_ptr,  # int32 [batch]
    raw_table_ptr,  # int32 [batch, raw_width]
    raw_tokens_ptr,  # int32 [batch]
    raw_skips_ptr,  # int32 [batch]
    part_ptr,  # float32 [batch, kv_heads, splits, ROWS, HEAD_DIM]
    lse_ptr,  # float32 [batch, kv_heads, splits, ROWS]
    packed_width,
    raw_width,
    k_slot_bytes,
    v_slot_bytes,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    RAW_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 products
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    kv_heads = tl.num_programs(0)
    split_count = tl.num_programs(1)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, TILE)
    packed_count = tl.load(packed_counts_ptr + b)
    packed_skip = tl.load(packed_skips_ptr + b)
    raw_tokens = tl.load(raw_tokens_ptr + b)
    raw_skip = tl.load(raw_skips_ptr + b)
    blocks = packed_count + tl.cdiv(raw_tokens, BLOCK_TOKENS)
    per_split = tl.cdiv(blocks, split_count)
    first = split * per_split
    last = tl.minimum(first + per_split, blocks)

    window = head * HEAD_DIM + channel[None, :]
    wide_start = kv_heads * HEAD_DIM
    k_narrow = tl.load(k_windows_ptr + window).to(tl.int32)
    k_wide = tl.load(k_windows_ptr + wide_start + window).to(tl.int32)
    v_narrow = tl.load(v_windows_ptr + window).to(tl.int32)
    v_wide = tl.load(v_windows_ptr + wide_start + window).to(tl.int32)
    q_offset = (b * kv_heads + head) * GROUP * HEAD_DIM + row[:, None] * HEAD_DIM + channel[None, :]
    q = tl.load(q_ptr + q_offset, mask=row[:, None] < GROUP, other=0.0)  # [ROWS, HEAD_DIM]
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for block in range(first, last):
        tokens = BLOCK_TOKENS
        k_place = 0
        v_place = 0
        k_page_ptr = k_pages_ptr
        v_page_ptr = v_pages_ptr
        if block < packed_count:
            page = tl.load(packed_table_ptr + b * packed_width + block).to(tl.int64)
            k_page_ptr += page * k_slot_bytes
            v_page_ptr += page * v_slot_bytes
            k_place += tl.load(k_page_ptr.to(tl.pointer_type(tl.int32)) + head)
            v_place += tl.load(v_page_ptr.to(tl.pointer_type(tl.int32)) + head)
        else:
            tokens = tl.minimum(raw_tokens - (block - packed_count) * BLOCK_TOKENS, BLOCK_TOKENS)
        for tile in range(tl.cdiv(tokens, TILE)):
            if block < packed_count:
                k, k_place = _decoded(
                    k_page_ptr, head, kv_heads, k_place, tile, k_narrow, k_wide, HEAD_DIM, BLOCK_TOKENS, TILE
                )
                v, v_place = _decoded(
                    v_page_ptr, head, kv_heads, v_place, tile, v_narrow, v_wide, HEAD_DIM, BLOCK_TOKENS, TILE
                )
                inside = (block > 0) | (tile * TILE + lane >= packed_skip)
            else:
                token = (block - packed_count) * BLOCK_TOKENS + tile * TILE + lane
                inside = (token < raw_tokens) & (token >= raw_skip)
                # Past the end the last token is read again, and its score masked off.
                held = tl.minimum(token, raw_tokens - 1)
                raw_page = tl.load(raw_table_ptr + b * raw_width + held // RAW_TOKENS).to(tl.int64)
                raw_row = (raw_page * kv_heads + head) * RAW_TOKENS + held % RAW_TOKENS
                k = tl.load(raw_k_ptr + raw_row[:, None] * HEAD_DIM + channel[None, :])  # [TILE, HEAD_DIM]
                v = tl.load(raw_v_ptr + raw_row[:, None] * HEAD_DIM + channel[None, :])
            score = tl.dot(q, tl.trans(_operand(k, UPCAST))) * scale_log2  # [ROWS, TILE]
            score = tl.where(inside[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            # All tokens so far may be skipped; -inf minus -inf would be NaN.
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - finite_top[:, None])
            decay = tl.exp2(top - finite_top)
            total = total * decay + tl.sum(weight, 1)
            rounded = weight.to(tl.bfloat16)
            if UPCAST:
                acc = acc * decay[:, None] + tl.dot(rounded.to(tl.float32), _operand(v, UPCAST))
            else:
                acc = tl.dot(rounded, _operand(v, UPCAST), acc * decay[:, None])
            top = new_top
    held_total = tl.where(total > 0, total, 1.0)
    part = ((b * kv_heads + head) * split_count + split) * ROWS + row
    tl.store(part_ptr + part[:, None] * HEAD_DIM + channel[None, :], acc / held_total[:, None])
    tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(held_total), float("-inf")))


def attend(
    q: torch.Tensor, kv: GaacKv, scale: float, splits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over ``kv``: float32 of that shape.

    The softmax is split over ``splits`` programs per KV head and merged. The bytes of pages are trusted:
    `kvfold.codec.gaac.decode` is the one that checks them. Raises ValueError when shapes do not fit, for packed
    pages of other than 64, 128 or 256 tokens and heads of other than 64, 128 or 256 channels.
    """
    check_query(q, kv, ROWS.value)
    batch, q_heads, head_dim = q.shape
    group = q_heads // kv.kv_heads
    if head_dim not in (64, 128, 256) or kv.block_tokens not in (64, 128, 256):
        raise ValueError(
            f"head_dim and packed pages must be of 64, 128 or 256 channels and tokens, "
            f"got {head_dim} and {kv.block_tokens}"
        )
    for name, pages in (("packed_k", kv.packed_k), ("packed_v", kv.packed_v)):
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] % PAGE_ALIGN_BYTES:
            raise ValueError(
                f"{name} must be uint8 [page, a multiple of {PAGE_ALIGN_BYTES}], "
                f"got {pages.dtype} {list(pages.shape)}"
            )
    for name, windows in (("windows_k", kv.windows_k), ("windows_v", kv.windows_v)):
        if windows.dtype != torch.uint8 or windows.shape != (2, kv.kv_heads, head_dim):
            raise ValueError(
                f"{name} must be uint8 {[2, kv.kv_heads, head_dim]}, got {windows.dtype} {list(windows.shape)}"
            )
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out is None else out
    parts, lse = empty_parts(q, kv.kv_heads * splits * ROWS.value)
    table = kv.table
    _attend_kernel[(kv.kv_heads, splits, batch)](
        q,
        kv.packed_k,
        kv.packed_v,
        kv.windows_k,
        kv.windows_v,
        kv.raw_k.view(torch.uint16),
        kv.raw_v.view(torch.uint16),
        table.packed_pages,
        table.packed_counts,
        table.packed_skips,
        table.raw_pages,
        table.raw_tokens,
        table.raw_skips,
        parts,
        lse,
        table.packed_pages.shape[1],
        table.raw_pages.shape[1],
        kv.packed_k.shape[1],
        kv.packed_v.shape[1],
        scale * LOG2_E,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=kv.block_tokens,
        RAW_TOKENS=kv.raw_page_tokens,
        TILE=TILE_ELEMENTS // max(head_dim, 128),
        UPCAST=not q.is_cuda,
        num_warps=4,
    )
    merge_splits(parts, lse, out, kv.kv_heads, splits, int(ROWS.value))
    return out
