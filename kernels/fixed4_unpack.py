"""Unpack `fixed4` slots to raw BF16 pages on the device, bit for bit; one program per block and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfold.kernels.fixed4_pack import (
    BYTE_BITS,
    NIBBLE_BITS,
    TOP_BITS,
    check_pages,
    rotate,
    token_starts,
    warps_of,
    word_offsets,
)


@triton.jit
def values_of(codes, base):
    """Both patterns of a pair from its codes and bases, the latter in the bits of a pattern."""
    is_nonzero = ((codes & 0x07FF07FF) + 0x7FFF7FFF) & TOP_BITS
    return codes + (base & (is_nonzero - (is_nonzero >> 15)))


@triton.jit
def _apart(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """The two words of each pair that lie side by side, each ``[ROWS, COLUMNS]``."""
    if ALONG_TOKENS:
        first, second = tl.split(tl.reshape(words, (COLUMNS, ROWS, 2)))
        first = tl.trans(first)
        second = tl.trans(second)
    else:
        first, second = tl.split(tl.reshape(words, (ROWS, COLUMNS, 2)))
    return first, second


@triton.jit
def _unpack_kernel(
    words_ptr,  # uint32 view of the slots
    bytes_ptr,  # uint8 view of the slots
    records_ptr,  # int32 [blocks]
    pages_ptr,  # int32 [blocks, BLOCK_TOKENS / PAGE_TOKENS], the raw pages to write
    pairs_ptr,  # int32 view of patterns [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    patterns_ptr,  # int16 view of the same
    kv_heads,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    ROW_TOKENS: tl.constexpr = 16 if ALONG_TOKENS else 8
    ROWS: tl.constexpr = BLOCK_TOKENS // ROW_TOKENS
    COLUMNS: tl.constexpr = HEAD_DIM if ALONG_TOKENS else HEAD_DIM // 2
    first_token = tl.arange(0, ROWS) * ROW_TOKENS
    block_pages_ptr = pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS)
    row_start = token_starts(block_pages_ptr, first_token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    slot_start = (tl.load(records_ptr + block) * kv_heads + head).to(tl.int64) * SLOT_BYTES
    list_start: tl.constexpr = BLOCK_TOKENS * HEAD_DIM * 3 // 2
    base_start: tl.constexpr = list_start + 4 * CAPACITY
    column = tl.arange(0, COLUMNS)
    base_ptr = bytes_ptr + slot_start + base_start + column * (HEAD_DIM // COLUMNS)
    low_base = tl.load(base_ptr).to(tl.uint32)
    high_base = tl.load(base_ptr + (HEAD_DIM // COLUMNS - 1)).to(tl.uint32)
    base = ((low_base << 7) | (high_base << 23))[None, :]
    plane: tl.constexpr = HEAD_DIM * 2 * ROWS if ALONG_TOKENS else HEAD_DIM
    word_ptr = words_ptr + slot_start // 4 + word_offsets(ROWS, HEAD_DIM, ALONG_TOKENS)
    bytes0, bytes1 = _apart(tl.load(word_ptr), ROWS, COLUMNS, ALONG_TOKENS)
    bytes2, bytes3 = _apart(tl.load(word_ptr + plane), ROWS, COLUMNS, ALONG_TOKENS)
    nibbles0, nibbles1 = _apart(tl.load(word_ptr + 2 * plane), ROWS, COLUMNS, ALONG_TOKENS)
    byte_words = (bytes0, bytes1, bytes2, bytes3)
    nibble_words = (nibbles0, nibbles1)
    for place in tl.static_range(8):
        codes = rotate(byte_words[place // 2], 8 * (place % 2)) & BYTE_BITS
        codes |= rotate(nibble_words[place // 4], 32 - 4 * (place % 4)) & NIBBLE_BITS
        both = values_of(codes, base)
        if ALONG_TOKENS:
            tile_ptr = patterns_ptr + (row_start + place * HEAD_DIM)[:, None] + column[None, :]
            tl.store(tile_ptr, (both & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True))
            tl.store(tile_ptr + 8 * HEAD_DIM, (both >> 16).to(tl.uint16).to(tl.int16, bitcast=True))
        else:
            tile_ptr = pairs_ptr + (row_start + place * HEAD_DIM)[:, None] // 2 + column[None, :]
            tl.store(tile_ptr, both.to(tl.int32, bitcast=True))
    count = tl.load(words_ptr + (slot_start + base_start + HEAD_DIM) // 4).to(tl.int32)
    if count > 0:
        tl.debug_barrier()  # the zeros in the places of the exceptions are written before their patterns
        slot = tl.arange(0, CAPACITY)
        entry = tl.load(words_ptr + (slot_start + list_start) // 4 + slot)
        token = (entry >> 24).to(tl.int32)
        listed = slot < count
        # Unused entries are zero: their token is the block's first.
        entry_start = token_starts(block_pages_ptr, token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
        entry_ptr = patterns_ptr + entry_start + ((entry >> 16) & 0xFF).to(tl.int32)
        tl.store(entry_ptr, (entry & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=listed)


def unpack(
    records: torch.Tensor,
    places: torch.Tensor,
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    kind: str,
    block_tokens: int,
) -> None:
    """Write the blocks at ``places`` of ``records`` into the raw pages, bit for bit; arguments as in `pack`.

    The records are trusted: `kvfold.codec.fixed4.decode` is the one that checks them.
    """
    arguments = check_pages(raw, raw_pages, records, places, kind, block_tokens)
    if len(places):
        _unpack_kernel[(len(places), raw.shape[1])](
            records.view(torch.uint32),
            records,
            places,
            raw_pages,
            raw.view(torch.int32),
            raw.view(torch.int16),
            raw.shape[1],
            **arguments,
            num_warps=warps_of(block_tokens, raw.shape[3]),
        )
