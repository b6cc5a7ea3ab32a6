"""Decode attention over FP8 pages, the lossy alternative: split-KV, paged, ragged, half of BF16's bytes.

Keys and values are FP8 (E4M3 or E5M2) with one scale for K and one for V of a layer; every token is, also those of
a page that is not full. Both formats widen to FP16 exactly, in one instruction per pair, so products take FP16
operands: queries are first brought to magnitudes of 1 to 2 by a power of two per head, and weights are scaled by
2^15. Values of V lie by channel, ``[head_dim, page_token]``, because a product pairs neighbours along tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvfold.codec.fp8 import E4M3, E5M2
from kvfold.kernels.bf16 import LOG2_E, ROWS, check_query
from kvfold.kernels.merge import empty_parts, merge_splits

if TYPE_CHECKING:
    from kvfold.codec.fp8 import Fp8
    from kvfold.kernels.pages import PagedKv

KINDS: dict[torch.dtype, Fp8] = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
TILE_TOKENS = 128
STAGES = 5  # of loads and of the table entries before them
# Weights of at least 2^-29 of the largest stay normal in FP16; 2^15 times 1 is below its largest value, 65,504.
WEIGHT_SHIFT = tl.constexpr(15.0)
EXPONENT_BITS = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(0x00800000)


@triton.jit
def _widened(value, MANTISSA_BITS: tl.constexpr, UNBIAS: tl.constexpr, UPCAST: tl.constexpr):
    """FP16 values of FP8 ones, exactly; float32 from the bits where interpreted, whose own cast is wrong."""
    if UPCAST:
        bits = value.to(tl.uint32)
        finite = ((bits & 0x7F) << (23 - MANTISSA_BITS)).to(tl.float32, bitcast=True) * UNBIAS
        # Of E5M2 the largest exponent is not finite, of E4M3 only the pattern 0x7F.
        if MANTISSA_BITS == 2:
            finite = tl.where((bits & 0x7F) == 0x7C, float("inf"), finite)
            finite = tl.where((bits & 0x7F) > 0x7C, float("nan"), finite)
        else:
            finite = tl.where((bits & 0x7F) == 0x7F, float("nan"), finite)
        wide = tl.where((bits & 0x80) != 0, -finite, finite)
    else:
        wide = value.to(tl.float16)
    return wide


@triton.jit
def _step(
    q,  # [ROWS, HEAD_DIM], FP16
    k_ptr,
    v_ptr,
    table_ptr,  # int32, the pages of this sequence
    head_start,  # of a page's KV head
    page_stride,
    tile,
    tokens,
    skip,
    row_scale,
    top,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    IS_LAST: tl.constexpr,  # the tile may end past the last token
    MANTISSA_BITS: tl.constexpr,
    UNBIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of the online softmax."""
    channel = tl.arange(0, HEAD_DIM)
    token = tile * TILE + tl.arange(0, TILE)
    if PAGE_TOKENS >= TILE:
        page = tl.load(table_ptr + tile * TILE // PAGE_TOKENS).to(tl.int64)
    elif IS_LAST:
        page = tl.load(table_ptr + tl.minimum(token, tokens - 1) // PAGE_TOKENS).to(tl.int64)
    else:
        page = tl.load(table_ptr + token // PAGE_TOKENS).to(tl.int64)
    inside_page = token % PAGE_TOKENS
    k_place = page * page_stride + (head_start + inside_page * HEAD_DIM)  # [TILE]
    k = tl.load(k_ptr + k_place[None, :] + channel[:, None])  # [HEAD_DIM, TILE]
    score = tl.dot(q, _widened(k, MANTISSA_BITS, UNBIAS, UPCAST)) * row_scale[:, None]
    score = tl.where((token < tokens) & (token >= skip), score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # All tokens so far may be skipped; -inf minus -inf would be NaN.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - (finite_top - WEIGHT_SHIFT)[:, None])
    decay = tl.exp2(top - finite_top)
    # Pages hold a multiple of 16 tokens, so 16 of them lie side by side in one.
    v_place = tl.multiple_of(tl.max_contiguous(page * page_stride + (head_start + inside_page), 16), 16)
    v = tl.load(v_ptr + v_place[:, None] + channel[None, :] * PAGE_TOKENS)  # [TILE, HEAD_DIM]
    v = _widened(v, MANTISSA_BITS, UNBIAS, UPCAST)
    if IS_LAST:  # what lies in a page past the last token may be no number
        v = tl.where((token < tokens)[:, None], v, 0.0)
    weight_sum = tl.sum(weight, 1)
    if UPCAST:
        acc = acc * decay[:, None] + tl.dot(weight.to(tl.float16).to(tl.float32), v)
    else:
        acc = tl.dot(weight.to(tl.float16), v, acc * decay[:, None])
    return new_top, total * decay + weight_sum, acc


@triton.jit
def _attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_ptr,  # FP8 [page, kv_heads, PAGE_TOKENS, HEAD_DIM]; uint8 where interpreted
    v_ptr,  # FP8 [page, kv_heads, HEAD_DIM, PAGE_TOKENS]
    table_ptr,  # int32 [batch, table_width]
    tokens_ptr,  # int32 [batch]
    skips_ptr,  # int32 [batch]
    part_ptr,  # float32 [batch, kv_heads, splits, ROWS, HEAD_DIM]
    lse_ptr,  # float32 [batch, kv_heads, splits, ROWS]
    table_width,
    scale_log2,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGE_COUNT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    UNBIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    kv_heads = tl.num_programs(0)
    split_count = tl.num_programs(1)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HEAD_DIM)
    tokens = tl.load(tokens_ptr + b)
    skip = tl.load(skips_ptr + b)
    tiles = tl.cdiv(tokens, TILE)
    per_split = tl.cdiv(tiles, split_count)
    first = split * per_split
    last = tl.minimum(first + per_split, tiles)
    whole = tl.minimum(last, tokens // TILE)

    q_offset = (b * kv_heads + head) * GROUP * HEAD_DIM + row[:, None] * HEAD_DIM + channel[None, :]
    q = tl.load(q_ptr + q_offset, mask=row[:, None] < GROUP, other=0.0).to(tl.float32)  # [ROWS, HEAD_DIM]
    unit_bits = tl.max(q.to(tl.int32, bitcast=True) & EXPONENT_BITS, 1)
    unit = tl.maximum(unit_bits, SMALLEST_NORMAL).to(tl.float32, bitcast=True)
    q = q / unit[:, None]
    if not UPCAST:
        q = q.to(tl.float16)
    row_scale = unit * scale_log2
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    head_start = head * PAGE_TOKENS * HEAD_DIM
    page_stride = kv_heads * PAGE_TOKENS * HEAD_DIM
    pages_ptr = table_ptr + b * table_width
    for tile in tl.range(first, whole, num_stages=STAGE_COUNT):
        top, total, acc = _step(
            q,
            k_ptr,
            v_ptr,
            pages_ptr,
            head_start,
            page_stride,
            tile,
            tokens,
            skip,
            row_scale,
            top,
            total,
            acc,
            HEAD_DIM,
            PAGE_TOKENS,
            TILE,
            False,
            MANTISSA_BITS,
            UNBIAS,
            UPCAST,
        )
    if (first <= whole) & (whole < last):
        top, total, acc = _step(
            q,
            k_ptr,
            v_ptr,
            pages_ptr,
            head_start,
            page_stride,
            whole,
            tokens,
            skip,
            row_scale,
            top,
            total,
            acc,
            HEAD_DIM,
            PAGE_TOKENS,
            TILE,
            True,
            MANTISSA_BITS,
            UNBIAS,
            UPCAST,
        )
    held_total = tl.where(total > 0, total, 1.0)
    part = ((b * kv_heads + head) * split_count + split) * ROWS + row
    tl.store(part_ptr + part[:, None] * HEAD_DIM + channel[None, :], acc / held_total[:, None] * v_scale)
    lse = top + tl.log2(held_total) - WEIGHT_SHIFT
    tl.store(lse_ptr + part, tl.where(total > 0, lse, float("-inf")))


def attend(
    q: torch.Tensor,
    kv: PagedKv,
    scale: float,
    splits: int,
    out: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile_tokens: int = TILE_TOKENS,
    stages: int = STAGES,
) -> torch.Tensor:
    """Attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over FP8 pages: float32 of that shape.

    The raw pages of ``kv`` are FP8: ``raw_k`` is ``[page, kv_head, page_token, head_dim]``, ``raw_v``
    ``[page, kv_head, head_dim, page_token]``; there are no packed ones. A stored value times its scale is what is
    attended. The softmax is split over ``splits`` programs per KV head and merged. Raises ValueError for other
    types, more than 16 query heads per KV head or shapes that do not fit.
    """
    check_query(q, kv, ROWS.value)
    pages, kv_heads, page_tokens, head_dim = kv.raw_k.shape
    if kv.raw_k.dtype not in KINDS or kv.raw_v.dtype != kv.raw_k.dtype:
        raise ValueError(
            f"pages must be float8_e4m3fn or float8_e5m2, both, got {kv.raw_k.dtype} and {kv.raw_v.dtype}"
        )
    if kv.raw_v.shape != (pages, kv_heads, head_dim, page_tokens):
        raise ValueError(
            f"raw_v must be {[pages, kv_heads, head_dim, page_tokens]}, got {list(kv.raw_v.shape)}"
        )
    kind = KINDS[kv.raw_k.dtype]
    table = kv.table
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out is None else out
    parts, lse = empty_parts(q, kv_heads * splits * ROWS.value)
    _attend_kernel[(kv_heads, splits, len(q))](
        q,
        kv.raw_k if q.is_cuda else kv.raw_k.view(torch.uint8),
        kv.raw_v if q.is_cuda else kv.raw_v.view(torch.uint8),
        table.raw_pages,
        table.raw_tokens,
        table.raw_skips,
        parts,
        lse,
        table.raw_pages.shape[1],
        scale * k_scale * LOG2_E,
        v_scale,
        GROUP=q.shape[1] // kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=page_tokens,
        TILE=tile_tokens,
        STAGE_COUNT=stages,
        MANTISSA_BITS=kind.mantissa_bits,
        UNBIAS=2.0 ** (127 - kind.bias),
        UPCAST=not q.is_cuda,
        num_warps=4,
    )
    merge_splits(parts, lse, out, kv_heads, splits, int(ROWS.value))
    return out
