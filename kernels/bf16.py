"""Decode attention over raw BF16 pages: split-KV, paged, ragged. The baseline of every speed-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kvfold.kernels.merge import empty_parts, merge_shares, merge_splits, parts_for
from kvfold.kernels.shares import block_counts, schedule, share_start

if TYPE_CHECKING:
    from kvfold.kernels.pages import PagedKv

LOG2_E = 1.4426950408889634
TILE_TOKENS = 128
STAGES = 3
ROWS = tl.constexpr(16)  # query heads of a group, padded to what a tensor core takes


@triton.jit
def _attend_kernel(
    q_ptr,  # bfloat16 [batch, kv_heads * GROUP, HEAD_DIM]
    k_ptr,  # bfloat16 [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    v_ptr,
    table_ptr,  # int32 [batch, table_width]
    tokens_ptr,  # int32 [batch]
    skips_ptr,  # int32 [batch]
    out_ptr,  # float32 [batch, kv_heads * GROUP, HEAD_DIM], of heads that one program attends as a whole
    part_ptr,  # float32 [part, ROWS, HEAD_DIM], of all others
    lse_ptr,  # float32 [part, ROWS]
    table_width,
    batch,
    kv_heads,
    splits,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    STAGE_COUNT: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # one split: no parts
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 products
    EVEN: tl.constexpr,  # a program has a share of all tiles (`kvfold.kernels.shares`), else a split of one head
    BATCH_TILE: tl.constexpr,  # power of two that holds the batch
):
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, HEAD_DIM)
    lane = tl.arange(0, TILE)
    if EVEN:
        sequence = tl.arange(0, BATCH_TILE)
        counts = block_counts(sequence, batch, None, tokens_ptr, TILE)
        ends = tl.cumsum(counts, 0) * kv_heads
        all_tiles = tl.max(ends, 0)
        programs = tl.maximum(tl.minimum(tl.num_programs(0), all_tiles), 1)
        position = share_start(tl.minimum(program, programs), programs, all_tiles)
        end = share_start(tl.minimum(program + 1, programs), programs, all_tiles)
    else:
        position = program
        end = program + 1
    while position < end:
        if EVEN:
            is_before = ends <= position
            b = tl.sum(is_before.to(tl.int32), 0)
            position_of_b = tl.max(tl.where(is_before, ends, 0), 0)
        else:
            b = position // (kv_heads * splits)
        tokens = tl.load(tokens_ptr + b)
        skip = tl.load(skips_ptr + b)
        tiles = tl.cdiv(tokens, TILE)
        if EVEN:
            head = (position - position_of_b) // tiles
            first = (position - position_of_b) % tiles
            last = tl.minimum(first + end - position, tiles)
            part = program + b * kv_heads + head
            position += last - first
        else:
            head = position // splits % kv_heads
            per_split = tl.cdiv(tiles, splits)
            first = position % splits * per_split
            last = tl.minimum(first + per_split, tiles)
            part = position
            position += 1

        q_offset = (b * kv_heads + head) * GROUP * HEAD_DIM + row[:, None] * HEAD_DIM + channel[None, :]
        q = tl.load(q_ptr + q_offset, mask=row[:, None] < GROUP, other=0.0)  # [ROWS, HEAD_DIM]
        if UPCAST:
            q = q.to(tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        page_stride = kv_heads * PAGE_TOKENS * HEAD_DIM
        for tile in tl.range(first, last, num_stages=STAGE_COUNT):
            token = tile * TILE + lane
            # Past the end the last token is read again, and its score masked off.
            held = tl.minimum(token, tokens - 1)
            if PAGE_TOKENS >= TILE:
                page = tl.load(table_ptr + b * table_width + tile * TILE // PAGE_TOKENS).to(tl.int64)
            else:
                page = tl.load(table_ptr + b * table_width + held // PAGE_TOKENS).to(tl.int64)
            place = page * page_stride + (head * PAGE_TOKENS + held % PAGE_TOKENS) * HEAD_DIM  # [TILE]
            k = tl.load(k_ptr + place[None, :] + channel[:, None])  # [HEAD_DIM, TILE]
            if UPCAST:
                k = k.to(tl.float32)
            score = tl.dot(q, k) * scale_log2
            score = tl.where((token < tokens) & (token >= skip), score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            # All tokens so far may be skipped; -inf minus -inf would be NaN.
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - finite_top[:, None])
            decay = tl.exp2(top - finite_top)
            total = total * decay + tl.sum(weight, 1)
            acc = acc * decay[:, None]
            v = tl.load(v_ptr + place[:, None] + channel[None, :])  # [TILE, HEAD_DIM]
            if UPCAST:
                acc += tl.dot(weight.to(tl.bfloat16).to(tl.float32), v.to(tl.float32))
            else:
                acc = tl.dot(weight.to(tl.bfloat16), v, acc)
            top = new_top
        held_total = tl.where(total > 0, total, 1.0)
        acc = acc / held_total[:, None]
        if IS_WHOLE or (EVEN and last - first == tiles):
            tl.store(out_ptr + q_offset, acc, mask=row[:, None] < GROUP)
        else:
            part_row = part * ROWS + row
            tl.store(part_ptr + part_row[:, None] * HEAD_DIM + channel[None, :], acc)
            tl.store(lse_ptr + part_row, tl.where(total > 0, top + tl.log2(held_total), float("-inf")))


def attend(
    q: torch.Tensor,
    kv: PagedKv,
    scale: float,
    splits: int,
    out: torch.Tensor | None = None,
    tile_tokens: int = TILE_TOKENS,
    stages: int = STAGES,
    programs: int | None = None,
) -> torch.Tensor:
    """Attention of ``q`` ``bfloat16 [batch, q_heads, head_dim]`` over raw pages only: float32 of that shape.

    The softmax is split over ``splits`` programs per KV head and merged; with ``programs`` all tiles of the batch
    are divided evenly among that many instead (`kvfold.kernels.shares`), which suits ragged batches: three times
    as many as there are multiprocessors. Raises ValueError for more than 16 query heads per KV head or shapes that
    do not fit.
    """
    check_query(q, kv, int(ROWS.value))
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out is None else out
    rows = int(ROWS.value)
    parts, lse = parts_for(q, out, kv.kv_heads, rows, splits, programs)
    constants = schedule(len(q), splits, programs)
    _launch(q, kv, scale, splits, programs, out, parts, lse, constants, tile_tokens, stages)
    if programs is not None:
        merge_shares(parts, lse, out, kv.kv_heads, programs, rows, kv.table, tile_tokens, has_packed=False)
    elif splits > 1:
        merge_splits(parts, lse, out, kv.kv_heads, splits, rows)
    return out


def attend_parts(
    q: torch.Tensor, kv: PagedKv, scale: float, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of `attend` before they are merged: results, and log2 sums, -inf where nothing was read."""
    parts, lse = empty_parts(q, kv.kv_heads * splits * ROWS.value)
    constants = schedule(len(q), splits, None) | {"IS_WHOLE": False}
    _launch(q, kv, scale, splits, None, parts, parts, lse, constants, TILE_TOKENS, STAGES)
    return parts, lse


