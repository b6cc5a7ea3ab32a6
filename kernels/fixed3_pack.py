"""Pack raw BF16 blocks into `fixed3` main parts and lists on the device; the bytes are those of the codec.

One program per block and KV head. Words are computed in tiles of pairs (`kvfold.codec.fixed3`): pair ``m`` of a
group is of quarter ``m // 4``. For kind k a quarter is one of the channels, and a tile one of the tokens of each
row of the list, ``[row, pair of channels]``; for kind v a tile is one of the sixteen pairs, ``[32 tokens, channel]``.
Both ways the positions of a quarter are the 64 from ``64 quarter`` on, and those of one place of a tile's second
(k) or first (v) axis follow one another, so that entries find their places by one scan along that axis.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfold.codec.fixed3 import head_main_bytes, row_count
from kvfold.codec.fixed3_heads import GROUP_ROWS, MOST_IN_GROUP
from kvfold.kernels.fixed4_pack import check_pages, rotate, token_starts, warps_of

BYTE_BITS = tl.constexpr(0x03FC03FC)
REST_BITS = tl.constexpr(0x80038003)
TOP_BITS = tl.constexpr(0x80008000)
EXPONENT_BITS = tl.constexpr(0x7F807F80)
LIST_UNIT_BYTES = 16  # lists start at multiples of this, and their sizes are
MOST_LIST_UNITS = 1 << 24  # that an entry can count
# Of a K block: 2 ** (base - 64) must be a BF16 number. Sums of V stand as 2 ** (64 - base) of what they are, never
# larger; from block to block they are rescaled by 2 ** (base - next base), a float32 between any two of these.
BASES = {"k": (1, 191), "v": (65, 191)}
MOST_LISTED = tl.constexpr(MOST_IN_GROUP)
LIST_GROUP = tl.constexpr(GROUP_ROWS)


@triton.jit
def pair_tile(
    pairs_ptr,
    patterns_ptr,
    low_start,
    high_start,
    number: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    """Both patterns of each pair of one tile in a word."""
    if ALONG_TOKENS:
        column = tl.arange(0, HEAD_DIM)[None, :] + number * HEAD_DIM
        low = tl.load(patterns_ptr + low_start[:, None] + column).to(tl.uint16, bitcast=True)
        high = tl.load(patterns_ptr + high_start[:, None] + column).to(tl.uint16, bitcast=True)
        word = low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        column = tl.arange(0, HEAD_DIM // 8)[None, :] + number // TILES * (HEAD_DIM // 8)
        token_start = (low_start + number % TILES * HEAD_DIM)[:, None] // 2
        word = tl.load(pairs_ptr + token_start + column).to(tl.uint32, bitcast=True)
    return word


@triton.jit
def _is_other(exponents, exponent):
    """The top bit of each half whose exponent is not that one."""
    return ((exponents ^ exponent) + EXPONENT_BITS) & TOP_BITS


@triton.jit
def _first_base(top_low, top_high):
    """Bases of both halves from the largest finite exponents, plus 0x80, in the upper halves of words."""
    low = tl.maximum((tl.max(top_low, 0) >> 16) - 0x80 - 0x380, 0x80)
    high = tl.maximum((tl.max(top_high, 0) >> 16) - 0x80 - 0x380, 0x80)
    return (low | (high << 16)).to(tl.uint32)


@triton.jit
def _codes(word, base):
    """Codes of a pair in their places, and the top bit of each half that is an exception."""
    distance = (word | TOP_BITS) - base  # 0x8000 more than magnitude - base
    offset = distance & 0x7FFF7FFF
    out = ((distance ^ TOP_BITS) | (offset + 0x7C007C00)) & TOP_BITS
    moved = (word & 0x00FF00FF) << 2
    kept = offset | (word & TOP_BITS)
    is_out = out | (out - (out >> 15))
    return kept ^ ((kept ^ moved) & is_out), out


@triton.jit
def _add_rest(first, second, third, code, m: tl.constexpr):
    """The three rest words of groups with the bits of their pair m."""
    if m == 15:
        first |= (code >> 1) & 0x40004000
        second |= (code & 0x00010001) << 14
        third |= (code & 0x00020002) << 13
    else:
        bits = rotate(code & REST_BITS, 3 * (m % 5))
        if m // 5 == 0:
            first |= bits
        elif m // 5 == 1:
            second |= bits
        else:
            third |= bits
    return first, second, third


@triton.jit
def _columns(word, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Even and odd columns apart."""
    return tl.split(tl.reshape(word, (ROWS, COLUMNS // 2, 2)))


@triton.jit
def _pack_kernel(
    pairs_ptr,  # int32 view of patterns [page, kv_heads, PAGE_TOKENS, HEAD_DIM]
    patterns_ptr,  # int16 view of the same
    pages_ptr,  # int32 [blocks, BLOCK_TOKENS / PAGE_TOKENS], the raw pages of each block
    words_ptr,  # uint32 view of main parts
    bytes_ptr,  # uint8 view of the same
    lists_ptr,  # int16 view of lists
    entries_ptr,  # int32 [page, kv_heads]
    places_ptr,  # int32 [blocks], which page each block becomes
    counts_ptr,  # int32 [blocks, kv_heads], exceptions found
    kv_heads,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    LIST_BYTES: tl.constexpr,
    LOWEST_BASE: tl.constexpr,
    HIGHEST_BASE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    LIST_ROW_TOKENS: tl.constexpr = 256 // HEAD_DIM
    TILE_TOKENS: tl.constexpr = 32 if ALONG_TOKENS else max(LIST_ROW_TOKENS, 2)
    ROWS: tl.constexpr = BLOCK_TOKENS // TILE_TOKENS
    COLUMNS: tl.constexpr = HEAD_DIM if ALONG_TOKENS else HEAD_DIM // 8
    TILES: tl.constexpr = 4 if ALONG_TOKENS else TILE_TOKENS  # of a quarter
    SCAN: tl.constexpr = 0 if ALONG_TOKENS else 1
    PLANE: tl.constexpr = BLOCK_TOKENS * HEAD_DIM // 16
    first_token = tl.arange(0, ROWS) * TILE_TOKENS
    block_pages_ptr = pages_ptr + block * (BLOCK_TOKENS // PAGE_TOKENS)
    low_start = token_starts(block_pages_ptr, first_token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    high_start = low_start
    if ALONG_TOKENS:
        high_start = token_starts(block_pages_ptr, first_token + 16, head, kv_heads, PAGE_TOKENS, HEAD_DIM)

    # Bases, by quarter. Exponents plus 0x80: the one that is not finite becomes the most negative.
    words = ()
    bases = ()
    none = tl.full([ROWS, COLUMNS], 0x800000, tl.int32)
    top_low = none
    top_high = none
    for number in tl.static_range(4 * TILES):
        word = pair_tile(
            pairs_ptr, patterns_ptr, low_start, high_start, number, TILES, HEAD_DIM, ALONG_TOKENS
        )
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005
        raised = (word & EXPONENT_BITS) + 0x00800080
        top_low = tl.maximum(top_low, (raised << 16).to(tl.int32, bitcast=True))
        top_high = tl.maximum(top_high, raised.to(tl.int32, bitcast=True))
        if not ALONG_TOKENS and number % TILES == TILES - 1:
            bases = bases + (_first_base(top_low, top_high),)  # type: ignore[assignment]  # noqa: RUF005
            top_low = none
            top_high = none
    if ALONG_TOKENS:
        top_low = tl.maximum(top_low, top_high)
        base = _first_base(top_low, top_low)
        bases = (base, base, base, base)  # type: ignore[assignment]
    lower = ()
    more = tl.zeros([ROWS, COLUMNS], tl.uint32)
    for number in tl.static_range(4 * TILES):
        base = bases[number // TILES][None, :]
        exponents = words[number] & EXPONENT_BITS
        more += _is_other(exponents, base + 0x03800380) >> 15
        more += (_is_other(exponents, base - 0x00800080) ^ TOP_BITS) >> 15
        if not ALONG_TOKENS and number % TILES == TILES - 1:
            lower = lower + (tl.sum(more, 0),)  # type: ignore[assignment]  # noqa: RUF005
            more = tl.zeros([ROWS, COLUMNS], tl.uint32)
    if ALONG_TOKENS:
        both = tl.sum(more, 0)
        both = (both & 0xFFFF) + (both >> 16)
        both |= both << 16
        lower = (both, both, both, both)  # type: ignore[assignment]
    slot = tl.load(places_ptr + block).to(tl.int64) * kv_heads + head
    base_ptr = bytes_ptr + slot * MAIN_BYTES + 22 * PLANE + tl.arange(0, COLUMNS) * (HEAD_DIM // 4 // COLUMNS)
    chosen = ()
    lowest = 255
    highest = 0
    for quarter in tl.static_range(4):
        base = bases[quarter]
        # Elements with the exponent below, and those without the last: more than all if the former win.
        down = tl.where(((lower[quarter] & 0xFFFF) > BLOCK_TOKENS) & ((base & 0xFFFF) > 0x80), 0x80, 0)
        down |= tl.where(((lower[quarter] >> 16) > BLOCK_TOKENS) & ((base >> 16) > 0x80), 0x800000, 0)
        base -= down.to(tl.uint32)
        chosen = chosen + (base,)  # type: ignore[assignment]  # noqa: RUF005
        low = ((base >> 7) & 0xFF).to(tl.int32)
        high = (base >> 23).to(tl.int32)
        lowest = tl.minimum(lowest, tl.min(tl.minimum(low, high), 0))
        highest = tl.maximum(highest, tl.max(tl.maximum(low, high), 0))
        if ALONG_TOKENS:
            if quarter == 0:
                tl.store(bytes_ptr + slot * MAIN_BYTES + 22 * PLANE + tl.arange(0, COLUMNS), low.to(tl.uint8))
        else:
            tl.store(base_ptr + quarter * (HEAD_DIM // 4), low.to(tl.uint8))
            tl.store(base_ptr + quarter * (HEAD_DIM // 4) + 1, high.to(tl.uint8))
