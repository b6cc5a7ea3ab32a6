"""The format `fixed4`: four exponent bits at fixed places, a base per block and channel, no calibration.

An element is a *code* of 12 bits kept in the places of a BF16 pattern: sign in bit 15, offset in bits 10..7,
mantissa in bits 6..0. Its exponent is ``base + offset`` for offsets 1..15; offset 0 is an exact zero of either
sign (mantissa 0). The base of a channel in a block is ``max(0, top - 15)`` with ``top`` the largest finite
exponent (0..254) among its tokens, so nothing finite lies above the window. What lies below it, subnormals,
infinities and NaNs are *exceptions*: their code is 0x0000 and the pattern stands in a list, by position.
A page any of whose heads has more exceptions than its list holds is not coded at all: it is a raw page.

Sizes: ``D = head_dim``, a multiple of 8, at most 256; ``B = block_tokens``, a multiple of 16, at most 256;
``U = B / 8`` units of eight tokens, token ``t = 8 u + j``; ``CAP = 16 ceil(D / 128)`` exceptions per head.
A page is one record per head, all of one size, so every place in it can be computed. Little-endian:

==========  ========  ===============================================================================
part        bytes     content
==========  ========  ===============================================================================
words       1.5 B D   uint32, three planes of ``U x D`` words: byte plane 0, byte plane 1, nibble plane
exceptions  4 CAP     uint32 each: token in bits 31..24, channel 23..16, BF16 pattern 15..0; ascending,
                      unused entries zero (OR-ing an entry into its element's pattern is always right)
bases       D         uint8, per channel, 0..239
count       4         uint32, exceptions used
padding     0..15     zero, up to a multiple of 16 bytes
==========  ========  ===============================================================================

A raw page has ``2 x kv_heads x B x D`` bytes: patterns ``[kv_head, block_token, head_dim]`` as in `bf16`. No
coded page has that size, so the size tells them apart.

**Words.** Two elements that tensor cores take in one register form a *pair*: ``low | high << 16`` of their
codes. ``kind="k"`` pairs channels ``(2 c, 2 c + 1)`` of one token, ``kind="v"`` tokens ``(16 x + j,
16 x + 8 + j)`` of one channel (units 2 x and 2 x + 1). The eight pairs ``P0..P7`` that differ in j only go into
six words; with ``rotl`` a 32-bit rotation to the left:

    byte word i    (i = 0..3)   (P[2i] & 0x07F807F8) | rotl(P[2i+1] & 0x07F807F8, 24)
    nibble word i  (i = 0, 1)   OR over q = 0..3 of rotl(P[4i+q] & 0x80078007, 4 q)

so that ``P[j] = (rotl(byte word j // 2, 8 (j % 2)) & 0x07F807F8) | (rotl(nibble word j // 4, -4 (j % 4)) &
0x80078007)``. Byte plane 0 holds byte words 0 and 1 side by side, byte plane 1 byte words 2 and 3, the nibble
plane nibble words 0 and 1. Their order in the page:

    kind "k":  word [unit u][plane][2 c + (0 or 1)]      U x 3 x D: an operand-B tile is [D, U] per j
    kind "v":  word [plane][channel d][2 x + (0 or 1)]   3 x D x U: an operand-B tile is [U, D] per j

Code times 2^base is the value: ``2 ** (offset - 127) * 1.mantissa * 2 ** base``, exact wherever the product is
normal, so that a kernel may scale the other operand of a product instead of adding bases.

`Packed.axis` tells the kinds apart: ``channel`` for k, ``token`` for v. Encoding is deterministic: every byte
above follows from the patterns, and another encoder must give the same. The words are read and written in
the order of this machine, which must be little-endian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numba import njit

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.fixed4_words import (
    STRIPE_TOKENS,
    code_rows,
    decode_rows,
    largest_exponents,
    pack_channel_pairs,
    pack_token_pairs,
    unpack_channel_pairs,
    unpack_token_pairs,
)
from kvfold.codec.packed import Axis, Packed, check_page_starts, packed_from
from kvfold.codec.pages import PAGE_ALIGN_BYTES, check_patterns, check_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

Kind = Literal["k", "v"]
AXIS_OF: dict[Kind, Axis] = {"k": "channel", "v": "token"}

CHANNEL_MULTIPLE = 8
LARGEST_BLOCK_TOKENS = 256  # a token has 8 bits in the exception list
LARGEST_HEAD_DIM = 256
LARGEST_OFFSET = 15
LARGEST_BASE = 254 - LARGEST_OFFSET


def exception_capacity(head_dim: int) -> int:
    """Exceptions that one head of a page can list: one operand tile of 16 per 128 channels."""
    return 16 * -(-head_dim // 128)


def head_record_bytes(block_tokens: int, head_dim: int) -> int:
    """Bytes of one head in a coded page."""
    used = block_tokens * head_dim * 3 // 2 + 4 * exception_capacity(head_dim) + head_dim + 4
    return used + -used % PAGE_ALIGN_BYTES


def coded_page_bytes(kv_heads: int, block_tokens: int, head_dim: int) -> int:
    """Bytes of a coded page: all of them have one size."""
    return kv_heads * head_record_bytes(block_tokens, head_dim)


def encode(
    patterns: NDArray[np.uint16], windows: Windows | None, block_tokens: int, kind: Kind = "k"
) -> Packed:
    """Pack BF16 patterns ``uint16 [kv_head, token, head_dim]``; windows are not used, bases are of the block.

    Tokens after the last full block stay raw, and so does a page with too many exceptions.
    Raises ValueError when block_tokens is not a multiple of 16 up to 256, head_dim not a multiple of 8 up to
    256, or kind neither k nor v.
    """
    if kind not in AXIS_OF:
        raise ValueError(f"kind must be 'k' or 'v', got {kind!r}")
    check_patterns(patterns, block_tokens, CHANNEL_MULTIPLE)
    kv_heads, tokens, head_dim = patterns.shape
    _check_sizes((kv_heads, tokens, head_dim), block_tokens)
    page_count = tokens // block_tokens
    coded_bytes = coded_page_bytes(kv_heads, block_tokens, head_dim)
    room = np.empty(page_count * max(coded_bytes, 2 * kv_heads * block_tokens * head_dim), np.uint8)
    page_starts = np.zeros(page_count + 1, np.int64)
    capacity = exception_capacity(head_dim)
    contiguous = np.ascontiguousarray(patterns)
    _encode_pages(contiguous, block_tokens, capacity, kind == "v", coded_bytes, room, page_starts)
    return packed_from(patterns, block_tokens, room, page_starts, axis=AXIS_OF[kind])


def decode(packed: Packed) -> NDArray[np.uint16]:
    """Rebuild the patterns ``uint16 [kv_head, token, head_dim]``, bit for bit.

    Raises CorruptDataError, naming the page, when sizes, counts, bases or exception lists cannot have come
    from the encoder; nothing outside a page is read.
    """
    kv_heads, tokens, head_dim = packed.shape
    _check_sizes(packed.shape, packed.block_tokens)
    is_raw = _raw_pages(packed)
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    bad_page = _decode_pages(
        np.ascontiguousarray(packed.pages),
        packed.page_starts,
        is_raw,
        packed.block_tokens,
        exception_capacity(head_dim),
        packed.axis == "token",
        patterns,
    )
    if bad_page >= 0:
        raise CorruptDataError(
            f"page {bad_page}: bases must be at most {LARGEST_BASE}, exceptions at most "
            f"{exception_capacity(head_dim)} per head, ascending, inside the block and coded as zero, "
            f"and unused bytes zero"
        )
    return patterns


def mode_counts(packed: Packed) -> dict[str, int]:
    """Elements that are coded, listed as exceptions, or in raw pages."""
    is_raw = _raw_pages(packed)
    raw = int(np.count_nonzero(is_raw)) * packed.page_elements
    listed = int(_exception_counts(packed, is_raw).sum())
    coded = packed.page_count * packed.page_elements - raw - listed
    return {"4-bit": coded, "listed": listed, "raw": raw}


def count_exceptions(patterns: NDArray[np.uint16], packed: Packed) -> int:
    """Elements in exception lists; those of raw pages are in no list and not counted."""
    return int(_exception_counts(packed, _raw_pages(packed)).sum())


def _exception_counts(packed: Packed, is_raw: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Exceptions used of every head of the coded pages ``uint32 [coded page, kv_head]``."""
    kv_heads, _, head_dim = packed.shape
    record_bytes = head_record_bytes(packed.block_tokens, head_dim)
    place = packed.block_tokens * head_dim * 3 // 2 + 4 * exception_capacity(head_dim) + head_dim
    first = packed.page_starts[:-1][~is_raw, None, None]  # [coded page, 1, 1]
    heads = np.arange(kv_heads)[:, None] * record_bytes  # [kv_head, 1]
    return packed.pages[first + heads + (place + np.arange(4))].view("<u4")[..., 0]