def _launch(
    q: torch.Tensor,
    kv: PagedKv,
    scale: float,
    splits: int,
    programs: int | None,
    out: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
    constants: dict[str, int | bool],
    tile_tokens: int,
    stages: int,
) -> None:
    batch, q_heads, head_dim = q.shape
    table = kv.table
    _attend_kernel[(batch * kv.kv_heads * splits if programs is None else programs,)](
        q,
        kv.raw_k,
        kv.raw_v,
        table.raw_pages,
        table.raw_tokens,
        table.raw_skips,
        out,
        parts,
        lse,
        table.raw_pages.shape[1],
        batch,
        kv.kv_heads,
        splits,
        scale * LOG2_E,
        GROUP=q_heads // kv.kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=kv.raw_page_tokens,
        TILE=tile_tokens,
        STAGE_COUNT=stages,
        UPCAST=not q.is_cuda,
        **constants,
        num_warps=4,
    )


def check_query(q: torch.Tensor, kv: PagedKv, most_group: int) -> None:
    """Raise ValueError unless ``q`` fits the batch, the heads and the place of ``kv``."""
    if q.dtype != torch.bfloat16 or q.dim() != 3 or not q.is_contiguous():
        raise ValueError(
            f"q must be contiguous bfloat16 [batch, q_heads, head_dim], got {q.dtype} {list(q.shape)}"
        )
    batch, q_heads, head_dim = q.shape
    if batch != kv.batch or head_dim != kv.head_dim or q_heads % kv.kv_heads:
        raise ValueError(
            f"q must be [{kv.batch}, a multiple of {kv.kv_heads}, {kv.head_dim}], got {list(q.shape)}"
        )
    if q_heads // kv.kv_heads > most_group:
        raise ValueError(f"at most {most_group} query heads per KV head, got {q_heads // kv.kv_heads}")
    if q.device != kv.raw_k.device:
        raise ValueError(f"q must be on the device of the pages, {kv.raw_k.device}, got {q.device}")
