"""Unpack `fixed3` pages to raw BF16 pages on the device, bit for bit; one program per block and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfold.kernels.fixed3_lists import row_ending_after, token_and_channel
from kvfold.kernels.fixed3_pack import LIST_GROUP, Slots, check_pages
from kvfold.kernels.fixed3_words import BYTE_BITS, rest_bits
from kvfold.kernels.fixed4_pack import rotate, token_starts, warps_of


@triton.jit
def _store_values_k(
    pairs_ptr,
    main_ptr,
    base_ptr,
    row_start,
    pair: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    PLANE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """What the codes say of one pair of the tokens of each row."""
    COLUMNS: tl.constexpr = HEAD_DIM // 8
    row = tl.arange(0, ROWS)[:, None] * PAIRS + pair
    column = tl.arange(0, COLUMNS)[None, :]
    word_ptr = main_ptr + row * COLUMNS + column
    first, second = tl.split(tl.reshape(tl.load(word_ptr + 4 * PLANE), (ROWS, COLUMNS // 2, 2)))
    column_of_last = tl.arange(0, COLUMNS // 2)[None, :]
    third = tl.load(main_ptr + 5 * PLANE + row * (COLUMNS // 2) + column_of_last)
    for quarter in tl.static_range(4):
        word = tl.load(word_ptr + quarter * PLANE)
        channel = quarter * (HEAD_DIM // 4) + 2 * tl.arange(0, COLUMNS)
        base = tl.load(base_ptr + channel).to(tl.uint32) << 7
        base |= tl.load(base_ptr + channel + 1).to(tl.uint32) << 23
        for place in tl.static_range(2):
            left = rest_bits(first, second, third, 4 * quarter + place)
            right = rest_bits(first, second, third, 4 * quarter + 2 + place)
            both = (rotate(word, 32 - 8 * place) & BYTE_BITS) | tl.interleave(left, right)
            token_start = row_start + (2 * pair + place) * HEAD_DIM
            to_ptr = pairs_ptr + token_start[:, None] // 2 + (quarter * COLUMNS + column)
            tl.store(to_ptr, (both + base[None, :]).to(tl.int32, bitcast=True))


@triton.jit
def _store_values_v(
    patterns_ptr,
    main_ptr,
    base_ptr,
    low_start,
    high_start,
    ROWS: tl.constexpr,
    PLANE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """What the codes say, of all tokens."""
    channel = tl.arange(0, HEAD_DIM)
    word_ptr = main_ptr + channel[:, None] * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
    first, second = tl.split(tl.reshape(tl.load(word_ptr + 4 * PLANE), (HEAD_DIM, ROWS, 2)))
    third = tl.load(main_ptr + 5 * PLANE + channel[:, None] * ROWS + tl.arange(0, ROWS)[None, :])
    first = tl.trans(first)
    second = tl.trans(second)
    third = tl.trans(third)
    base = (tl.load(base_ptr + channel).to(tl.uint32) * 0x00800080)[None, :]
    for quarter in tl.static_range(4):
        early, late = tl.split(tl.reshape(tl.load(word_ptr + quarter * PLANE), (HEAD_DIM, ROWS, 2)))
        words = (tl.trans(early), tl.trans(late))
        for tile in tl.static_range(4):
            both = rotate(words[tile // 2], 32 - 8 * (tile % 2)) & BYTE_BITS
            both = (both | rest_bits(first, second, third, 4 * quarter + tile)) + base
            column = channel[None, :] + (4 * quarter + tile) * HEAD_DIM
            low = (both & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
            tl.store(patterns_ptr + low_start[:, None] + column, low)
            high = (both >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
            tl.store(patterns_ptr + high_start[:, None] + column, high)


@triton.jit
def _listed_patterns(
    main_ptr,
    list_ptr,
    entry,
    LIST_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    """Tokens, channels and patterns of a list's entries, and which of them there are."""
    PLANE: tl.constexpr = BLOCK_TOKENS * HEAD_DIM // 16
    GROUP: tl.constexpr = min(LIST_ROWS, LIST_GROUP)
    ends_ptr = (main_ptr + PLANE * 11 // 2).to(tl.pointer_type(tl.uint8), bitcast=True) + HEAD_DIM
    count = 0
    group_row = tl.zeros_like(entry)
    group_start = tl.zeros_like(entry)
    for group in tl.static_range(LIST_ROWS // GROUP):
        group_row = tl.where(entry >= count, group * GROUP, group_row)
        group_start = tl.where(entry >= count, count, group_start)
        count += tl.load(ends_ptr + (group * GROUP + GROUP - 1)).to(tl.int32)
    is_listed = entry < count
    held = tl.load(list_ptr + entry, mask=is_listed, other=0).to(tl.int32) & 0xFFFF
    row = group_row + row_ending_after(ends_ptr + group_row, entry - group_start, GROUP)
    token, channel = token_and_channel(row, held >> 8, HEAD_DIM, ALONG_TOKENS)
    # The lower byte of the pattern, in bits 9 to 2 of its code.
    if ALONG_TOKENS:
        place = channel * (BLOCK_TOKENS // 16) + token // 32 * 2 + token // 2 % 2
        word = tl.load(main_ptr + token // 4 % 4 * PLANE + place)
        is_high = token // 16 % 2
    else:
        place = token // 2 * (HEAD_DIM // 8) + channel % (HEAD_DIM // 4) // 2
        word = tl.load(main_ptr + channel // (HEAD_DIM // 4) * PLANE + place)
        is_high = channel % 2
    turn = (2 + 8 * (token % 2) + 16 * is_high).to(tl.uint32)
    lower = ((word >> turn) | (word << (32 - turn))) & 0xFF
    return token, channel, lower.to(tl.int32) | ((held & 0xFF) << 8), is_listed


@triton.jit
def unpack_head(
    main_ptr,  # uint32, of one head of one page
    list_ptr,  # int16
    pairs_ptr,  # int32 view of patterns [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    patterns_ptr,  # int16 view of the same
    block_pages_ptr,  # int32, the raw pages to write
    head,
    kv_heads,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LIST_TILE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    """Write the patterns of one head of a page."""
    ROW_TOKENS: tl.constexpr = 32 if ALONG_TOKENS else 256 // HEAD_DIM
    ROWS: tl.constexpr = BLOCK_TOKENS // ROW_TOKENS
    PLANE: tl.constexpr = BLOCK_TOKENS * HEAD_DIM // 16
    base_ptr = (main_ptr + PLANE * 11 // 2).to(tl.pointer_type(tl.uint8), bitcast=True)
    first_token = tl.arange(0, ROWS) * ROW_TOKENS
    low_start = token_starts(block_pages_ptr, first_token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    if ALONG_TOKENS:
        high_start = token_starts(block_pages_ptr, first_token + 16, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
        _store_values_v(patterns_ptr, main_ptr, base_ptr, low_start, high_start, ROWS, PLANE, HEAD_DIM)
    else:
        PAIRS: tl.constexpr = ROW_TOKENS // 2
        for pair in tl.static_range(PAIRS):
            _store_values_k(pairs_ptr, main_ptr, base_ptr, low_start, pair, ROWS, PAIRS, PLANE, HEAD_DIM)
    tl.debug_barrier()  # what codes of exceptions say is written before what they are
    LIST_ROWS: tl.constexpr = HEAD_DIM if ALONG_TOKENS else ROWS
    token, channel, pattern, is_listed = _listed_patterns(
        main_ptr, list_ptr, tl.arange(0, LIST_TILE), LIST_ROWS, BLOCK_TOKENS, HEAD_DIM, ALONG_TOKENS
    )
    start = token_starts(block_pages_ptr, token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    tl.store(patterns_ptr + start + channel, pattern.to(tl.int16), mask=is_listed)


@triton.jit
def _unpack_kernel(
    words_ptr,  # uint32 view of main parts
    lists_ptr,  # int16 view of lists
    entries_ptr,  # int32 [page, kv_heads]
    places_ptr,  # int32 [blocks]
    pages_ptr,  # int32 [blocks, BLOCK_TOKENS / PAGE_TOKENS], the raw pages to write
    pairs_ptr,  # int32 view of patterns [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    patterns_ptr,  # int16 view of the same
    kv_heads,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    LIST_BYTES: tl.constexpr,
    LIST_TILE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(places_ptr + block).to(tl.int64) * kv_heads + head
    list_start = (tl.load(entries_ptr + slot) >> 8 & 0xFFFFFF).to(tl.int64) * 8
    unpack_head(
        words_ptr + slot * (MAIN_BYTES // 4),
        lists_ptr + list_start,
        pairs_ptr,
        patterns_ptr,
        pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS),
        head,
        kv_heads,
        BLOCK_TOKENS,
        PAGE_TOKENS,
        HEAD_DIM,
        LIST_TILE,
        ALONG_TOKENS,
    )


def unpack(
    slots: Slots,
    places: torch.Tensor,
    raw: torch.Tensor,
    raw_pages: torch.Tensor,
    kind: str,
    block_tokens: int,
) -> None:
    """Write the blocks at ``places`` of ``slots`` into the raw pages, bit for bit; arguments as in `pack`.

    The slots are trusted: `kvfold.codec.fixed3.decode` is the one that checks pages.
    """
    arguments = check_pages(raw, raw_pages, slots, places, kind, block_tokens)
    if len(places):
        _unpack_kernel[(len(places), raw.shape[1])](
            slots.mains.view(torch.uint32),
            slots.lists.view(torch.int16),
            slots.entries,
            places,
            raw_pages,
            raw.view(torch.int32),
            raw.view(torch.int16),
            raw.shape[1],
            **arguments,
            num_warps=warps_of(block_tokens, raw.shape[3]),
        )
