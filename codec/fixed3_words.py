"""Codes and words of `fixed3`: patterns to codes of 11 bits, these to byte words and three-bit words, and back.

`kvfold.codec.fixed3` states the layout. Codes are ``uint16 [tokens, channels]``, both padded, to multiples of
`UNIT_TOKENS` and `UNIT_CHANNELS`; words are uint32, bases in the place of the exponent (bits 14..7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNIT_TOKENS = 32  # tokens of kind v that share words: 16 pairs
UNIT_CHANNELS = 16  # channels of kind k that do, of two tokens
GROUP_ELEMENTS = 32
WINDOW = 8
SMALLEST_BASE = 1
LARGEST_BASE = 254 - (WINDOW - 1)
BYTE_BITS = np.uint32(0x03FC03FC)
REST_BITS = np.uint32(0x80038003)
SPARE_SIGN = np.uint32(0x40004000)
LOWEST = np.uint32(0x00010001)
SECOND = np.uint32(0x00020002)


@njit(cache=True)
def choose_bases(block: NDArray[np.uint16], base: NDArray[np.uint16]) -> None:
    """The better of the windows that end at, or one below, a channel's largest finite exponent."""
    tokens, head_dim = block.shape
    top = np.zeros(head_dim, np.uint16)
    for token in range(tokens):
        row = block[token]
        for channel in range(head_dim):
            exponent = np.uint16(row[channel] & np.uint16(0x7F80))
            exponent = np.uint16(0) if exponent == np.uint16(0x7F80) else exponent
            top[channel] = exponent if exponent > top[channel] else top[channel]
    gain = np.zeros(head_dim, np.int16)
    for channel in range(head_dim):
        base[channel] = max(int(top[channel] >> 7) - (WINDOW - 1), SMALLEST_BASE) << 7
    for token in range(tokens):
        row = block[token]
        for channel in range(head_dim):
            exponent = np.uint16(row[channel] & np.uint16(0x7F80))
            gain[channel] += np.int16(exponent == np.uint16(base[channel] - np.uint16(0x80)))
            gain[channel] -= np.int16(exponent == np.uint16(base[channel] + np.uint16(0x380)))
    for channel in range(head_dim):
        if gain[channel] > 0 and base[channel] > np.uint16(SMALLEST_BASE << 7):
            base[channel] -= np.uint16(0x80)


@njit(cache=True)
def is_listed(pattern: np.uint16, base: np.uint16) -> bool:
    """Whether a pattern's exponent lies outside the window from ``base`` on."""
    return bool(np.uint16(np.uint16(pattern & np.uint16(0x7F80)) - base) > np.uint16((WINDOW - 1) << 7))


@njit(cache=True)
def code_row(row: NDArray[np.uint16], base: NDArray[np.uint16], codes: NDArray[np.uint16]) -> int:
    """Codes of one token; how many of its elements are exceptions."""
    exceptions = 0
    for channel in range(len(row)):
        pattern = row[channel]
        offset = np.uint16(np.uint16(pattern & np.uint16(0x7F80)) - base[channel])
        inside = offset <= np.uint16(0x0380)
        kept = np.uint16(offset | np.uint16(pattern & np.uint16(0x807F)))
        moved = np.uint16(np.uint16(np.uint16(pattern & np.uint16(0xFF)) << 2))
        codes[channel] = kept if inside else moved
        exceptions += 0 if inside else 1
    return exceptions


@njit(cache=True)
def plain_pattern(code: np.uint16, base: np.uint16) -> np.uint16:
    """The pattern of a code whose element is no exception."""
    return np.uint16(code + base)


@njit(cache=True)
def listed_pattern(code: np.uint16, high: int) -> np.uint16:
    """The pattern of an exception: the lower byte from its code, the upper one from its entry."""
    return np.uint16(np.uint16(high) << 8 | np.uint16(code >> 2) & np.uint16(0xFF))


