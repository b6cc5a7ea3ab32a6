"""The format `gaac`, the published design (Guo, George and Joshi, preprint of 28 October 2026).

Sign and mantissa stay raw. Eight neighbouring elements form a group with one 2-bit mode tag: 0 when every
exponent lies in its channel's narrow window (3-bit offsets from the window's base), else 1 when every one
lies in the wide window (4-bit offsets), else 2 (the 8-bit exponents themselves). Tag 3 does not occur.

Page layout, little-endian, for ``block_tokens`` tokens of all heads. Elements are counted in *group order*:
``[kv_head, block_token, head_dim]`` with groups along channels, ``[kv_head, head_dim, block_token]`` with
groups along tokens; a group is eight elements in a row.

=============  ==================================  ===================================================
part           bytes                               content
=============  ==================================  ===================================================
head table     4 x kv_heads                        uint32: where in the page a head's payload starts
sign-mantissa  kv_heads x block_tokens x head_dim  a byte per element: bit 7 sign, bits 6..0 mantissa
tags           kv_heads x ceil(groups / 4)         group g of a head: byte g // 4, bits 2 (g % 4) and up
payload        3, 4 or 8 per group                 one integer: lane i's code at bit i x (3, 4 or 8)
padding        0..15                               zero, up to a multiple of 16 bytes
=============  ==================================  ===================================================

Eight codes of w bits fill w whole bytes, so a group's payload starts at the head's start plus the sum of the
code widths before it: one prefix sum over the tags finds every group of a head, and the head table is the
only pointer. Pages start at multiples of 16 bytes, which lets a kernel use wide loads.

Two variations for studies, on the same layout: groups of 4, 16 or 32 elements, whose payload is 4, 16 or 32
codes (a group of 4 may end inside a byte, and the next one starts there; each head's payload starts at a whole
byte), and ``two_bit``, the published ablation, in which tag 3 means 2-bit offsets in the window of four and is
taken first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Axis, Packed, check_page_starts
from kvfold.codec.pages import PAGE_ALIGN_BYTES, check_patterns, check_sizes, check_windows, page_places
from kvfold.codec.swar import (
    join_patterns,
    load_uint32,
    load_word,
    split_patterns,
    spread,
    squeeze,
    store_uint32,
    store_word,
)
from kvfold.codec.windows import NARROW_WIDTH, WIDE_WIDTH, Windows, count_outside

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 8
GROUPS = (4, 8, 16, 32)
NARROW, WIDE, RAW, TWO_BIT = 0, 1, 2, 3
MODE_NAMES = ("3-bit", "4-bit", "raw", "2-bit")
# Bits of one code, and so also bytes of one payload of eight.
MODE_BITS = (3, 4, 8)
TWO_BIT_WIDTH = 4
_WIDTHS = np.array([*MODE_BITS, 2], np.int64)
# The mode of a group from what its elements miss: bit 0 the narrow window, bit 1 the wide, bit 2 the window of 4.
_MODE_OF_MISSES = np.array([*[TWO_BIT] * 4, NARROW, WIDE, NARROW, RAW], np.uint8)


def encode(
    patterns: NDArray[np.uint16],
    windows: Windows,
    block_tokens: int,
    axis: Axis = "channel",
    group: int = GROUP,
    two_bit: bool = False,
) -> Packed:
    """Pack BF16 patterns ``uint16 [kv_head, token, head_dim]``; tokens after the last full block stay raw.

    Every page is packed, also one that grows by it (up to 16.25 bits per element and the tables); whether it
    is kept packed or raw is decided by its slot.
    Raises ValueError when head_dim, or block_tokens with groups along tokens, is no multiple of 8 and of the
    group, and when the windows are not ``[kv_head, head_dim]``.
    """
    check_patterns(patterns, block_tokens, _channel_multiple(block_tokens, axis, group))
    kv_heads, tokens, head_dim = patterns.shape
    page_count = tokens // block_tokens
    head_elements = block_tokens * head_dim
    bases = _bases_in_group_order(check_windows(windows, patterns.shape), block_tokens, axis, two_bit)
    patterns = np.ascontiguousarray(patterns)

    modes = np.empty((page_count, kv_heads, head_elements // group), np.uint8)
    _choose_modes(patterns, block_tokens, axis == "token", bases, group, two_bit, modes)
    payload_bits = (_WIDTHS * group)[modes].sum(axis=-1)  # [pages, kv_heads]
    payload_bytes = (payload_bits + 7) // 8
    fixed_bytes = _fixed_bytes(kv_heads, head_elements, group)
    head_starts = fixed_bytes + np.cumsum(payload_bytes, axis=1) - payload_bytes
    page_starts = page_places(fixed_bytes + payload_bytes.sum(axis=1))

    pages = np.zeros(int(page_starts[-1]), np.uint8)
    _write_pages(
        patterns, block_tokens, axis == "token", bases, group, modes, page_starts, head_starts, pages
    )
    tail = patterns[:, page_count * block_tokens :].copy()
    return Packed(patterns.shape, block_tokens, pages, page_starts, tail, windows, axis)


def decode(packed: Packed, group: int = GROUP, two_bit: bool = False) -> NDArray[np.uint16]:
    """Rebuild the patterns ``uint16 [kv_head, token, head_dim]``, bit for bit; group and modes as packed.

    Raises CorruptDataError when the pages cannot have come from ``encode``.
    """
    kv_heads, tokens, head_dim = packed.shape
    multiple = _channel_multiple(packed.block_tokens, packed.axis, group)
    check_sizes(packed.shape, packed.block_tokens, multiple)
    windows = check_windows(packed.windows, packed.shape)
    bases = _bases_in_group_order(windows, packed.block_tokens, packed.axis, two_bit)
    fixed_bytes = _fixed_bytes(kv_heads, packed.block_tokens * head_dim, group)
    check_page_starts(packed, fixed_bytes, PAGE_ALIGN_BYTES)
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    bad_page = _read_pages(
        np.ascontiguousarray(packed.pages),
        packed.page_starts,
        packed.block_tokens,
        packed.axis == "token",
        bases,
        group,
        TWO_BIT if two_bit else RAW,
        patterns,
    )
    if bad_page >= 0:
        raise CorruptDataError(
            f"page {bad_page}: tags must be 0, 1 or 2{' or 3' if two_bit else ''} and the payloads of all heads "
            f"must fill the page in the order of its head table"
        )
    return patterns


def read_tags(packed: Packed, group: int = GROUP) -> NDArray[np.uint8]:
    """The mode of every group: ``uint8 [page, kv_head, group]``."""
    kv_heads, _, head_dim = packed.shape
    groups = packed.block_tokens * head_dim // group
    tag_bytes = _tag_bytes(groups)
    plane_start = packed.page_starts[:-1, None] + (kv_heads * 4 + packed.page_elements)  # [pages, 1]
    plane = packed.pages[plane_start + np.arange(kv_heads * tag_bytes)]  # [pages, kv_heads * tag_bytes]
    tags = (plane[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
    return tags.reshape(packed.page_count, kv_heads, 4 * tag_bytes)[:, :, :groups]


def mode_counts(packed: Packed, group: int = GROUP, two_bit: bool = False) -> dict[str, int]:
    """Groups in each mode, over all pages."""
    names = MODE_NAMES if two_bit else MODE_NAMES[: RAW + 1]
    counts = np.bincount(read_tags(packed, group).ravel(), minlength=len(names))
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def count_exceptions(patterns: NDArray[np.uint16], packed: Packed) -> int:
    """Elements of ``[kv_head, token, head_dim]`` with an exponent outside their channel's narrow window."""
    windows = check_windows(packed.windows, packed.shape)
    return count_outside(patterns, windows.narrow_base, NARROW_WIDTH)


