"""The formats `tag8` and `tag32`: 3-bit codes at fixed places, a tag bit per group, a patch byte per tagged group.

The distance of an exponent from its channel's base (of the narrow window) is ``8 q + r`` modulo 256. The code
is r; q is 0 inside the window. In each group of G elements in a row (8 or 32, in the order ``[block_token,
head_dim]``) the first element whose q a patch can name gets the group's patch byte, and the group a tag: the
lane in the low log2(G) bits, above them p, which means ``q = 1`` at its highest value and ``q = -(p + 1)``
below that (p takes the smallest value that names q). Five bits of p (G = 8) name every q; three (G = 32) those
from -7 to 1. Elements that no patch names are *extra*: listed by position with their whole exponent.

A patch is found by counting tags, without a walk through the patches before it. Page layout, little-endian:

=============  =========================  ==============================================================
part           bytes                      content
=============  =========================  ==============================================================
head table     8 x kv_heads               uint32: where in the page a head's lists start; uint32: its extras
sign-mantissa  kv_heads x elements        a byte per element: bit 7 sign, bits 6..0 mantissa
codes          kv_heads x elements x 3/8  eight codes are 3 bytes, one integer: lane i at bit 3 i
tags           ceil(groups / 8) per head  group g of a head: byte g // 8, bit g % 8
padding        0..15                      zero; here the main plane ends, at a multiple of 16 bytes
lists          of one head after another  patch bytes; then the extras: their positions in the head, uint16,
                                          ascending; then their exponents, a byte each
padding        0..15                      zero, up to a multiple of 16 bytes
=============  =========================  ==============================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Packed, check_page_starts, packed_from
from kvfold.codec.pages import PAGE_ALIGN_BYTES, aligned, check_patterns, check_sizes, check_windows
from kvfold.codec.swar import (
    join_patterns,
    load_codes,
    load_uint32,
    split_patterns,
    store_codes,
    store_uint32,
)
from kvfold.codec.windows import NARROW_WIDTH, count_outside

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

CHANNEL_MULTIPLE = 8
CODE_BITS = 3
LARGEST_HEAD_ELEMENTS = 1 << 16  # a position is 16 bits
TABLE_BYTES = 8


def main_bytes(kv_heads: int, block_tokens: int, head_dim: int, group: int) -> int:
    """Bytes of a page ahead of its lists, the same for all pages."""
    elements = block_tokens * head_dim
    return aligned(
        kv_heads * (TABLE_BYTES + elements + elements // 8 * CODE_BITS + _tag_bytes(elements, group))
    )


def encode(patterns: NDArray[np.uint16], windows: Windows, block_tokens: int, group: int) -> Packed:
    """Pack BF16 patterns ``uint16 [kv_head, token, head_dim]``; tokens after the last full block stay raw.

    Every page is packed, also one that grows by it (up to 35 bits per element); whether it is kept packed or
    raw is decided by its slot or pool. Raises ValueError when head_dim is no multiple of 8, a head has more
    than 65,536 elements in a block or not whole groups, and when the windows are not ``[kv_head, head_dim]``.
    """
    check_patterns(patterns, block_tokens, CHANNEL_MULTIPLE)
    kv_heads, tokens, head_dim = patterns.shape
    elements = block_tokens * head_dim
    _check_elements(elements, group)
    page_count = tokens // block_tokens
    bases = np.tile(check_windows(windows, patterns.shape).narrow_base, (1, block_tokens))
    patterns = np.ascontiguousarray(patterns)
    main = main_bytes(kv_heads, block_tokens, head_dim, group)
    # Every element extra; memory that is not reached is never touched.
    room = np.empty(page_count * aligned(main + 4 * kv_heads * elements), np.uint8)
    page_starts = np.zeros(page_count + 1, np.int64)
    _encode_pages(patterns, block_tokens, bases, group, main, room, page_starts)
    return packed_from(patterns, block_tokens, room, page_starts, windows=windows)


def decode(packed: Packed, group: int) -> NDArray[np.uint16]:
    """Rebuild the patterns ``uint16 [kv_head, token, head_dim]``, bit for bit.

    Raises CorruptDataError when the pages cannot have come from ``encode``.
    """
    return _decode(packed, group)[0]


def mode_counts(packed: Packed, group: int) -> dict[str, int]:
    """Elements inside their window, patched, and extra."""
    patched, extra = _decode(packed, group)[1].tolist()
    inside = packed.page_count * packed.page_elements - patched - extra
    return {"3-bit": inside, "patched": patched, "extra": extra}


def count_exceptions(patterns: NDArray[np.uint16], packed: Packed) -> int:
    """Elements of ``[kv_head, token, head_dim]`` outside their channel's narrow window."""
    windows = check_windows(packed.windows, packed.shape)
    return count_outside(patterns, windows.narrow_base, NARROW_WIDTH)