def _check_sizes(shape: tuple[int, int, int], block_tokens: int) -> None:
    check_sizes(shape, block_tokens, CHANNEL_MULTIPLE)
    if block_tokens % STRIPE_TOKENS or block_tokens > LARGEST_BLOCK_TOKENS:
        raise ValueError(
            f"block_tokens must be a multiple of {STRIPE_TOKENS} up to {LARGEST_BLOCK_TOKENS}, got {block_tokens}"
        )
    if shape[2] > LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {LARGEST_HEAD_DIM}, got {shape[2]}")


def _raw_pages(packed: Packed) -> NDArray[np.bool_]:
    """Which pages are raw, by their size; CorruptDataError for a size that no page has."""
    kv_heads, _, head_dim = packed.shape
    coded_bytes = coded_page_bytes(kv_heads, packed.block_tokens, head_dim)
    raw_bytes = 2 * packed.page_elements
    check_page_starts(packed, min(coded_bytes, raw_bytes), PAGE_ALIGN_BYTES)
    page_bytes = packed.page_bytes
    is_raw = page_bytes == raw_bytes
    if not (is_raw | (page_bytes == coded_bytes)).all():
        raise CorruptDataError(
            f"a page must have {coded_bytes} bytes (coded) or {raw_bytes} (raw), "
            f"got {page_bytes[~is_raw & (page_bytes != coded_bytes)][:5].tolist()}"
        )
    return is_raw