def _tag_bytes(groups: int) -> int:
    return (groups + 3) // 4


def _fixed_bytes(kv_heads: int, head_elements: int, group: int) -> int:
    """Bytes of a page before its payload."""
    return kv_heads * (4 + head_elements + _tag_bytes(head_elements // group))


def _channel_multiple(block_tokens: int, axis: Axis, group: int) -> int:
    """What head_dim must be a multiple of; ValueError when axis, group or block do not fit together."""
    if axis not in ("channel", "token"):
        raise ValueError(f"axis must be 'channel' or 'token', got {axis!r}")
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(map(str, GROUPS))}, got {group}")
    multiple = max(group, GROUP)
    if axis == "channel":
        return multiple
    if block_tokens % multiple:
        raise ValueError(
            f"block_tokens must be a multiple of {multiple} with groups along tokens, got {block_tokens}"
        )
    return GROUP


def _bases_in_group_order(
    windows: Windows, block_tokens: int, axis: Axis, two_bit: bool
) -> NDArray[np.uint8]:
    """What each mode subtracts from each exponent: ``uint8 [kv_head, mode, element in group order]``."""
    narrow, wide = windows.narrow_base, windows.wide_base  # [kv_heads, head_dim]
    two = windows.base(TWO_BIT_WIDTH) if two_bit else narrow
    by_mode = np.stack([narrow, wide, np.zeros_like(wide), two], axis=1)
    if axis == "channel":
        return np.tile(by_mode, (1, 1, block_tokens))
    return np.repeat(by_mode, block_tokens, axis=2)


@njit(cache=True)
def _choose_modes(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    along_tokens: bool,
    bases: NDArray[np.uint8],
    group: int,
    two_bit: bool,
    modes: NDArray[np.uint8],
) -> None:
    page_count, kv_heads, groups = modes.shape
    elements = groups * group
    misses = np.empty(elements, np.uint8)
    words = misses.view(np.uint64)
    without_two = np.uint8(0 if two_bit else 4)
    for page in range(page_count):
        for head in range(kv_heads):
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            flat = (block.T.copy() if along_tokens else block).reshape(elements)
            _find_misses(flat, bases[head], without_two, misses)
            out = modes[page, head]
            if group == 4:
                for pair in range(len(words)):
                    word = words[pair] | (words[pair] >> np.uint64(16))
                    word |= word >> np.uint64(8)
                    out[2 * pair] = _MODE_OF_MISSES[word & np.uint64(7)]
                    out[2 * pair + 1] = _MODE_OF_MISSES[(word >> np.uint64(32)) & np.uint64(7)]
                continue
            per_group = group // 8
            for number in range(groups):
                word = words[number * per_group]
                for more in range(1, per_group):
                    word |= words[number * per_group + more]
                word |= word >> np.uint64(32)
                word |= word >> np.uint64(16)
                word |= word >> np.uint64(8)
                out[number] = _MODE_OF_MISSES[word & np.uint64(7)]


@njit(cache=True)
def _find_misses(
    flat: NDArray[np.uint16], bases: NDArray[np.uint8], without_two: np.uint8, misses: NDArray[np.uint8]
) -> None:
    """Bit 0: outside the narrow window, bit 1: the wide one, bit 2: the window of four or no such mode."""
    narrow, wide, two = bases[NARROW], bases[WIDE], bases[TWO_BIT]
    for element in range(len(flat)):
        exponent = np.uint8(flat[element] >> np.uint16(7))
        missed = np.uint8(np.uint8(exponent - narrow[element]) >= np.uint8(NARROW_WIDTH))
        missed |= np.uint8(
            np.uint8(np.uint8(exponent - wide[element]) >= np.uint8(WIDE_WIDTH)) << np.uint8(1)
        )
        missed |= np.uint8(
            np.uint8(np.uint8(exponent - two[element]) >= np.uint8(TWO_BIT_WIDTH)) << np.uint8(2)
        )
        misses[element] = missed | without_two


@njit(cache=True)
def _write_pages(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    along_tokens: bool,
    bases: NDArray[np.uint8],
    group: int,
    modes: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    head_starts: NDArray[np.int64],
    pages: NDArray[np.uint8],
) -> None:
    page_count, kv_heads, groups = modes.shape
    elements = groups * group
    tag_bytes = (groups + 3) // 4
    exponent = np.empty(elements, np.uint8)
    lanes = exponent.view(np.uint64)
    per_group = group // 8
    for page in range(page_count):
        data = pages[page_starts[page] : page_starts[page + 1]]
        for head in range(kv_heads):
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            flat = (block.T.copy() if along_tokens else block).reshape(elements)
            signs = 4 * kv_heads + head * elements
            split_patterns(flat, data[signs : signs + elements], exponent)
            store_uint32(head_starts[page, head], data, 4 * head)
            tags = data[kv_heads * (4 + elements) + head * tag_bytes :]
            for number in range(groups):
                tags[number // 4] |= np.uint8(modes[page, head, number] << np.uint8(2 * (number % 4)))
            head_bases = bases[head].view(np.uint64)  # [mode, elements / 8]
            payload = head_starts[page, head]
            if group == 4:
                _write_fours(lanes, head_bases, modes[page, head], payload, data)
                continue
            for number in range(groups):
                mode = modes[page, head, number]
                width = _WIDTHS[mode]
                for octet in range(number * per_group, (number + 1) * per_group):
                    # No byte borrows from its neighbour: every lane is at least its base.
                    word = squeeze(lanes[octet] - head_bases[mode, octet], width)
                    store_word(data, payload, word)
                    payload += width


@njit(cache=True)
def _write_fours(
    lanes: NDArray[np.uint64],
    bases: NDArray[np.uint64],
    modes: NDArray[np.uint8],
    payload: int,
    data: NDArray[np.uint8],
) -> None:
    bit = 8 * payload
    begun = np.uint64(0)  # bits of a byte that the group before has begun
    for number in range(len(modes)):
        mode = modes[number]
        width = _WIDTHS[mode]
        half = np.uint64(32 * (number % 2))
        four = (lanes[number // 2] >> half) & np.uint64(0xFFFFFFFF)
        word = squeeze(four - ((bases[mode, number // 2] >> half) & np.uint64(0xFFFFFFFF)), width)
        used = bit % 8
        word = begun | (word << np.uint64(used))
        store_word(data, bit // 8, word)
        begun = word >> np.uint64((used + 4 * width) // 8 * 8)
        bit += 4 * width


@njit(cache=True)
def _read_pages(
    pages: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    block_tokens: int,
    along_tokens: bool,
    bases: NDArray[np.uint8],
    group: int,
    largest_tag: int,
    patterns: NDArray[np.uint16],
) -> int:
    """Fill ``patterns``; the number of the first page that is corrupt, or -1. Reads nothing outside a page."""
    kv_heads, _, head_dim = patterns.shape
    elements = block_tokens * head_dim
    groups = elements // group
    tag_bytes = (groups + 3) // 4
    exponent = np.empty(elements, np.uint8)
    turned = np.empty((head_dim, block_tokens), np.uint16)
    for page in range(len(page_starts) - 1):
        data = pages[page_starts[page] : page_starts[page + 1]]
        payload = kv_heads * (4 + elements + tag_bytes)
        for head in range(kv_heads):
            if load_uint32(data, 4 * head) != payload:
                return page
            first_tag = kv_heads * (4 + elements) + head * tag_bytes
            tags = data[first_tag : first_tag + tag_bytes]
            lanes, head_bases = exponent.view(np.uint64), bases[head].view(np.uint64)
            payload = _read_groups(data, payload, tags, head_bases, group, largest_tag, lanes)
            if payload < 0:
                return page
            signs = data[4 * kv_heads + head * elements : 4 * kv_heads + (head + 1) * elements]
            block = patterns[head, page * block_tokens : (page + 1) * block_tokens]
            if along_tokens:
                join_patterns(signs, exponent, turned.reshape(elements))
                block[:] = turned.T
            else:
                join_patterns(signs, exponent, block.reshape(elements))
        if len(data) - payload >= PAGE_ALIGN_BYTES:
            return page
    return -1


@njit(cache=True)
def _read_groups(
    data: NDArray[np.uint8],
    payload: int,
    tags: NDArray[np.uint8],
    bases: NDArray[np.uint64],
    group: int,
    largest_tag: int,
    lanes: NDArray[np.uint64],
) -> int:
    """Fill one head's exponents; where its payload ends, or -1 for a tag or a payload that cannot be."""
    if group == 4:
        bit = 8 * payload
        for octet in range(len(lanes)):
            word = np.uint64(0)
            for half in range(2):
                number = 2 * octet + half
                mode = np.int64(tags[number // 4] >> np.uint8(2 * (number % 4))) & 3
                if mode > largest_tag or bit + 4 * _WIDTHS[mode] > 8 * len(data):
                    return -1
                four = load_word(data, bit // 8) >> np.uint64(bit % 8)
                kept = np.uint64(0xFFFFFFFF) << np.uint64(32 * half)
                word |= ((spread(four, _WIDTHS[mode]) << np.uint64(32 * half)) + bases[mode, octet]) & kept
                bit += 4 * _WIDTHS[mode]
            lanes[octet] = word
        return (bit + 7) // 8
    per_group = group // 8
    for number in range(len(lanes) // per_group):
        mode = np.int64(tags[number // 4] >> np.uint8(2 * (number % 4))) & 3
        width = _WIDTHS[mode]
        if mode > largest_tag or payload + width * per_group > len(data):
            return -1
        for octet in range(number * per_group, (number + 1) * per_group):
            lanes[octet] = spread(load_word(data, payload), width) + bases[mode, octet]
            payload += width
    return payload
