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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Axis, Packed, join_blocks, split_blocks
from kvfold.codec.windows import NARROW_WIDTH, WIDE_WIDTH, Windows, exponents

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUP = 8
NARROW, WIDE, RAW = 0, 1, 2
MODE_NAMES = ("3-bit", "4-bit", "raw")
# Bits of one code, and so also bytes of one group's payload.
MODE_BITS = (3, 4, 8)
PAGE_ALIGN_BYTES = 16
# One 8-byte entry per page in the block table: the slot's place, and whether the page is packed or raw.
TABLE_ENTRY_BYTES = 8


def encode(
    patterns: NDArray[np.uint16], windows: Windows, block_tokens: int, axis: Axis = "channel"
) -> Packed:
    """Pack BF16 patterns ``uint16 [kv_head, token, head_dim]``; tokens after the last full block stay raw.

    Every page is packed, also one that grows by it (up to 16.25 bits per element and the tables); whether it
    is kept packed or raw is decided by its slot.
    Raises ValueError when head_dim, or block_tokens with groups along tokens, is no multiple of 8, and when
    the windows are not ``[kv_head, head_dim]``.
    """
    blocks, tail = split_blocks(patterns, block_tokens)
    narrow, wide = _bases_in_group_order(patterns.shape, windows, block_tokens, axis)
    blocks = np.ascontiguousarray(blocks if axis == "channel" else blocks.swapaxes(2, 3))

    page_count, kv_heads, rows, columns = blocks.shape
    modes = np.empty((page_count, kv_heads, rows * columns // GROUP), np.uint8)
    _choose_modes(blocks, narrow, wide, modes)

    payload_bytes = np.array(MODE_BITS, np.int64)[modes].sum(axis=-1)  # [pages, kv_heads]
    fixed_bytes = _fixed_bytes(kv_heads, rows * columns)
    head_starts = fixed_bytes + np.cumsum(payload_bytes, axis=1) - payload_bytes
    page_bytes = fixed_bytes + payload_bytes.sum(axis=1)
    page_bytes += -page_bytes % PAGE_ALIGN_BYTES
    if page_bytes.max(initial=0) > 0xFFFFFFFF:
        raise ValueError(f"a page must be smaller than 4 GiB, got {int(page_bytes.max())} bytes")
    page_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(page_bytes)])

    pages = np.zeros(int(page_starts[-1]), np.uint8)
    _write_pages(blocks, narrow, wide, modes, page_starts, head_starts, pages)
    return Packed(patterns.shape, block_tokens, pages, page_starts, tail, windows, axis)


def decode(packed: Packed) -> NDArray[np.uint16]:
    """Rebuild the patterns ``uint16 [kv_head, token, head_dim]``, bit for bit.

    Raises CorruptDataError when the pages cannot have come from ``encode``.
    """
    if packed.windows is None:
        raise ValueError("gaac pages need the windows that they were packed with, got None")
    narrow, wide = _bases_in_group_order(packed.shape, packed.windows, packed.block_tokens, packed.axis)
    _check_page_starts(packed)
    blocks = np.empty((packed.page_count, *narrow.shape), np.uint16)
    bad_page = _read_pages(packed.pages, packed.page_starts, read_tags(packed), narrow, wide, blocks)
    if bad_page >= 0:
        raise CorruptDataError(
            f"page {bad_page}: tags must be 0, 1 or 2 and the payloads of all heads must fill the page "
            f"in the order of its head table"
        )
    return join_blocks(blocks if packed.axis == "channel" else blocks.swapaxes(2, 3), packed.tail)


