"""Decode `gaac` pages on the device: packed planes to BF16 patterns, one program per page and head.

The layout is that of `kvfold.codec.gaac`; the kernel uses integer operations only, so the bits are those of
the reference on any device, and in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from kvfold.codec.gaac import GROUP, MODE_BITS, PAGE_ALIGN_BYTES
from kvfold.codec.packed import Axis

NARROW_BITS, WIDE_BITS, RAW_BITS = (tl.constexpr(bits) for bits in MODE_BITS)
LANES = tl.constexpr(GROUP)


@triton.jit
def _decode_kernel(
    pages_ptr,  # uint8, all pages
    page_starts_ptr,  # int64 [pages + 1]
    narrow_ptr,  # uint8 [kv_heads, HEAD_DIM]
    wide_ptr,  # uint8 [kv_heads, HEAD_DIM]
    out_ptr,  # int16 [kv_heads, pages * BLOCK_TOKENS, HEAD_DIM]
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    GROUP_TILE: tl.constexpr,  # power of two that holds all groups of a head
):
    page = tl.program_id(0)
    head = tl.program_id(1)
    page_count = tl.num_programs(0)
    kv_heads = tl.num_programs(1)
    elements: tl.constexpr = BLOCK_TOKENS * HEAD_DIM
    groups: tl.constexpr = elements // LANES
    tag_bytes: tl.constexpr = (groups + 3) // 4

    page_ptr = pages_ptr + tl.load(page_starts_ptr + page)
    signs_ptr = page_ptr + 4 * kv_heads + head * elements
    tags_ptr = page_ptr + kv_heads * (4 + elements) + head * tag_bytes
    payload_ptr = page_ptr + tl.load(page_ptr.to(tl.pointer_type(tl.int32)) + head)

    group = tl.arange(0, GROUP_TILE)  # [groups]
    is_group = group < groups
    tag_byte = tl.load(tags_ptr + group // 4, mask=is_group, other=0).to(tl.int32)
    mode = (tag_byte >> (group % 4 * 2)) & 3
    width = tl.where(mode == 0, NARROW_BITS, tl.where(mode == 1, WIDE_BITS, RAW_BITS))
    width = tl.where(is_group, width, 0)
    # Eight codes of w bits are w bytes, so the widths themselves add up to byte offsets.
    group_start = tl.cumsum(width, 0) - width

    lane = tl.arange(0, LANES)[None, :]  # [1, 8]
    element = group[:, None] * LANES + lane  # [groups, 8]
    is_element = element < elements
    first_bit = lane * width[:, None]
    last_bit = first_bit + width[:, None] - 1
    code_ptr = payload_ptr + group_start[:, None]
    low = tl.load(code_ptr + first_bit // 8, mask=is_element, other=0).to(tl.int32)
    # A code may cross into the next byte; where it does not, this is the same byte, masked off below.
    high = tl.load(code_ptr + last_bit // 8, mask=is_element, other=0).to(tl.int32)
    code = ((low | (high << 8)) >> (first_bit % 8)) & ((1 << width[:, None]) - 1)

    if BY_TOKEN:
        channel = element // BLOCK_TOKENS
        token = element % BLOCK_TOKENS
    else:
        token = element // HEAD_DIM
        channel = element % HEAD_DIM
    window = head * HEAD_DIM + channel
    narrow = tl.load(narrow_ptr + window, mask=is_element, other=0).to(tl.int32)
    wide = tl.load(wide_ptr + window, mask=is_element, other=0).to(tl.int32)
    base = tl.where(mode[:, None] == 0, narrow, tl.where(mode[:, None] == 1, wide, 0))
    sign_mantissa = tl.load(signs_ptr + element, mask=is_element, other=0).to(tl.int32)
    pattern = ((sign_mantissa & 0x80) << 8) | ((code + base) << 7) | (sign_mantissa & 0x7F)

    row = (head * page_count + page).to(tl.int64) * BLOCK_TOKENS + token
    tl.store(out_ptr + row * HEAD_DIM + channel, pattern.to(tl.int16), mask=is_element)


def decode_pages(
    pages: torch.Tensor,
    page_starts: torch.Tensor,
    narrow_base: torch.Tensor,
    wide_base: torch.Tensor,
    out: torch.Tensor,
    block_tokens: int,
    axis: Axis = "channel",
) -> None:
    """Write the patterns of all pages into ``out``, int16 ``[kv_heads, pages * block_tokens, head_dim]``.

    ``pages`` is uint8, ``page_starts`` int64 ``[pages + 1]``, the bases are uint8 ``[kv_heads, head_dim]``, all
    as ``kvfold.codec.gaac.encode`` makes them; ``out.view(torch.bfloat16)`` are the values. Raises ValueError
    for other dtypes, shapes, strides, alignment or devices. The bytes of the pages are trusted:
    ``kvfold.codec.gaac.decode`` is the one that checks them.
    """
    for name, tensor, dtype in (
        ("pages", pages, torch.uint8),
        ("page_starts", page_starts, torch.int64),
        ("narrow_base", narrow_base, torch.uint8),
        ("wide_base", wide_base, torch.uint8),
        ("out", out, torch.int16),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, got strides {tensor.stride()} for {list(tensor.shape)}"
            )
        if tensor.device != out.device:
            raise ValueError(f"{name} must be on the device of out, {out.device}, got {tensor.device}")
    if out.dim() != 3 or page_starts.dim() != 1 or pages.dim() != 1:
        raise ValueError(
            f"out must have 3 axes, page_starts and pages 1, "
            f"got {list(out.shape)}, {list(page_starts.shape)}, {list(pages.shape)}"
        )
    kv_heads, tokens, head_dim = out.shape
    page_count = page_starts.numel() - 1
    if block_tokens < 1 or tokens != page_count * block_tokens:
        raise ValueError(
            f"out must hold {page_count} pages of block_tokens ({block_tokens}) tokens, got {tokens} tokens"
        )
    if narrow_base.shape != (kv_heads, head_dim) or wide_base.shape != (kv_heads, head_dim):
        raise ValueError(
            f"bases must be {[kv_heads, head_dim]}, got {list(narrow_base.shape)} and {list(wide_base.shape)}"
        )
    if axis not in ("channel", "token"):
        raise ValueError(f"axis must be 'channel' or 'token', got {axis!r}")
    grouped = head_dim if axis == "channel" else block_tokens
    if grouped % GROUP:
        raise ValueError(f"a multiple of {GROUP} elements is needed along the {axis} axis, got {grouped}")
    if pages.data_ptr() % PAGE_ALIGN_BYTES:
        raise ValueError(
            f"pages must start at a multiple of {PAGE_ALIGN_BYTES} bytes, got address {pages.data_ptr():#x}"
        )
    if page_count == 0 or kv_heads == 0:
        return
    _decode_kernel[(page_count, kv_heads)](
        pages,
        page_starts,
        narrow_base,
        wide_base,
        out,
        BLOCK_TOKENS=block_tokens,
        HEAD_DIM=head_dim,
        BY_TOKEN=axis == "token",
        GROUP_TILE=triton.next_power_of_2(block_tokens * head_dim // GROUP),
        num_warps=8,
    )