def _check_elements(elements: int, group: int) -> None:
    if elements > LARGEST_HEAD_ELEMENTS or elements % group:
        raise ValueError(
            f"block_tokens x head_dim must be a multiple of {group} up to {LARGEST_HEAD_ELEMENTS}, got {elements}"
        )


def _tag_bytes(head_elements: int, group: int) -> int:
    return (head_elements // group + 7) // 8


def _decode(packed: Packed, group: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    kv_heads, tokens, head_dim = packed.shape
    check_sizes(packed.shape, packed.block_tokens, CHANNEL_MULTIPLE)
    _check_elements(packed.block_tokens * head_dim, group)
    bases = np.tile(check_windows(packed.windows, packed.shape).narrow_base, (1, packed.block_tokens))
    main = main_bytes(kv_heads, packed.block_tokens, head_dim, group)
    check_page_starts(packed, main, PAGE_ALIGN_BYTES)
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    counts = np.zeros(2, np.int64)
    pages = np.ascontiguousarray(packed.pages)
    bad_page = _decode_pages(
        pages, packed.page_starts, packed.block_tokens, bases, group, main, patterns, counts
    )
    if bad_page >= 0:
        raise CorruptDataError(
            f"page {bad_page}: the patches that the tags ask for and the extras of all heads must fill the page "
            f"in the order of its head table, positions ascending"
        )
    return patterns, counts


@njit(cache=True)
def _encode_pages(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    bases: NDArray[np.uint8],
    group: int,
    main: int,
    room: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
) -> None:
    kv_heads, _, head_dim = patterns.shape
    elements = block_tokens * head_dim
    code_bytes, tag_bytes = elements // 8 * CODE_BITS, (elements // group + 7) // 8
    exponent, distance = np.empty(elements, np.uint8), np.empty(elements, np.uint8)
    extra = np.empty(elements, np.int64)
    distances = distance.view(np.uint64)
    for page in range(len(page_starts) - 1):
        data = room[page_starts[page] :]
        data[:main] = 0
        place = main
        for head in range(kv_heads):
            flat = patterns[head, page * block_tokens : (page + 1) * block_tokens].reshape(elements)
            signs = TABLE_BYTES * kv_heads + head * elements
            split_patterns(flat, data[signs : signs + elements], exponent)
            for element in range(elements):
                distance[element] = np.uint8(exponent[element] - bases[head, element])
            first = kv_heads * (TABLE_BYTES + elements) + head * code_bytes
            codes = distances & np.uint64(0x0707070707070707)
            store_codes(codes, CODE_BITS, data[first : first + code_bytes])
            tags = data[kv_heads * (TABLE_BYTES + elements + code_bytes) + head * tag_bytes :]
            start = place
            place, count = _write_patches(distance, group, tags, data, place, extra)
            store_uint32(start, data, TABLE_BYTES * head)
            store_uint32(count, data, TABLE_BYTES * head + 4)
            for entry in range(count):
                element = extra[entry]
                data[place + 2 * entry] = np.uint8(element & 0xFF)
                data[place + 2 * entry + 1] = np.uint8(element >> 8)
                data[place + 2 * count + entry] = exponent[element]
            place += 3 * count
        end = (place + PAGE_ALIGN_BYTES - 1) // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
        data[place:end] = 0
        page_starts[page + 1] = page_starts[page] + end


@njit(cache=True)
def _write_patches(
    distance: NDArray[np.uint8],
    group: int,
    tags: NDArray[np.uint8],
    data: NDArray[np.uint8],
    place: int,
    extra: NDArray[np.int64],
) -> tuple[int, int]:
    """Write tags and patch bytes; where these end, and how many places ``extra`` got."""
    lane_bits = 3 if group == 8 else 5
    highest = (1 << (8 - lane_bits)) - 1  # of p
    words = distance.view(np.uint64)
    count = 0
    for number in range(len(distance) // group):
        outside = np.uint64(0)
        for octet in range(number * group // 8, (number + 1) * group // 8):
            outside |= words[octet]
        if outside & np.uint64(0xF8F8F8F8F8F8F8F8) == 0:
            continue
        patched = False
        for element in range(number * group, (number + 1) * group):
            q = int(distance[element]) >> 3
            if q == 0:
                continue
            p = 31 - q  # q = -(p + 1) modulo 32
            if p >= highest:
                p = highest if q == 1 else -1
            if patched or p < 0:
                extra[count] = element
                count += 1
            else:
                patched = True
                tags[number // 8] |= np.uint8(1 << (number % 8))
                data[place] = np.uint8(p << lane_bits | element % group)
                place += 1
    return place, count


@njit(cache=True)
def _decode_pages(
    pages: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    block_tokens: int,
    bases: NDArray[np.uint8],
    group: int,
    main: int,
    patterns: NDArray[np.uint16],
    counts: NDArray[np.int64],
) -> int:
    """Fill ``patterns``, add up patches and extras; the first page that is corrupt, or -1."""
    kv_heads, _, head_dim = patterns.shape
    elements = block_tokens * head_dim
    code_bytes, tag_bytes = elements // 8 * CODE_BITS, (elements // group + 7) // 8
    exponent = np.empty(elements, np.uint8)
    lanes = exponent.view(np.uint64)
    for page in range(len(page_starts) - 1):
        data = pages[page_starts[page] : page_starts[page + 1]]
        place = main
        for head in range(kv_heads):
            start = load_uint32(data, TABLE_BYTES * head)
            extras = load_uint32(data, TABLE_BYTES * head + 4)
            if start != place:
                return page
            first = kv_heads * (TABLE_BYTES + elements) + head * code_bytes
            load_codes(data[first : first + code_bytes], CODE_BITS, lanes)
            for element in range(elements):
                exponent[element] = np.uint8(exponent[element] + bases[head, element])
            first_tag = kv_heads * (TABLE_BYTES + elements + code_bytes) + head * tag_bytes
            place = _read_patches(data, place, data[first_tag : first_tag + tag_bytes], group, exponent)
            if place < 0 or place + 3 * extras > len(data):
                return page
            counts[0] += place - start
            counts[1] += extras
            if not _read_extras(data, place, extras, exponent):
                return page
            place += 3 * extras
            signs = TABLE_BYTES * kv_heads + head * elements
            flat = patterns[head, page * block_tokens : (page + 1) * block_tokens].reshape(elements)
            join_patterns(data[signs : signs + elements], exponent, flat)
        if len(data) - place >= PAGE_ALIGN_BYTES:
            return page
    return -1


@njit(cache=True)
def _read_patches(
    data: NDArray[np.uint8], place: int, tags: NDArray[np.uint8], group: int, exponent: NDArray[np.uint8]
) -> int:
    """Apply the patches; where they end, or -1 if that is past the page."""
    lane_bits = 3 if group == 8 else 5
    highest = (1 << (8 - lane_bits)) - 1
    groups = len(exponent) // group
    for byte in range(len(tags)):
        if tags[byte] == 0:
            continue
        for number in range(8 * byte, 8 * byte + 8):
            if not (tags[byte] >> (number % 8)) & 1:
                continue
            if place >= len(data) or number >= groups:
                return -1
            patch = int(data[place])
            p = patch >> lane_bits
            q = 1 if p == highest else -(p + 1)
            element = number * group + patch % group
            exponent[element] = np.uint8(int(exponent[element]) + 8 * q)
            place += 1
    return place


@njit(cache=True)
def _read_extras(data: NDArray[np.uint8], place: int, count: int, exponent: NDArray[np.uint8]) -> bool:
    """Apply the extras; whether their positions ascend inside the head."""
    last = -1
    for entry in range(count):
        position = int(data[place + 2 * entry]) | int(data[place + 2 * entry + 1]) << 8
        if position <= last or position >= len(exponent):
            return False
        last = position
        exponent[position] = data[place + 2 * count + entry]
    return True
