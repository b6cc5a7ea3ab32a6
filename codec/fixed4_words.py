"""Codes and words of `fixed4`: patterns of 16 tokens to codes, these to byte planes and nibble planes, and back.

`kvfold.codec.fixed4` states the layout. Codes are ``uint16 [STRIPE_TOKENS, head_dim]``, bases are in the place
of the exponent (bits 14..7), words are taken two at a time, as uint64. Written as plain loops over channels with
a constant number of operations, which the compiler turns into vector code; every intermediate is cast back to
its 16 or 32 bits to keep it narrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNIT_TOKENS = 8
STRIPE_TOKENS = 16  # tokens coded at a time: two units, which the pairs of kind v span
BYTE_BITS = np.uint32(0x07F807F8)
NIBBLE_BITS = np.uint32(0x80078007)


@njit(cache=True)
def largest_exponents(block: NDArray[np.uint16], top: NDArray[np.uint16]) -> None:
    """The largest finite exponent of every channel, in the bits of a pattern (14..7)."""
    tokens, head_dim = block.shape
    top[:] = 0
    for token in range(tokens):
        row = block[token]
        for channel in range(head_dim):
            exponent = np.uint16(row[channel] & np.uint16(0x7F80))
            exponent = np.uint16(0) if exponent == np.uint16(0x7F80) else exponent
            top[channel] = exponent if exponent > top[channel] else top[channel]


@njit(cache=True)
def code_rows(rows: NDArray[np.uint16], base: NDArray[np.uint16], codes: NDArray[np.uint16]) -> int:
    """Codes ``[STRIPE_TOKENS, head_dim]`` of some tokens; how many of the elements are exceptions."""
    tokens, head_dim = rows.shape
    exceptions = 0
    for token in range(tokens):
        row = rows[token]
        out = codes[token]
        missed = np.uint16(0)
        for channel in range(head_dim):
            pattern = row[channel]
            offset = np.uint16(np.uint16(pattern & np.uint16(0x7F80)) - base[channel])
            # offset in bits 10..7: 1..15 is 0x0080..0x0780, and anything below the base wraps around
            inside = np.uint16(offset - np.uint16(0x80)) <= np.uint16(0x0700)
            magnitude = np.uint16(pattern & np.uint16(0x7FFF))
            kept = np.uint16(offset | np.uint16(pattern & np.uint16(0x807F)))
            zero = np.uint16(pattern & np.uint16(0x8000)) if magnitude == 0 else np.uint16(0)
            out[channel] = kept if inside else zero
            missed += np.uint16(0) if inside or magnitude == 0 else np.uint16(1)
        exceptions += int(missed)
    return exceptions


@njit(cache=True)
def decode_rows(codes: NDArray[np.uint16], bases: NDArray[np.uint16], rows: NDArray[np.uint16]) -> None:
    """Patterns of some tokens from their codes; the base is added where the offset is not 0."""
    tokens, head_dim = codes.shape
    for token in range(tokens):
        code_row = codes[token]
        row = rows[token]
        for channel in range(head_dim):
            code = code_row[channel]
            base = bases[channel] if np.uint16(code & np.uint16(0x0780)) != 0 else np.uint16(0)
            row[channel] = np.uint16(code + base)


@njit(cache=True)
def pack_channel_pairs(pairs: NDArray[np.uint32], stripe: int, words: NDArray[np.uint64]) -> None:
    """Words of two units from their pairs ``[STRIPE_TOKENS, head_dim / 2]``, kind k."""
    columns = pairs.shape[1]
    for half in range(2):
        unit = words[(2 * stripe + half) * 3 * columns : (2 * stripe + half + 1) * 3 * columns]
        p0, p1, p2, p3, p4, p5, p6, p7 = _eight_rows(pairs, UNIT_TOKENS * half)
        for c in range(columns):
            unit[c] = _byte_words(p0[c], p1[c], p2[c], p3[c])
            unit[columns + c] = _byte_words(p4[c], p5[c], p6[c], p7[c])
            low = _nibble_word(p0[c], p1[c], p2[c], p3[c])
            unit[2 * columns + c] = _side_by_side(low, _nibble_word(p4[c], p5[c], p6[c], p7[c]))


@njit(cache=True)
def pack_token_pairs(codes: NDArray[np.uint16], stripe: int, stripes: int, words: NDArray[np.uint64]) -> None:
    """Words of two units from their codes ``[STRIPE_TOKENS, head_dim]``, kind v."""
    head_dim = codes.shape[1]
    plane = head_dim * stripes
    low0, low1, low2, low3, low4, low5, low6, low7 = _eight_rows(codes, 0)
    high0, high1, high2, high3, high4, high5, high6, high7 = _eight_rows(codes, UNIT_TOKENS)
    for d in range(head_dim):
        p0, p1 = _pair(low0[d], high0[d]), _pair(low1[d], high1[d])
        p2, p3 = _pair(low2[d], high2[d]), _pair(low3[d], high3[d])
        p4, p5 = _pair(low4[d], high4[d]), _pair(low5[d], high5[d])
        p6, p7 = _pair(low6[d], high6[d]), _pair(low7[d], high7[d])
        place = d * stripes + stripe
        words[place] = _byte_words(p0, p1, p2, p3)
        words[plane + place] = _byte_words(p4, p5, p6, p7)
        words[2 * plane + place] = _side_by_side(_nibble_word(p0, p1, p2, p3), _nibble_word(p4, p5, p6, p7))


@njit(cache=True)
def unpack_channel_pairs(words: NDArray[np.uint64], stripe: int, pairs: NDArray[np.uint32]) -> None:
    columns = pairs.shape[1]
    for half in range(2):
        unit = words[(2 * stripe + half) * 3 * columns : (2 * stripe + half + 1) * 3 * columns]
        p0, p1, p2, p3, p4, p5, p6, p7 = _eight_rows(pairs, UNIT_TOKENS * half)
        for c in range(columns):
            p0[c], p1[c], p2[c], p3[c] = _four_pairs(unit[c], np.uint32(unit[2 * columns + c]))
        for c in range(columns):
            p4[c], p5[c], p6[c], p7[c] = _four_pairs(
                unit[columns + c], np.uint32(unit[2 * columns + c] >> np.uint64(32))
            )


@njit(cache=True)
def unpack_token_pairs(
    words: NDArray[np.uint64], stripe: int, stripes: int, codes: NDArray[np.uint16]
) -> None:
    head_dim = codes.shape[1]
    plane = head_dim * stripes
    low0, low1, low2, low3, low4, low5, low6, low7 = _eight_rows(codes, 0)
    high0, high1, high2, high3, high4, high5, high6, high7 = _eight_rows(codes, UNIT_TOKENS)
    for d in range(head_dim):
        place = d * stripes + stripe
        nibbles = words[2 * plane + place]
        p0, p1, p2, p3 = _four_pairs(words[place], np.uint32(nibbles))
        p4, p5, p6, p7 = _four_pairs(words[plane + place], np.uint32(nibbles >> np.uint64(32)))
        low0[d], low1[d], low2[d], low3[d] = np.uint16(p0), np.uint16(p1), np.uint16(p2), np.uint16(p3)
        low4[d], low5[d], low6[d], low7[d] = np.uint16(p4), np.uint16(p5), np.uint16(p6), np.uint16(p7)
        high0[d], high1[d], high2[d], high3[d] = _high(p0), _high(p1), _high(p2), _high(p3)
        high4[d], high5[d], high6[d], high7[d] = _high(p4), _high(p5), _high(p6), _high(p7)


@njit(cache=True, inline="always")
def _eight_rows(rows: NDArray[Any], first: int) -> tuple[NDArray[Any], ...]:
    return (
        rows[first],
        rows[first + 1],
        rows[first + 2],
        rows[first + 3],
        rows[first + 4],
        rows[first + 5],
        rows[first + 6],
        rows[first + 7],
    )


@njit(cache=True)
def _pair(low: np.uint16, high: np.uint16) -> np.uint32:
    return np.uint32(low) | np.uint32(np.uint32(high) << np.uint32(16))


@njit(cache=True)
def _high(pair: np.uint32) -> np.uint16:
    return np.uint16(pair >> np.uint32(16))


@njit(cache=True)
def _rotl(word: np.uint32, bits: int) -> np.uint32:
    return np.uint32(np.uint32(word << np.uint32(bits)) | np.uint32(word >> np.uint32(32 - bits)))


@njit(cache=True)
def _side_by_side(first: np.uint32, second: np.uint32) -> np.uint64:
    return np.uint64(first) | np.uint64(np.uint64(second) << np.uint64(32))


@njit(cache=True)
def _byte_words(p0: np.uint32, p1: np.uint32, p2: np.uint32, p3: np.uint32) -> np.uint64:
    """Two byte words of four pairs, side by side."""
    first = np.uint32(p0 & BYTE_BITS) | _rotl(np.uint32(p1 & BYTE_BITS), 24)
    second = np.uint32(p2 & BYTE_BITS) | _rotl(np.uint32(p3 & BYTE_BITS), 24)
    return _side_by_side(np.uint32(first), np.uint32(second))


@njit(cache=True)
def _nibble_word(p0: np.uint32, p1: np.uint32, p2: np.uint32, p3: np.uint32) -> np.uint32:
    low = np.uint32(p0 & NIBBLE_BITS) | _rotl(np.uint32(p1 & NIBBLE_BITS), 4)
    high = _rotl(np.uint32(p2 & NIBBLE_BITS), 8) | _rotl(np.uint32(p3 & NIBBLE_BITS), 12)
    return np.uint32(low | high)


@njit(cache=True)
def _four_pairs(
    byte_words: np.uint64, nibbles: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    first, second = np.uint32(byte_words), np.uint32(byte_words >> np.uint64(32))
    return (
        np.uint32(np.uint32(first & BYTE_BITS) | np.uint32(nibbles & NIBBLE_BITS)),
        np.uint32(np.uint32(_rotl(first, 8) & BYTE_BITS) | np.uint32(_rotl(nibbles, 28) & NIBBLE_BITS)),
        np.uint32(np.uint32(second & BYTE_BITS) | np.uint32(_rotl(nibbles, 24) & NIBBLE_BITS)),
        np.uint32(np.uint32(_rotl(second, 8) & BYTE_BITS) | np.uint32(_rotl(nibbles, 20) & NIBBLE_BITS)),
    )
