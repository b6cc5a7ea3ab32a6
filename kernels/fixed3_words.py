"""Words of `fixed3` on the device: sixteen pairs of codes to eight byte words and three rest words, and back."""

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.fixed4_pack import rotate

BYTE_BITS = tl.constexpr(0x03FC03FC)
REST_BITS = tl.constexpr(0x80038003)


@triton.jit
def _byte_word(even, odd):
    return (even & BYTE_BITS) | rotate(odd & BYTE_BITS, 8)


@triton.jit
def _with_rest(rest, code, m: tl.constexpr):
    """The three rest words of groups with those bits of their pair ``m``, 0 to 15 one after the other."""
    if m == 15:
        first = rest[0] | ((code >> 1) & 0x40004000)
        second = rest[1] | ((code & 0x00010001) << 14)
        return first, second, rest[2] | ((code & 0x00020002) << 13)
    else:
        bits = rotate(code & REST_BITS, 3 * (m % 5))
        if m // 5 == 0:
            return rest[0] | bits, rest[1], rest[2]
        elif m // 5 == 1:
            return rest[0], rest[1] | bits, rest[2]
        else:
            return rest[0], rest[1], rest[2] | bits


@triton.jit
def store_words_k(main_ptr, codes, pair: tl.constexpr, TILES: tl.constexpr, PLANE: tl.constexpr):
    """Words of the groups that have one pair of the tokens of each row."""
    ROWS: tl.constexpr = codes[0].shape[0]
    COLUMNS: tl.constexpr = codes[0].shape[1]
    row = tl.arange(0, ROWS)[:, None] * (TILES // 2) + pair
    word_ptr = main_ptr + row * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    nothing = tl.zeros([ROWS, COLUMNS // 2], tl.uint32)
    rest = (nothing, nothing, nothing)
    for quarter in tl.static_range(4):
        even = codes[quarter * TILES + 2 * pair]
        odd = codes[quarter * TILES + 2 * pair + 1]
        tl.store(word_ptr + quarter * PLANE, _byte_word(even, odd))
        even_left, even_right = tl.split(tl.reshape(even, (ROWS, COLUMNS // 2, 2)))
        odd_left, odd_right = tl.split(tl.reshape(odd, (ROWS, COLUMNS // 2, 2)))
        rest = _with_rest(rest, even_left, 4 * quarter)
        rest = _with_rest(rest, odd_left, 4 * quarter + 1)
        rest = _with_rest(rest, even_right, 4 * quarter + 2)
        rest = _with_rest(rest, odd_right, 4 * quarter + 3)
    tl.store(word_ptr + 4 * PLANE, tl.interleave(rest[0], rest[1]))
    last_ptr = main_ptr + 5 * PLANE + row * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    tl.store(last_ptr, rest[2])


@triton.jit
def store_words_v(main_ptr, codes, PLANE: tl.constexpr):
    """Words of all groups."""
    ROWS: tl.constexpr = codes[0].shape[0]
    COLUMNS: tl.constexpr = codes[0].shape[1]
    channel = tl.arange(0, COLUMNS)[:, None]
    word_ptr = main_ptr + channel * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
    nothing = tl.zeros([ROWS, COLUMNS], tl.uint32)
    rest = (nothing, nothing, nothing)
    for quarter in tl.static_range(4):
        first = _byte_word(codes[4 * quarter], codes[4 * quarter + 1])
        second = _byte_word(codes[4 * quarter + 2], codes[4 * quarter + 3])
        tl.store(word_ptr + quarter * PLANE, tl.interleave(tl.trans(first), tl.trans(second)))
        for tile in tl.static_range(4):
            rest = _with_rest(rest, codes[4 * quarter + tile], 4 * quarter + tile)
    tl.store(word_ptr + 4 * PLANE, tl.interleave(tl.trans(rest[0]), tl.trans(rest[1])))
    last_ptr = main_ptr + 5 * PLANE + channel * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(last_ptr, tl.trans(rest[2]))


@triton.jit
def rest_bits(first, second, third, m: tl.constexpr):
    """Those bits of a group's pair ``m`` that its rest words hold."""
    if m == 15:
        return ((first & 0x40004000) << 1) | ((second >> 14) & 0x00010001) | ((third >> 13) & 0x00020002)
    elif m // 5 == 0:
        return rotate(first, 32 - m % 5 * 3) & REST_BITS
    elif m // 5 == 1:
        return rotate(second, 32 - m % 5 * 3) & REST_BITS
    else:
        return rotate(third, 32 - m % 5 * 3) & REST_BITS