@njit(cache=True)
def _encode_pages(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    capacity: int,
    along_tokens: bool,
    coded_bytes: int,
    room: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
) -> None:
    kv_heads = len(patterns)
    head_bytes = coded_bytes // kv_heads
    for page in range(len(page_starts) - 1):
        data = room[page_starts[page] :]
        data[:coded_bytes] = 0
        end = coded_bytes
        for head in range(kv_heads):
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            record = data[head * head_bytes : (head + 1) * head_bytes]
            if _encode_head(block, capacity, along_tokens, record) > capacity:
                end = 2 * kv_heads * block.size
                break
        if end != coded_bytes:
            for head in range(kv_heads):
                block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
                place = data[head * 2 * block.size : (head + 1) * 2 * block.size]
                place[:] = block.reshape(block.size).view(np.uint8)
        page_starts[page + 1] = page_starts[page] + end


@njit(cache=True)
def _encode_head(
    block: NDArray[np.uint16], capacity: int, along_tokens: bool, record: NDArray[np.uint8]
) -> int:
    """Write one head's record, which is all zeros; how many exceptions it has, also if those are too many."""
    block_tokens, head_dim = block.shape
    word_bytes = block_tokens * head_dim * 3 // 2
    base_place = word_bytes + 4 * capacity
    base = np.empty(head_dim, np.uint16)
    codes = np.empty((STRIPE_TOKENS, head_dim), np.uint16)
    largest_exponents(block, base)
    for channel in range(head_dim):
        base[channel] = max(int(base[channel] >> 7) - LARGEST_OFFSET, 0) << 7
        record[base_place + channel] = np.uint8(base[channel] >> 7)
    words = record[:word_bytes].view(np.uint64)
    listed = record[word_bytes:base_place].view(np.uint32)
    count = 0
    for stripe in range(block_tokens // STRIPE_TOKENS):
        rows = block[stripe * STRIPE_TOKENS : (stripe + 1) * STRIPE_TOKENS]
        if code_rows(rows, base, codes) > 0:
            count = _list_exceptions(rows, codes, stripe * STRIPE_TOKENS, count, listed)
        if along_tokens:
            pack_token_pairs(codes, stripe, block_tokens // STRIPE_TOKENS, words)
        else:
            pack_channel_pairs(codes.view(np.uint32), stripe, words)
    record[base_place + head_dim : base_place + head_dim + 4].view(np.uint32)[0] = np.uint32(count)
    return count


@njit(cache=True)
def _list_exceptions(
    rows: NDArray[np.uint16],
    codes: NDArray[np.uint16],
    first_token: int,
    count: int,
    listed: NDArray[np.uint32],
) -> int:
    """Append the elements whose code was lost; the count may pass the list's end, but nothing is written there."""
    tokens, head_dim = rows.shape
    for token in range(tokens):
        for channel in range(head_dim):
            if codes[token, channel] == 0 and rows[token, channel] != 0:
                if count < len(listed):
                    place = (first_token + token) << 24 | channel << 16
                    listed[count] = np.uint32(place | np.int64(rows[token, channel]))
                count += 1
    return count


@njit(cache=True)
def _decode_pages(
    pages: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    is_raw: NDArray[np.bool_],
    block_tokens: int,
    capacity: int,
    along_tokens: bool,
    patterns: NDArray[np.uint16],
) -> int:
    """Fill ``patterns``; the number of the first page that is corrupt, or -1."""
    kv_heads, _, head_dim = patterns.shape
    word_bytes = block_tokens * head_dim * 3 // 2
    base_place = word_bytes + 4 * capacity
    bases = np.empty(head_dim, np.uint16)
    codes = np.empty((STRIPE_TOKENS, head_dim), np.uint16)
    for page in range(len(is_raw)):
        data = pages[page_starts[page] : page_starts[page + 1]]
        head_bytes = len(data) // kv_heads
        for head in range(kv_heads):
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            record = data[head * head_bytes : (head + 1) * head_bytes]
            if is_raw[page]:
                block[:] = record.view(np.uint16).reshape(block.shape)
                continue
            largest = np.uint8(0)
            for channel in range(head_dim):
                base = record[base_place + channel]
                largest = max(largest, base)
                bases[channel] = np.uint16(base) << np.uint16(7)
            if largest > LARGEST_BASE:
                return page
            words = record[:word_bytes].view(np.uint64)
            for stripe in range(block_tokens // STRIPE_TOKENS):
                if along_tokens:
                    unpack_token_pairs(words, stripe, block_tokens // STRIPE_TOKENS, codes)
                else:
                    unpack_channel_pairs(words, stripe, codes.view(np.uint32))
                decode_rows(codes, bases, block[stripe * STRIPE_TOKENS : (stripe + 1) * STRIPE_TOKENS])
            count = record[base_place + head_dim : base_place + head_dim + 4].view(np.uint32)[0]
            listed = record[word_bytes:base_place].view(np.uint32)
            if not _put_exceptions(listed, int(count), block):
                return page
            for byte in range(base_place + head_dim + 4, head_bytes):
                if record[byte] != 0:
                    return page
    return -1


@njit(cache=True)
def _put_exceptions(listed: NDArray[np.uint32], count: int, block: NDArray[np.uint16]) -> bool:
    """OR the exceptions into their places; whether the list is one that the encoder writes."""
    tokens, head_dim = block.shape
    if count > len(listed):
        return False
    last = np.int64(-1)
    for entry in range(len(listed)):
        word = np.int64(listed[entry])
        if entry >= count:
            if word != 0:
                return False
            continue
        token, channel, pattern = word >> 24, (word >> 16) & 0xFF, word & 0xFFFF
        if word >> 16 <= last or token >= tokens or channel >= head_dim or block[token, channel] != 0:
            return False
        last = word >> 16
        block[token, channel] = np.uint16(pattern)
    return True