def read_tags(packed: Packed) -> NDArray[np.uint8]:
    """The mode of every group: ``uint8 [page, kv_head, group]``."""
    kv_heads, _, head_dim = packed.shape
    groups = packed.block_tokens * head_dim // GROUP
    tag_bytes = _tag_bytes(groups)
    plane_start = packed.page_starts[:-1, None] + (kv_heads * 4 + packed.page_elements)  # [pages, 1]
    plane = packed.pages[plane_start + np.arange(kv_heads * tag_bytes)]  # [pages, kv_heads * tag_bytes]
    tags = (plane[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
    return tags.reshape(packed.page_count, kv_heads, 4 * tag_bytes)[:, :, :groups]


def mode_counts(packed: Packed) -> dict[str, int]:
    """Groups in each mode, over all pages."""
    counts = np.bincount(read_tags(packed).ravel(), minlength=len(MODE_NAMES))
    return {name: int(count) for name, count in zip(MODE_NAMES, counts, strict=True)}


def count_exceptions(patterns: NDArray[np.uint16], windows: Windows) -> int:
    """Elements of ``[kv_head, token, head_dim]`` with an exponent outside their channel's narrow window."""
    offsets = exponents(patterns).astype(np.int16) - windows.narrow_base[:, None, :].astype(np.int16)
    return int(np.count_nonzero((offsets < 0) | (offsets >= NARROW_WIDTH)))


def _tag_bytes(groups: int) -> int:
    return (groups + 3) // 4


def _fixed_bytes(kv_heads: int, head_elements: int) -> int:
    """Bytes of a page before its payload."""
    return kv_heads * (4 + head_elements + _tag_bytes(head_elements // GROUP))


def _bases_in_group_order(
    shape: tuple[int, ...], windows: Windows, block_tokens: int, axis: Axis
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Window bases of a block's elements in group order, ``[kv_head, rows, columns]``, without copies."""
    kv_heads, _, head_dim = shape
    if axis not in ("channel", "token"):
        raise ValueError(f"axis must be 'channel' or 'token', got {axis!r}")
    if head_dim % GROUP:
        raise ValueError(f"head_dim must be a multiple of {GROUP}, got {head_dim}")
    if axis == "token" and block_tokens % GROUP:
        raise ValueError(
            f"block_tokens must be a multiple of {GROUP} with groups along tokens, got {block_tokens}"
        )
    if windows.narrow_base.shape != (kv_heads, head_dim):
        raise ValueError(
            f"windows must have shape {[kv_heads, head_dim]}, got {list(windows.narrow_base.shape)}"
        )

    def spread(base: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if axis == "channel":
            return np.broadcast_to(base[:, None, :], (kv_heads, block_tokens, head_dim))
        return np.broadcast_to(base[:, :, None], (kv_heads, head_dim, block_tokens))

    return spread(windows.narrow_base), spread(windows.wide_base)


def _check_page_starts(packed: Packed) -> None:
    kv_heads, _, head_dim = packed.shape
    starts, page_bytes = packed.page_starts, packed.page_bytes
    smallest = _fixed_bytes(kv_heads, packed.block_tokens * head_dim)
    if len(starts) != packed.page_count + 1 or starts[0] != 0 or starts[-1] != len(packed.pages):
        raise CorruptDataError(
            f"page_starts must give {packed.page_count} pages in {len(packed.pages)} bytes, "
            f"got {len(starts) - 1} pages from {int(starts[0])} to {int(starts[-1])}"
        )
    if (page_bytes < smallest).any() or (page_bytes % PAGE_ALIGN_BYTES).any():
        raise CorruptDataError(
            f"a page must have at least {smallest} bytes and a multiple of {PAGE_ALIGN_BYTES}, "
            f"got {page_bytes[(page_bytes < smallest) | (page_bytes % PAGE_ALIGN_BYTES > 0)][:5].tolist()}"
        )


@njit(cache=True)
def _choose_modes(
    blocks: NDArray[np.uint16], narrow: NDArray[np.uint8], wide: NDArray[np.uint8], modes: NDArray[np.uint8]
) -> None:
    pages, kv_heads, rows, columns = blocks.shape
    for page in range(pages):
        for head in range(kv_heads):
            for group in range(rows * columns // GROUP):
                row, first = divmod(group * GROUP, columns)
                all_narrow = True
                all_wide = True
                for column in range(first, first + GROUP):
                    exponent = (np.int64(blocks[page, head, row, column]) >> 7) & 0xFF
                    above_narrow = exponent - np.int64(narrow[head, row, column])
                    above_wide = exponent - np.int64(wide[head, row, column])
                    if above_narrow < 0 or above_narrow >= NARROW_WIDTH:
                        all_narrow = False
                    if above_wide < 0 or above_wide >= WIDE_WIDTH:
                        all_wide = False
                modes[page, head, group] = NARROW if all_narrow else WIDE if all_wide else RAW


@njit(cache=True)
def _write_pages(
    blocks: NDArray[np.uint16],
    narrow: NDArray[np.uint8],
    wide: NDArray[np.uint8],
    modes: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    head_starts: NDArray[np.int64],
    pages: NDArray[np.uint8],
) -> None:
    page_count, kv_heads, rows, columns = blocks.shape
    elements = rows * columns
    groups = elements // GROUP
    tag_bytes = (groups + 3) // 4
    for page in range(page_count):
        for head in range(kv_heads):
            table = page_starts[page] + 4 * head
            signs = page_starts[page] + 4 * kv_heads + head * elements
            tags = page_starts[page] + kv_heads * (4 + elements) + head * tag_bytes
            payload = page_starts[page] + head_starts[page, head]
            for byte in range(4):
                pages[table + byte] = np.uint8((head_starts[page, head] >> (8 * byte)) & 0xFF)
            for group in range(groups):
                row, first = divmod(group * GROUP, columns)
                mode = np.int64(modes[page, head, group])
                bits = MODE_BITS[mode]
                word = np.uint64(0)
                for lane in range(GROUP):
                    column = first + lane
                    pattern = np.int64(blocks[page, head, row, column])
                    pages[signs + group * GROUP + lane] = np.uint8(((pattern >> 8) & 0x80) | (pattern & 0x7F))
                    code = (pattern >> 7) & 0xFF
                    if mode == NARROW:
                        code -= np.int64(narrow[head, row, column])
                    elif mode == WIDE:
                        code -= np.int64(wide[head, row, column])
                    word |= np.uint64(code) << np.uint64(lane * bits)
                for byte in range(bits):
                    pages[payload + byte] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(0xFF))
                payload += bits
                tag = np.int64(pages[tags + group // 4]) | (mode << (2 * (group % 4)))
                pages[tags + group // 4] = np.uint8(tag)


@njit(cache=True)
def _read_pages(
    pages: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    modes: NDArray[np.uint8],
    narrow: NDArray[np.uint8],
    wide: NDArray[np.uint8],
    blocks: NDArray[np.uint16],
) -> int:
    """Fill ``blocks``; the number of the first page that is corrupt, or -1. Reads nothing outside a page."""
    page_count, kv_heads, rows, columns = blocks.shape
    elements = rows * columns
    groups = elements // GROUP
    tag_bytes = (groups + 3) // 4
    for page in range(page_count):
        end = page_starts[page + 1]
        payload = page_starts[page] + kv_heads * (4 + elements + tag_bytes)
        for head in range(kv_heads):
            table = page_starts[page] + 4 * head
            signs = page_starts[page] + 4 * kv_heads + head * elements
            head_start = np.int64(0)
            for byte in range(4):
                head_start |= np.int64(pages[table + byte]) << (8 * byte)
            if page_starts[page] + head_start != payload:
                return page
            for group in range(groups):
                row, first = divmod(group * GROUP, columns)
                mode = np.int64(modes[page, head, group])
                if mode > RAW or payload + MODE_BITS[mode] > end:
                    return page
                bits = MODE_BITS[mode]
                word = np.uint64(0)
                for byte in range(bits):
                    word |= np.uint64(pages[payload + byte]) << np.uint64(8 * byte)
                payload += bits
                for lane in range(GROUP):
                    column = first + lane
                    exponent = np.int64((word >> np.uint64(lane * bits)) & np.uint64((1 << bits) - 1))
                    if mode == NARROW:
                        exponent += np.int64(narrow[head, row, column])
                    elif mode == WIDE:
                        exponent += np.int64(wide[head, row, column])
                    sign_mantissa = np.int64(pages[signs + group * GROUP + lane])
                    pattern = ((sign_mantissa & 0x80) << 8) | (exponent << 7) | (sign_mantissa & 0x7F)
                    blocks[page, head, row, column] = np.uint16(pattern)
        if end - payload >= PAGE_ALIGN_BYTES:
            return page
    return -1
