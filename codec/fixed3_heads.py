"""One head of a `fixed3` page: its words, bases, ends and list from patterns, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from kvfold.codec.fixed3_words import (
    LARGEST_BASE,
    SMALLEST_BASE,
    choose_bases,
    code_row,
    is_listed,
    listed_pattern,
    pack_words,
    plain_pattern,
    unpack_words,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW_ELEMENTS = 256  # at most: a position has 8 bits
GROUP_ROWS = 32
MOST_IN_GROUP = 255  # an end has 8 bits


@njit(cache=True)
def _place(row: int, position: int, per_row: int, along_tokens: bool) -> tuple[int, int]:
    """Token and channel of an entry."""
    if along_tokens:
        token = (position >> 3 & 7) << 5 | (position >> 1 & 1) << 4 | position >> 6 << 2
        return token | (position >> 2 & 1) << 1 | position & 1, row
    return row * per_row + position % per_row, position // per_row


@njit(cache=True)
def encode_head(
    block: NDArray[np.uint16],
    codes: NDArray[np.uint16],
    per_row: int,
    along_tokens: bool,
    record: NDArray[np.uint8],
    room: NDArray[np.uint8],
) -> int:
    """Write one head's main part, which is all zeros, and its list; the list's bytes, or -1 if it is too long."""
    block_tokens, head_dim = block.shape
    bases = np.empty(head_dim, np.uint16)
    choose_bases(block, bases)
    words = 11 * codes.size // 8
    for channel in range(head_dim):
        record[words + channel] = np.uint8(bases[channel] >> 7)
    exceptions = 0
    for token in range(block_tokens):
        exceptions += code_row(block[token], bases, codes[token])
    pack_words(codes, along_tokens, record[:words].view(np.uint32))
    if exceptions > len(room) // 2:
        return -1
    rows = head_dim if along_tokens else -(-block_tokens // per_row)
    count = first = 0
    for row in range(rows):
        if row % GROUP_ROWS == 0:
            first = count
        for position in range(ROW_ELEMENTS):
            token, channel = _place(row, position, per_row, along_tokens)
            if token < block_tokens and channel < head_dim:
                pattern = block[token, channel]
                if is_listed(pattern, bases[channel]):
                    room[2 * count] = np.uint8(pattern >> 8)
                    room[2 * count + 1] = np.uint8(position)
                    count += 1
        if count - first > MOST_IN_GROUP:
            return -1
        record[words + head_dim + row] = np.uint8(count - first)
    used = 2 * count
    room[used : used + -used % 16] = 0
    return used


@njit(cache=True)
def decode_head(
    record: NDArray[np.uint8],
    entries: NDArray[np.uint8],
    codes: NDArray[np.uint16],
    per_row: int,
    along_tokens: bool,
    block: NDArray[np.uint16],
) -> int:
    """Fill one head's block; the bytes of its list, or -1 if the head is corrupt."""
    block_tokens, head_dim = block.shape
    words = 11 * codes.size // 8
    bases = record[words : words + head_dim]
    ends = record[words + head_dim :]
    for channel in range(head_dim):
        if bases[channel] < SMALLEST_BASE or bases[channel] > LARGEST_BASE:
            return -1
    unpack_words(record[:words].view(np.uint32), along_tokens, codes)
    for token in range(codes.shape[0]):
        for channel in range(codes.shape[1]):
            code = codes[token, channel]
            if token < block_tokens and channel < head_dim:
                block[token, channel] = plain_pattern(code, np.uint16(bases[channel]) << np.uint16(7))
            elif code != 0:
                return -1
    rows = head_dim if along_tokens else -(-block_tokens // per_row)
    count = before = 0
    for row in range(len(ends)):
        if row % GROUP_ROWS == 0:
            before = 0
        if row >= rows:
            if ends[row] != 0:
                return -1
            continue
        here = int(ends[row]) - before
        before = int(ends[row])
        if here < 0 or 2 * (count + here) > len(entries):
            return -1
        last = -1
        for entry in range(count, count + here):
            position = int(entries[2 * entry + 1])
            token, channel = _place(row, position, per_row, along_tokens)
            if position <= last or token >= block_tokens or channel >= head_dim:
                return -1
            code = codes[token, channel]
            pattern = listed_pattern(code, int(entries[2 * entry]))
            if code & 0x8003 or not is_listed(pattern, np.uint16(bases[channel]) << np.uint16(7)):
                return -1
            block[token, channel] = pattern
            last = position
        count += here
    used = 2 * count
    for byte in range(used, used + -used % 16):
        if byte >= len(entries) or entries[byte] != 0:
            return -1
    return used
