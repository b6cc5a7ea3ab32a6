"""The format `fixed3`: three exponent bits at fixed places, a base per block and channel, short lists.

An element is a *code* of 11 bits kept in the places of a BF16 pattern: sign in bit 15, offset in bits 9..7,
mantissa in bits 6..0. Its exponent is ``base + offset``. The base of a channel in a block is that of the better
of two windows of eight exponents: the one that ends at the largest finite exponent among the channel's tokens
(0..254), and the one below it, taken if it covers more tokens; at least 1. Whatever has another exponent, zeros
and subnormals, infinities and NaNs included, is an *exception*: its code is the lower byte of its pattern, moved
to bits 9..2, and the upper byte stands in a list. So an exception costs 16 bits more, and a kernel can add what it
is and subtract what its code says: sums are linear.

Lists go by *row*, the 256 elements or fewer that one thread corrects: for ``kind="k"`` so many consecutive tokens
as ``P = 2 ** floor(log2(256 / D))``, for ``kind="v"`` one channel. Entries of a row ascend by position:

    kind "k":  position = channel P + token % P
    kind "v":  position = (j // 4) 64 + x 8 + (j // 2 % 2) 4 + half 2 + j % 2, for token 32 x + 16 half + j

A page in which some 32 rows of a head (0..31, 32..63, ...) have more than 255 exceptions is not coded at all: it
is a raw page.

Sizes: ``D = head_dim``, a multiple of 8, at most 256; ``B = block_tokens``, at most 256; ``T``, B up to a multiple
of 32, and ``C``, D up to a multiple of 16 (codes of what is not there are zero); ``R = max(D, T / P)`` rows.
Little-endian:

=======  ===========  ====================================================================================
part     bytes        content
=======  ===========  ====================================================================================
mains    of each head, one after another:
words    11/8 T C     uint32 ``[plane 0..3][group][2]``, ``[group][2]``, ``[group]``
bases    D            uint8, per channel, 1..247
ends     R            uint8, per row, where its entries end, counted from the first of its 32 rows
padding  0..15        zero, up to a multiple of 16 bytes
lists    of each head, one after another:
entries  2 x count    uint16: position in bits 15..8, upper byte in bits 7..0
padding  0..15        zero, up to a multiple of 16 bytes
=======  ===========  ====================================================================================

A raw page has ``2 x kv_heads x B x D`` bytes: patterns ``[kv_head, block_token, head_dim]`` as in `bf16`. A coded
page that would have that size or more is raw, so the size tells them apart.

**Words.** Two elements that tensor cores take in one register form a *pair*: ``low | high << 16`` of their
codes. Sixteen pairs ``P0..P15`` form a *group* of eleven words; with ``rotl`` a 32-bit rotation to the left:

    byte word i   (i = 0..7)  (P[2i] & 0x03FC03FC) | rotl(P[2i+1] & 0x03FC03FC, 8)      plane i // 2, place i % 2
    rest word i   (i = 0..2)  OR over q = 0..4 of rotl(P[5i+q] & 0x80038003, 3 q), and of P15:
                  its bit 15 (31) in bit 14 (30) of rest word 0, bit 0 (16) in that of word 1, bit 1 (17) of word 2

Rest words 0 and 1 of all groups lie side by side, rest words 2 after them. The groups:

    kind "k":  group r C/16 + c:  P[4a+2b+j] = tokens 2 r + j, channels a C/4 + 4 c + 2 b and the next
    kind "v":  group d T/32 + x:  P[j] = channel d, tokens 32 x + j and 32 x + 16 + j

`Packed.axis` tells the kinds apart: ``channel`` for k, ``token`` for v. Encoding is deterministic: every byte
above follows from the patterns. Words are read and written in this machine's order, which must be little-endian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.fixed3_heads import GROUP_ROWS, ROW_ELEMENTS, decode_head, encode_head
from kvfold.codec.fixed3_words import LARGEST_BASE, SMALLEST_BASE, UNIT_CHANNELS, UNIT_TOKENS
from kvfold.codec.fixed4 import AXIS_OF, Kind
from kvfold.codec.packed import Packed, check_page_starts, packed_from
from kvfold.codec.pages import PAGE_ALIGN_BYTES, aligned, check_patterns, check_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

CHANNEL_MULTIPLE = 8
LARGEST_BLOCK_TOKENS = 256  # a position has 8 bits
LARGEST_HEAD_DIM = 256


def padded_tokens(block_tokens: int) -> int:
    """Tokens of a block up to whole units."""
    return block_tokens + -block_tokens % UNIT_TOKENS


def padded_channels(head_dim: int) -> int:
    """Channels of a head up to whole units."""
    return head_dim + -head_dim % UNIT_CHANNELS


def row_tokens(head_dim: int) -> int:
    """Tokens of one row of kind k."""
    return 1 << (ROW_ELEMENTS // head_dim).bit_length() - 1


def row_count(block_tokens: int, head_dim: int) -> int:
    """Rows that have an end in a head's main part."""
    return max(head_dim, -(-padded_tokens(block_tokens) // row_tokens(head_dim)))


def word_bytes(block_tokens: int, head_dim: int) -> int:
    """Bytes of a head's words."""
    return 11 * padded_tokens(block_tokens) * padded_channels(head_dim) // 8


def head_main_bytes(block_tokens: int, head_dim: int) -> int:
    """Bytes of a head's words, bases and ends."""
    rows = row_count(block_tokens, head_dim)
    return aligned(word_bytes(block_tokens, head_dim) + head_dim + rows)


def main_bytes(kv_heads: int, block_tokens: int, head_dim: int) -> int:
    """Bytes of a page ahead of its lists, the same for all coded pages."""
    return kv_heads * head_main_bytes(block_tokens, head_dim)


def encode(
    patterns: NDArray[np.uint16], windows: Windows | None, block_tokens: int, kind: Kind = "k"
) -> Packed:
    """Pack BF16 patterns ``uint16 [kv_head, token, head_dim]``; windows are not used, bases are of the block.

    Tokens after the last full block stay raw, and so does a page with too many exceptions.
    Raises ValueError when block_tokens is above 256, head_dim not a multiple of 8 up to 256, or kind neither k
    nor v.
    """
    if kind not in AXIS_OF:
        raise ValueError(f"kind must be 'k' or 'v', got {kind!r}")
    check_patterns(patterns, block_tokens, CHANNEL_MULTIPLE)
    kv_heads, tokens, head_dim = patterns.shape
    _check_sizes((kv_heads, tokens, head_dim), block_tokens)
    page_count = tokens // block_tokens
    main = head_main_bytes(block_tokens, head_dim)
    raw = 2 * kv_heads * block_tokens * head_dim
    # A list has at most 510 bytes per 32 rows before its page is raw.
    largest = max(kv_heads * (main + 16 * row_count(block_tokens, head_dim) + 512), raw)
    room = np.empty(page_count * largest, np.uint8)
    page_starts = np.zeros(page_count + 1, np.int64)
    _encode_pages(
        np.ascontiguousarray(patterns),
        block_tokens,
        (padded_tokens(block_tokens), padded_channels(head_dim)),
        row_tokens(head_dim),
        kind == "v",
        main,
        room,
        page_starts,
    )
    return packed_from(patterns, block_tokens, room, page_starts, axis=AXIS_OF[kind])


def decode(packed: Packed) -> NDArray[np.uint16]:
    """Rebuild the patterns ``uint16 [kv_head, token, head_dim]``, bit for bit.

    Raises CorruptDataError, naming the page, when sizes, bases, ends or entries cannot have come from the
    encoder; nothing outside a page is read.
    """
    return _decode(packed)[0]


def mode_counts(packed: Packed) -> dict[str, int]:
    """Elements that are coded, listed as exceptions, or in raw pages."""
    _, listed, is_raw = _decode(packed)
    raw = int(np.count_nonzero(is_raw)) * packed.page_elements
    coded = packed.page_count * packed.page_elements - raw - listed
    return {"3-bit": coded, "listed": listed, "raw": raw}


def count_exceptions(patterns: NDArray[np.uint16], packed: Packed) -> int:
    """Elements in lists; those of raw pages are in no list and not counted."""
    return _decode(packed)[1]


def _decode(packed: Packed) -> tuple[NDArray[np.uint16], int, NDArray[np.bool_]]:
    """Patterns, how many elements are listed, and which pages are raw."""
    kv_heads, tokens, head_dim = packed.shape
    _check_sizes(packed.shape, packed.block_tokens)
    main = head_main_bytes(packed.block_tokens, head_dim)
    raw = 2 * packed.page_elements
    check_page_starts(packed, min(kv_heads * main, raw), PAGE_ALIGN_BYTES)
    is_raw = packed.page_bytes == raw
    if (bad := ~is_raw & (packed.page_bytes < kv_heads * main)).any():
        raise CorruptDataError(
            f"a page must have {raw} bytes (raw) or at least {kv_heads * main} (coded), "
            f"got {packed.page_bytes[bad][:5].tolist()}"
        )
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    bad_page, listed = _decode_pages(
        np.ascontiguousarray(packed.pages),
        packed.page_starts,
        is_raw,
        packed.block_tokens,
        (padded_tokens(packed.block_tokens), padded_channels(head_dim)),
        row_tokens(head_dim),
        packed.axis == "token",
        main,
        patterns,
    )
    if bad_page >= 0:
        raise CorruptDataError(
            f"page {bad_page}: bases must be {SMALLEST_BASE} to {LARGEST_BASE}, ends ascend in each {GROUP_ROWS} "
            f"rows, entries ascend in a row, lie inside the block and outside the window, and fill the page"
        )
    return patterns, listed, is_raw


def _check_sizes(shape: tuple[int, int, int], block_tokens: int) -> None:
    check_sizes(shape, block_tokens, CHANNEL_MULTIPLE)
    if block_tokens > LARGEST_BLOCK_TOKENS:
        raise ValueError(f"block_tokens must be at most {LARGEST_BLOCK_TOKENS}, got {block_tokens}")
    if shape[2] > LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {LARGEST_HEAD_DIM}, got {shape[2]}")


@njit(cache=True)
def _encode_pages(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    padded: tuple[int, int],
    per_row: int,
    along_tokens: bool,
    main: int,
    room: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
) -> None:
    kv_heads, _, head_dim = patterns.shape
    raw = 2 * kv_heads * block_tokens * head_dim
    codes = np.zeros(padded, np.uint16)
    for page in range(len(page_starts) - 1):
        data = room[page_starts[page] :]
        end = kv_heads * main
        data[:end] = 0
        for head in range(kv_heads):
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            used = encode_head(
                block, codes, per_row, along_tokens, data[head * main : (head + 1) * main], data[end:]
            )
            end += used + -used % 16
            if used < 0 or end >= raw:
                end = raw
                break
        if end == raw:
            for head in range(kv_heads):
                block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
                place = data[head * 2 * block.size : (head + 1) * 2 * block.size]
                place[:] = block.reshape(block.size).view(np.uint8)
        page_starts[page + 1] = page_starts[page] + end


@njit(cache=True)
def _decode_pages(
    pages: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    is_raw: NDArray[np.bool_],
    block_tokens: int,
    padded: tuple[int, int],
    per_row: int,
    along_tokens: bool,
    main: int,
    patterns: NDArray[np.uint16],
) -> tuple[int, int]:
    """Fill ``patterns``; the number of the first page that is corrupt, or -1, and how many are listed."""
    kv_heads = len(patterns)
    codes = np.empty(padded, np.uint16)
    listed = 0
    for page in range(len(is_raw)):
        data = pages[page_starts[page] : page_starts[page + 1]]
        start = kv_heads * main
        for head in range(kv_heads):
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            if is_raw[page]:
                place = data[head * 2 * block.size : (head + 1) * 2 * block.size]
                block[:] = place.view(np.uint16).reshape(block.shape)
                continue
            record = data[head * main : (head + 1) * main]
            used = decode_head(record, data[start:], codes, per_row, along_tokens, block)
            if used < 0:
                return page, listed
            listed += used // 2
            start += used + -used % 16
        if not is_raw[page] and start != len(data):
            return page, listed
    return -1, listed
