"""Lists of `fixed3` on the device: from a bit for each exception to entries in order, and where entries belong."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.fixed4_pack import token_starts


@triton.jit
def flags_of(outs, TILES: tl.constexpr, ALONG_TOKENS: tl.constexpr):
    """A bit for each exception of a quarter, in words of 32 positions: ``[row of the list, word]``."""
    ROWS: tl.constexpr = outs[0].shape[0]
    COLUMNS: tl.constexpr = outs[0].shape[1]
    flags = tl.zeros([ROWS, COLUMNS], tl.uint32)
    for tile in tl.static_range(TILES):
        if ALONG_TOKENS:  # positions ascend by one bit of the pair, half, the other bit of it
            flags |= (outs[tile] >> (15 - tile // 2 * 4 - tile % 2)) & (1 << (tile // 2 * 4 + tile % 2))
            flags |= (outs[tile] >> (29 - tile // 2 * 4 - tile % 2)) & (4 << (tile // 2 * 4 + tile % 2))
        else:  # by channel, token
            flags |= (outs[tile] >> (15 - tile)) & (1 << tile)
            flags |= (outs[tile] >> (31 - TILES - tile)) & (1 << (TILES + tile))
    if ALONG_TOKENS:
        AT_ONCE: tl.constexpr = min(ROWS, 4)
        flags <<= (tl.arange(0, ROWS) % 4 * 8).to(tl.uint32)[:, None]
        words = tl.xor_sum(tl.reshape(flags, (ROWS // AT_ONCE, AT_ONCE, COLUMNS)), 1)
        return tl.trans(words)
    else:
        flags <<= (tl.arange(0, COLUMNS) % (COLUMNS // 2) * (2 * TILES)).to(tl.uint32)[None, :]
        return tl.xor_sum(tl.reshape(flags, (ROWS, 2, COLUMNS // 2)), 2)


@triton.jit
def bit_counts(word):
    """Bits that are set in each 2, 4, 8, 16 and all 32 of a word's."""
    by_2 = word - ((word >> 1) & 0x55555555)
    by_4 = (by_2 & 0x33333333) + ((by_2 >> 2) & 0x33333333)
    by_8 = (by_4 + (by_4 >> 4)) & 0x0F0F0F0F
    by_16 = (by_8 + (by_8 >> 8)) & 0x00FF00FF
    return by_2, by_4, by_8, by_16, (by_16 + (by_16 >> 16)) & 0xFF


@triton.jit
def _set_bit(word, rank):
    """Where the bit of a rank among those that are set is."""
    by_2, by_4, by_8, by_16, _ = bit_counts(word)
    counts = (by_16, by_8, by_4, by_2, word)
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
    entry = tl.arange(0, LIST_TILE)
    is_listed = entry < count
    word = row_ending_after(ends_ptr, entry, LIST_ROWS * ROW_WORDS)
    flags = tl.load(flags_ptr + word)
    _, _, _, _, set_bits = bit_counts(flags)
    rank = entry - tl.load(ends_ptr + word) + set_bits.to(tl.int32)
    QUARTER_WORDS: tl.constexpr = ROW_WORDS // 4
    position = word % ROW_WORDS // QUARTER_WORDS * 64 + word % QUARTER_WORDS * 32 + _set_bit(flags, rank)
    position = tl.where(is_listed, position, 0)
    token, channel = token_and_channel(word // ROW_WORDS, position, HEAD_DIM, ALONG_TOKENS)
    token_start = token_starts(block_pages_ptr, token, head, kv_heads, PAGE_TOKENS, HEAD_DIM)
    pattern = tl.load(patterns_ptr + token_start + channel, mask=is_listed, other=0).to(tl.int32)
    value = ((pattern >> 8) & 0xFF) | (position << 8)
    tl.store(list_ptr + entry, value.to(tl.int16), mask=entry < (count + 7) // 8 * 8)
