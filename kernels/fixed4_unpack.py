"""Unpack `fixed4` slots to raw BF16 pages on the device, bit for bit; one program per block and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfold.kernels.fixed4_pack import BYTE_BITS, NIBBLE_BITS, check_pages, rotate


@triton.jit
def value_of(code, base):
    """A pattern from a code and its base, in the bits of a pattern."""
    return code + tl.where((code & 0x780) != 0, base, 0)


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
    page = tl.load(pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS) + first_token // PAGE_TOKENS).to(
        tl.int64
    )
    row_start = ((page * kv_heads + head) * PAGE_TOKENS + first_token % PAGE_TOKENS) * HEAD_DIM  # [ROWS]
    slot_start = (tl.load(records_ptr + block) * kv_heads + head).to(tl.int64) * SLOT_BYTES
    list_start: tl.constexpr = BLOCK_TOKENS * HEAD_DIM * 3 // 2
    base_start: tl.constexpr = list_start + 4 * CAPACITY
    column = tl.arange(0, COLUMNS)
    base_ptr = bytes_ptr + slot_start + base_start + column * (HEAD_DIM // COLUMNS)
    low_base = (tl.load(base_ptr).to(tl.uint32) << 7)[None, :]
    high_base = (tl.load(base_ptr + (HEAD_DIM // COLUMNS - 1)).to(tl.uint32) << 7)[None, :]
    word_ptr = words_ptr + slot_start // 4
    plane: tl.constexpr = HEAD_DIM * 2 * ROWS if ALONG_TOKENS else HEAD_DIM
    if ALONG_TOKENS:
        word_ptr += column[:, None] * (2 * ROWS) + 2 * tl.arange(0, ROWS)[None, :]
    else:
        word_ptr += tl.arange(0, ROWS)[:, None] * (3 * HEAD_DIM) + 2 * column[None, :]
    for half in tl.static_range(2):
        nibbles = tl.load(word_ptr + 2 * plane + half)
        if ALONG_TOKENS:
            nibbles = tl.trans(nibbles)
        for quarter in tl.static_range(2):
            byte_word = tl.load(word_ptr + half * plane + quarter)
            if ALONG_TOKENS:
                byte_word = tl.trans(byte_word)
            for turn in tl.static_range(2):
                place = 4 * half + 2 * quarter + turn
                pairs = rotate(byte_word, 8 * turn) & BYTE_BITS
                pairs |= rotate(nibbles, 32 - 4 * (2 * quarter + turn)) & NIBBLE_BITS
                low = value_of(pairs & 0xFFFF, low_base)
                high = value_of(pairs >> 16, high_base)
                if ALONG_TOKENS:
                    tile_ptr = patterns_ptr + (row_start + place * HEAD_DIM)[:, None] + column[None, :]
                    tl.store(tile_ptr, low.to(tl.uint16).to(tl.int16, bitcast=True))
                    tl.store(tile_ptr + 8 * HEAD_DIM, high.to(tl.uint16).to(tl.int16, bitcast=True))
                else:
                    tile_ptr = pairs_ptr + (row_start + place * HEAD_DIM)[:, None] // 2 + column[None, :]
                    tl.store(tile_ptr, (low | (high << 16)).to(tl.int32, bitcast=True))
    count = tl.load(words_ptr + (slot_start + base_start + HEAD_DIM) // 4).to(tl.int32)
    if count > 0:
        tl.debug_barrier()  # the zeros in the places of the exceptions are written before their patterns
        slot = tl.arange(0, CAPACITY)
        entry = tl.load(words_ptr + (slot_start + list_start) // 4 + slot)
        token = (entry >> 24).to(tl.int32)
        listed = slot < count
        entry_page = tl.load(
            pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS) + token // PAGE_TOKENS, mask=listed
        )
        entry_row = (entry_page.to(tl.int64) * kv_heads + head) * PAGE_TOKENS + token % PAGE_TOKENS
        entry_ptr = patterns_ptr + entry_row * HEAD_DIM + ((entry >> 16) & 0xFF).to(tl.int32)
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
            num_warps=8,
        )
