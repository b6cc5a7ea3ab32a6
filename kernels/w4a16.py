"""A linear layer with 4-bit weights in groups of 128 and BF16 inputs, in plain Triton.

A weight is ``(code - zero) * scale`` with a code of 4 bits, and a scale and a zero in FP16 for each group of 128
inputs of an output. Codes become BF16 as ``128 + code``, which is one operation on bits; what that adds, and the
zero, leave with the sum of the inputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

GROUP_INPUTS = 128
WORD_ROWS = 16  # words of 8 codes in a group; code j of word r is input 16 j + r
GROUP = tl.constexpr(GROUP_INPUTS)
GROUP_ROWS = tl.constexpr(WORD_ROWS)
OFFSET_BITS = tl.constexpr(0x4300)  # 128 in BF16; its last mantissa bits count ones
OFFSET = tl.constexpr(128.0)
TILE_ROWS = (16, 32)  # tokens of a program
TILE_COLUMNS = 64  # its outputs


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """``[in_features, out_features]`` in 4 bits; both multiples of 128."""

    words: torch.Tensor  # int32 [in_features / 8, out_features]
    scales: torch.Tensor  # float16 [in_features / 128, out_features]
    zeros: torch.Tensor  # float16, in units of a code

    @property
    def shape(self) -> tuple[int, int]:
        return 8 * self.words.shape[0], self.words.shape[1]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Words of `Weights` from codes 0 to 15, ``[in_features, out_features]``."""
    by_word = codes.view(-1, 8, WORD_ROWS, codes.shape[1]).to(torch.int32)  # [group, place, row, out]
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=codes.device)
    words = (by_word << shifts[:, None, None]).sum(1, dtype=torch.int64)
    return words.to(torch.int32).reshape(-1, codes.shape[1])


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x_ptr,  # bfloat16 [tokens, in_features]
    words_ptr,  # int32 [in_features / 8, out_features]
    scales_ptr,  # float16 [in_features / GROUP, out_features]
    zeros_ptr,
    out_ptr,  # [splits, tokens, out_features]: bfloat16 where there is one split, else float32
    tokens,
    in_features,
    out_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 products
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    groups = in_features // GROUP
    per_split = tl.cdiv(groups, tl.num_programs(2))
    first = split * per_split
    word_row = tl.arange(0, GROUP_ROWS)
    inside = token[:, None] < tokens
    ones = tl.full([GROUP_ROWS, COLUMNS], 1.0, tl.float32 if UPCAST else tl.bfloat16)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in tl.range(first, tl.minimum(first + per_split, groups), num_stages=4):
        words = tl.load(words_ptr + (word_row + group * GROUP_ROWS)[:, None] * out_features + column[None, :])
        scale = tl.load(scales_ptr + group * out_features + column).to(tl.float32)
        zero = tl.load(zeros_ptr + group * out_features + column).to(tl.float32)
        x_group_ptr = x_ptr + token[:, None] * in_features + group * GROUP + word_row[None, :]
        part = tl.zeros([ROWS, COLUMNS], tl.float32)
        x_sum = tl.zeros([ROWS, COLUMNS], tl.float32)  # the same in every column
        for place in tl.static_range(8):
            x = tl.load(x_group_ptr + place * GROUP_ROWS, mask=inside, other=0.0)  # [ROWS, GROUP_ROWS]
            code = ((words >> (4 * place)) & 15) | OFFSET_BITS
            value = code.to(tl.int16).to(tl.bfloat16, bitcast=True)
            if UPCAST:
                x = x.to(tl.float32)
                value = value.to(tl.float32)
            part = tl.dot(x, value, part)
            x_sum = tl.dot(x, ones, x_sum)
        acc += (part - x_sum * (zero + OFFSET)[None, :]) * scale[None, :]
    place = (split * tokens + token).to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["elements", "splits"])
def _sum_kernel(part_ptr, out_ptr, elements, splits, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < elements
    total = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        total += tl.load(part_ptr + split * elements + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _unpack_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, out_features, COLUMNS: tl.constexpr
):  # out: bfloat16 [in_features, out_features]
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    word_row = tl.arange(0, GROUP_ROWS)[:, None]
    words = tl.load(words_ptr + (group * GROUP_ROWS + word_row) * out_features + column)
    scale = tl.load(scales_ptr + group * out_features + column).to(tl.float32)
    zero = tl.load(zeros_ptr + group * out_features + column).to(tl.float32)
    for place in tl.static_range(8):
        value = (((words >> (4 * place)) & 15).to(tl.float32) - zero) * scale
        row = (group * GROUP + place * GROUP_ROWS + word_row).to(tl.int64)
        tl.store(out_ptr + row * out_features + column, value.to(tl.bfloat16))


def linear(x: torch.Tensor, weights: Weights, rows: int = 16, splits: int = 1) -> torch.Tensor:
    """``x`` ``bfloat16 [tokens, in_features]`` times the weights: ``bfloat16 [tokens, out_features]``.

    A program takes ``rows`` tokens (16 or 32); inputs are split over ``splits`` programs, whose sums are added in
    order. Raises ValueError when shapes or types do not fit.
    """
    check_weights(x, weights)
    if rows not in TILE_ROWS or splits < 1:
        raise ValueError(f"rows must be one of {TILE_ROWS} and splits at least 1, got {rows} and {splits}")
    tokens, (in_features, out_features) = len(x), weights.shape
    out = torch.empty((tokens, out_features), dtype=torch.bfloat16, device=x.device)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, tokens, out_features), dtype=torch.float32, device=x.device)
    _linear_kernel[(out_features // TILE_COLUMNS, triton.cdiv(tokens, rows), splits)](
        x,
        weights.words,
        weights.scales,
        weights.zeros,
        parts,
        tokens,
        in_features,
        out_features,
        ROWS=rows,
        COLUMNS=TILE_COLUMNS,
        UPCAST=not x.is_cuda,
        num_warps=4,
    )
    if splits > 1:
        _sum_kernel[(triton.cdiv(out.numel(), 1024),)](parts, out, out.numel(), splits, TILE=1024)
    return out


def unpack(weights: Weights) -> torch.Tensor:
    """The weights rounded to BF16, ``[in_features, out_features]``."""
    in_features, out_features = weights.shape
    out = torch.empty((in_features, out_features), dtype=torch.bfloat16, device=weights.words.device)
    _unpack_kernel[(out_features // 128, in_features // GROUP_INPUTS)](
        weights.words, weights.scales, weights.zeros, out, out_features, COLUMNS=128, num_warps=4
    )
    return out


def check_weights(x: torch.Tensor, weights: Weights) -> None:
    """Raise ValueError unless the weights are whole and ``x`` fits them."""
    in_features, out_features = weights.shape
    if in_features % GROUP_INPUTS or out_features % GROUP_INPUTS:
        raise ValueError(
            f"in and out features must be multiples of {GROUP_INPUTS}, got {in_features} and {out_features}"
        )
    groups = (in_features // GROUP_INPUTS, out_features)
    for name, tensor, dtype, shape in (
        ("words", weights.words, torch.int32, (in_features // 8, out_features)),
        ("scales", weights.scales, torch.float16, groups),
        ("zeros", weights.zeros, torch.float16, groups),
        ("x", x, torch.bfloat16, (len(x), in_features)),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
