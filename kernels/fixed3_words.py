"""Words of `fixed3` on the device: sixteen pairs of codes to eight byte words and three rest words, and back."""

# Tuples change their length in code that only Triton runs.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kvfold.kernels.fixed4_pack import rotate

BYTE_BITS = tl.constexpr(0x03FC03FC)
TURNED_BYTE_BITS = tl.constexpr(0xFC03FC03)  # rotated by 8: all that BYTE_BITS leave
REST_BITS = tl.constexpr(0x80038003)
SPARE_BITS = tl.constexpr(0x40004000)


@triton.jit
def _byte_word(even, odd):
    """Of two pairs, whatever their other bits are."""
    return (even & BYTE_BITS) | (rotate(odd, 8) & TURNED_BYTE_BITS)


@triton.jit
def _with_rest(rests, code, m: tl.constexpr):
    """The rest bits of a quarter's pairs one after the other, with those of pair ``m`` of four."""
    return rests | rotate(code & REST_BITS, 3 * m)


@triton.jit
def _rest_words(quarters):
    """The three rest words of groups from the rest bits of their quarters, each of four pairs in their order.

    Bits of pairs n to m, out of those: 0 80038003, 0-1 801F801F, 0-2 80FF80FF, 1-3 07FC07FC, 2-3 07E007E0.
    """
    first = quarters[0] | rotate(quarters[1] & 0x80038003, 12)
    second = rotate(quarters[1] & 0x07FC07FC, 29) | rotate(quarters[2] & 0x801F801F, 9)
    third = rotate(quarters[2] & 0x07E007E0, 26) | rotate(quarters[3] & 0x80FF80FF, 6)
    # Pair 15: its sign, its lowest bit and the next.
    first |= rotate(quarters[3], 22) & SPARE_BITS
    second |= rotate(quarters[3], 5) & SPARE_BITS
    third |= rotate(quarters[3], 4) & SPARE_BITS
    return first, second, third


@triton.jit
def store_words_k(main_ptr, bytes_, rests, pair: tl.constexpr, PAIRS: tl.constexpr, PLANE: tl.constexpr):
    """Words of the groups that have one pair of each row's tokens; codes by token: ``[row, pair of channels]``."""
    ROWS: tl.constexpr = bytes_[0].shape[0]
    COLUMNS: tl.constexpr = bytes_[0].shape[1] // 4  # of a quarter
    row = (tl.arange(0, ROWS) * PAIRS + pair)[:, None]
    column = tl.arange(0, 4 * COLUMNS)[None, :]
    word_ptr = main_ptr + column // COLUMNS * PLANE + row * COLUMNS + column % COLUMNS
    tl.store(word_ptr, _byte_word(bytes_[0], bytes_[1]))
    both = _with_rest(rests[0] & REST_BITS, rests[1], 1)
    left, right = tl.split(tl.reshape(both, (ROWS, 2 * COLUMNS, 2)))
    joined = tl.reshape(left | rotate(right, 6), (ROWS, 2, 2, COLUMNS // 2))
    even, odd = tl.split(tl.permute(joined, (0, 3, 1, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = _rest_words((first, second, third, fourth))
    rest_ptr = main_ptr + 4 * PLANE + row * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(rest_ptr, tl.interleave(words[0], words[1]))
    last_ptr = main_ptr + 5 * PLANE + row * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    tl.store(last_ptr, words[2])


@triton.jit
def store_words_v(main_ptr, bytes_, rests, PLANE: tl.constexpr):
    """Words of all groups; codes by pair: ``[32 tokens, channel]``."""
    ROWS: tl.constexpr = bytes_[0].shape[0]
    COLUMNS: tl.constexpr = bytes_[0].shape[1]
    channel = tl.arange(0, COLUMNS)[:, None]
    word_ptr = main_ptr + channel * (2 * ROWS) + tl.arange(0, 2 * ROWS)[None, :]
    quarters = ()
    for quarter in tl.static_range(4):
        first = _byte_word(bytes_[4 * quarter], bytes_[4 * quarter + 1])
        second = _byte_word(bytes_[4 * quarter + 2], bytes_[4 * quarter + 3])
        tl.store(word_ptr + quarter * PLANE, tl.interleave(tl.trans(first), tl.trans(second)))
        joined = rests[4 * quarter] & REST_BITS
        for m in tl.static_range(1, 4):
            joined = _with_rest(joined, rests[4 * quarter + m], m)
        quarters = quarters + (joined,)  # noqa: RUF005
    words = _rest_words(quarters)
    tl.store(word_ptr + 4 * PLANE, tl.interleave(tl.trans(words[0]), tl.trans(words[1])))
    last_ptr = main_ptr + 5 * PLANE + channel * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(last_ptr, tl.trans(words[2]))


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
