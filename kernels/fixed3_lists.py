"""Lists of `fixed3` on the device: from a bit for each exception to entries in order, and where entries belong."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.fixed4_pack import token_starts


@triton.jit
def store_flags_k(flags_ptr, flags, HEAD_DIM: tl.constexpr):
    """A bit for each position of each row of the list, in order: by channel, token.

    ``flags`` are of one or two pairs of tokens, ``[row, pair of channels]``: in bits 0 and 8 those of the lower
    channel's tokens, in bits 16 and 24 those of the upper one's.
    """
    ROWS: tl.constexpr = flags[0].shape[0]
    COLUMNS: tl.constexpr = HEAD_DIM // 2
    WIDTH: tl.constexpr = 4 * len(flags)
    AT_ONCE: tl.constexpr = 16 // WIDTH
    # No two bits of a factor and the flags meet: the four come to the top without a carry.
    bits = flags[0] * (0x10204080 if len(flags) == 1 else 0x01021020)
    if len(flags) == 2:
        bits += flags[1] * 0x04084080
    shift = (tl.arange(0, COLUMNS) % AT_ONCE * WIDTH).to(tl.uint32)
    bits = (bits >> (32 - WIDTH)) << shift[None, :]
    bits = tl.xor_sum(tl.reshape(bits, (ROWS, COLUMNS // AT_ONCE, AT_ONCE)), 2)
    place = tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, COLUMNS // AT_ONCE)[None, :]
    tl.store(flags_ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + place, bits.to(tl.uint16))


@triton.jit
def store_flags_v(flags_ptr, flags):
    """Of each channel a byte for each quarter and 32 tokens, from `place_of_flag` of ``[32 tokens, channel]``."""
    BYTES: tl.constexpr = 4 * flags.shape[0] * flags.shape[1]
    # Upper halves of the first two quarters change places with lower halves of the others.
    moved = (flags ^ (flags >> 14)) & 0xCCCC
    flags = flags ^ moved ^ (moved << 14)
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)
    by_row = tl.permute((flags[:, :, None] >> shift[None, None, :]).to(tl.uint8), (1, 2, 0))
    byte_ptr = flags_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + tl.arange(0, BYTES)
    tl.store(byte_ptr, tl.reshape(by_row, (BYTES,)))


@triton.jit
def place_of_flag(number: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """The bit for the lower half of a pair in tile ``number``; that for the upper half is 16 further."""
    if ALONG_TOKENS:
        return number % 8 // 4 * 8 + number % 4 // 2 * 4 + number % 2 + number // 8 * 2
    else:
        return number % 2 * 8


@triton.jit
def bit_count(word):
    """Bits that are set: what compilers know as one instruction."""
    by_2 = word - ((word >> 1) & 0x55555555)
    by_4 = (by_2 & 0x33333333) + ((by_2 >> 2) & 0x33333333)
    by_8 = (by_4 + (by_4 >> 4)) & 0x0F0F0F0F
    return ((by_8 * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _set_bit(word, rank):
    """Where the bit of a rank among those that are set is."""
    by_2 = word - ((word >> 1) & 0x55555555)
    by_4 = (by_2 & 0x33333333) + ((by_2 >> 2) & 0x33333333)
    by_8 = (by_4 + (by_4 >> 4)) & 0x0F0F0F0F
    counts = ((by_8 + (by_8 >> 8)) & 0x00FF00FF, by_8, by_4, by_2, word)
    at = tl.zeros_like(rank)
    for level in tl.static_range(5):
        below = (counts[level] >> at.to(tl.uint32)) & ((1 << min(8, 16 >> level)) - 1)
        is_above = rank >= below.to(tl.int32)
        rank -= tl.where(is_above, below.to(tl.int32), 0)
        at += tl.where(is_above, 16 >> level, 0)
    return at


@triton.jit
def row_ending_after(ends_ptr, entry, COUNT: tl.constexpr):
    """The first of COUNT rows, a power of two up to 2,048, whose entries end after this one."""
    row = tl.zeros_like(entry)
    for level in tl.static_range(1, 12):
        if COUNT >> level > 0:
            end = tl.load(ends_ptr + row + ((COUNT >> level) - 1)).to(tl.int32)
            row += tl.where(end <= entry, COUNT >> level, 0)
    return row


@triton.jit
def token_and_channel(row, position, HEAD_DIM: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """Of an entry, by its row of the list."""
    if ALONG_TOKENS:
        token = ((position >> 3) & 7) * 32 + ((position >> 1) & 1) * 16 + (position >> 6) * 4
        return token + ((position >> 2) & 1) * 2 + (position & 1), row
    else:
        ROW_TOKENS: tl.constexpr = 256 // HEAD_DIM
        return row * ROW_TOKENS + position % ROW_TOKENS, position // ROW_TOKENS


@triton.jit
def store_list(
    list_ptr,
    count,
    flags_ptr,  # uint32 [LIST_ROWS, ROW_WORDS], a bit for each exception
    ends_ptr,  # int32 of the same shape, where the entries of each word end
    patterns_ptr,
    block_pages_ptr,
    head,
    kv_heads,
    LIST_ROWS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LIST_TILE: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
):
    """The entries of a head, and zeros up to a whole unit."""
    AT_ONCE: tl.constexpr = min(LIST_TILE, LIST_ROWS * ROW_WORDS // 2)  # 1.6 % of the elements: most lists
    for first in range(0, count, AT_ONCE):
        entry = first + tl.arange(0, AT_ONCE)
        is_listed = entry < count
        word = row_ending_after(ends_ptr, entry, LIST_ROWS * ROW_WORDS)
        flags = tl.load(flags_ptr + word)
        rank = entry - tl.load(ends_ptr + word) + bit_count(flags)
        bit = word % ROW_WORDS * 32 + _set_bit(flags, rank)
        if ALONG_TOKENS:
            # A quarter has 64 positions, eight for 32 tokens each, also where there are fewer tokens.
            QUARTER_BITS: tl.constexpr = ROW_WORDS * 8
            bit += bit // QUARTER_BITS * (64 - QUARTER_BITS)
        position = tl.where(is_listed, bit, 0)
        token, channel = token_and_channel(word // ROW_WORDS, position, HEAD_DIM, ALONG_TOKENS)
        token_start = token_starts(block_pages_ptr, token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
        pattern = tl.load(patterns_ptr + token_start + channel, mask=is_listed, other=0).to(tl.int32)
        value = ((pattern >> 8) & 0xFF) | (position << 8)
        tl.store(list_ptr + entry, value.to(tl.int16), mask=entry < (count + 7) // 8 * 8)