@njit(cache=True)
def pack_words(codes: NDArray[np.uint16], along_tokens: bool, words: NDArray[np.uint32]) -> None:
    """All words of one head from its codes."""
    groups = codes.size // GROUP_ELEMENTS
    pairs = np.empty(16, np.uint32)
    for group in range(groups):
        _gather_pairs(codes, along_tokens, group, pairs)
        for k in range(8):
            word = np.uint32(pairs[2 * k] & BYTE_BITS) | _rotl(np.uint32(pairs[2 * k + 1] & BYTE_BITS), 8)
            words[(k // 2 * groups + group) * 2 + k % 2] = word
        last = pairs[15]
        spare = (
            np.uint32(np.uint32(last >> np.uint32(1)) & SPARE_SIGN),
            np.uint32(np.uint32(last & LOWEST) << np.uint32(14)),
            np.uint32(np.uint32(last & SECOND) << np.uint32(13)),
        )
        for k in range(3):
            word = spare[k] | np.uint32(pairs[5 * k] & REST_BITS)
            for q in range(1, 5):
                word |= _rotl(np.uint32(pairs[5 * k + q] & REST_BITS), 3 * q)
            words[8 * groups + 2 * group + k if k < 2 else 10 * groups + group] = word


@njit(cache=True)
def unpack_words(words: NDArray[np.uint32], along_tokens: bool, codes: NDArray[np.uint16]) -> None:
    """The codes of one head from its words."""
    groups = codes.size // GROUP_ELEMENTS
    pairs = np.empty(16, np.uint32)
    for group in range(groups):
        rest = (
            words[8 * groups + 2 * group],
            words[8 * groups + 2 * group + 1],
            words[10 * groups + group],
        )
        for m in range(16):
            word = words[(m // 4 * groups + group) * 2 + m // 2 % 2]
            word = _rotl(word, 24) if m % 2 else word
            if m < 15:
                other = np.uint32(_rotl(rest[m // 5], 32 - m % 5 * 3) & REST_BITS) if m % 5 else rest[m // 5]
                other = np.uint32(other & REST_BITS)
            else:
                other = np.uint32(np.uint32(rest[0] & SPARE_SIGN) << np.uint32(1))
                other |= np.uint32(np.uint32(rest[1] >> np.uint32(14)) & LOWEST)
                other |= np.uint32(np.uint32(rest[2] >> np.uint32(13)) & SECOND)
            pairs[m] = np.uint32(word & BYTE_BITS) | other
        _scatter_pairs(pairs, along_tokens, group, codes)


@njit(cache=True)
def _gather_pairs(
    codes: NDArray[np.uint16], along_tokens: bool, group: int, pairs: NDArray[np.uint32]
) -> None:
    tokens, channels = codes.shape
    if along_tokens:
        channel, first = group // (tokens // UNIT_TOKENS), group % (tokens // UNIT_TOKENS) * UNIT_TOKENS
        for m in range(16):
            high = np.uint32(codes[first + 16 + m, channel])
            pairs[m] = np.uint32(codes[first + m, channel]) | np.uint32(high << np.uint32(16))
        return
    row, column = group // (channels // UNIT_CHANNELS) * 2, group % (channels // UNIT_CHANNELS) * 4
    for m in range(16):
        channel = m // 4 * (channels // 4) + column + (m & 2)
        high = np.uint32(codes[row + m % 2, channel + 1])
        pairs[m] = np.uint32(codes[row + m % 2, channel]) | np.uint32(high << np.uint32(16))


@njit(cache=True)
def _scatter_pairs(
    pairs: NDArray[np.uint32], along_tokens: bool, group: int, codes: NDArray[np.uint16]
) -> None:
    tokens, channels = codes.shape
    if along_tokens:
        channel, first = group // (tokens // UNIT_TOKENS), group % (tokens // UNIT_TOKENS) * UNIT_TOKENS
        for m in range(16):
            codes[first + m, channel] = np.uint16(pairs[m])
            codes[first + 16 + m, channel] = np.uint16(pairs[m] >> np.uint32(16))
        return
    row, column = group // (channels // UNIT_CHANNELS) * 2, group % (channels // UNIT_CHANNELS) * 4
    for m in range(16):
        channel = m // 4 * (channels // 4) + column + (m & 2)
        codes[row + m % 2, channel] = np.uint16(pairs[m])
        codes[row + m % 2, channel + 1] = np.uint16(pairs[m] >> np.uint32(16))


@njit(cache=True)
def _rotl(word: np.uint32, bits: int) -> np.uint32:
    return np.uint32(np.uint32(word << np.uint32(bits)) | np.uint32(word >> np.uint32(32 - bits)))
