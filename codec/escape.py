"""The formats `esc3` and `esc2-2`: short codes at fixed places, and lists of what they leave out, in order.

Every element has a code of 3 (`esc3`) or 2 bits (`esc2-2`), the offset of its exponent in its channel's window
of 7 or 3 exponents; the highest code is the *escape*. Escaped elements appear in order in the next list, and
those that escape there in the one after it, so the codes themselves tell whose entry is whose:

* 2-bit list, only of `esc2-2`: 0..2 are the exponents of the window of 6 that are not in that of 3 (which lies
  inside it), from the lowest up; 3 escapes;
* nibble list: 1..15 are offsets in the window of 16; 0 escapes. The lowest exponent of that window is given up
  because it is by far the rarest of the sixteen;
* byte list: the exponent itself.

Sign and mantissa stay raw. Page layout, little-endian, elements of a head in the order ``[block_token,
head_dim]``, w the bits of a code:

=============  =========================  ==============================================================
part           bytes                      content
=============  =========================  ==============================================================
head table     4 x kv_heads               uint32: where in the page a head's lists start
sign-mantissa  kv_heads x elements        a byte per element: bit 7 sign, bits 6..0 mantissa
codes          kv_heads x elements x w/8  eight codes are w bytes, one integer: lane i at bit i x w
padding        0..15                      zero; here the main plane ends, at a multiple of 16 bytes
lists          of one head after another  2-bit list, 4 a byte from bit 0; nibble list, 2 a byte; byte list;
                                          each starts at a whole byte, unused bits are zero
padding        0..15                      zero, up to a multiple of 16 bytes
=============  =========================  ==============================================================

The main plane has one size, so it lies at a computed place; only the lists vary, which is what a pool of small
chunks is for (`kvfold.codec.residence`).
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
from kvfold.codec.windows import WIDE_WIDTH, count_outside

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvfold.codec.windows import Windows

CHANNEL_MULTIPLE = 8
# Widths of the windows by bits of a code.
FIRST_WIDTH = {3: 7, 2: 3}
SECOND_WIDTH = 6
LEVEL_NAMES = {3: ("3-bit", "4-bit", "raw"), 2: ("2-bit", "2-bit list", "4-bit", "raw")}


def main_bytes(kv_heads: int, block_tokens: int, head_dim: int, code_bits: int) -> int:
    """Bytes of a page ahead of its lists, the same for all pages."""
    head_elements = block_tokens * head_dim
    return aligned(kv_heads * (4 + head_elements + head_elements * code_bits // 8))


def encode(patterns: NDArray[np.uint16], windows: Windows, block_tokens: int, code_bits: int) -> Packed:
    """Pack BF16 patterns ``uint16 [kv_head, token, head_dim]``; tokens after the last full block stay raw.

    Every page is packed, also one that grows by it (up to 24 bits per element); whether it is kept packed or
    raw is decided by its slot or pool. Raises ValueError when head_dim is no multiple of 8, and when the
    windows are not ``[kv_head, head_dim]`` or lack those of 3, 6 and 7 exponents.
    """
    check_patterns(patterns, block_tokens, CHANNEL_MULTIPLE)
    kv_heads, tokens, head_dim = patterns.shape
    page_count = tokens // block_tokens
    bases = _bases(check_windows(windows, patterns.shape), block_tokens, code_bits)
    patterns = np.ascontiguousarray(patterns)
    main = main_bytes(kv_heads, block_tokens, head_dim, code_bits)
    # Three lists at their longest; memory that is not reached is never touched.
    largest = aligned(main + kv_heads * (2 * block_tokens * head_dim + 3))
    room = np.empty(page_count * largest, np.uint8)
    page_starts = np.zeros(page_count + 1, np.int64)
    _encode_pages(patterns, block_tokens, bases, code_bits, main, room, page_starts)
    return packed_from(patterns, block_tokens, room, page_starts, windows=windows)


def decode(packed: Packed, code_bits: int) -> NDArray[np.uint16]:
    """Rebuild the patterns ``uint16 [kv_head, token, head_dim]``, bit for bit.

    Raises CorruptDataError when the pages cannot have come from ``encode``.
    """
    return _decode(packed, code_bits)[0]


def mode_counts(packed: Packed, code_bits: int) -> dict[str, int]:
    """Elements that end in the codes and in each list."""
    entered = _decode(packed, code_bits)[1].tolist()  # how many reach each level
    left = [*entered[1:], 0]
    names = LEVEL_NAMES[code_bits]
    return {name: here - on for name, here, on in zip(names, entered, left, strict=True)}


def count_exceptions(patterns: NDArray[np.uint16], packed: Packed, code_bits: int) -> int:
    """Elements of ``[kv_head, token, head_dim]`` that escape their code."""
    windows = check_windows(packed.windows, packed.shape)
    width = FIRST_WIDTH[code_bits]
    return count_outside(patterns, windows.base(width), width)


def _bases(windows: Windows, block_tokens: int, code_bits: int) -> NDArray[np.uint8]:
    """First exponents of each level's window of every element: ``uint8 [kv_head, level, element]``."""
    widths = (FIRST_WIDTH[code_bits], SECOND_WIDTH, WIDE_WIDTH)
    by_level = np.stack([windows.base(width) for width in widths], axis=1)  # [kv_heads, level, head_dim]
    return np.tile(by_level, (1, 1, block_tokens))


def _decode(packed: Packed, code_bits: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    kv_heads, tokens, head_dim = packed.shape
    check_sizes(packed.shape, packed.block_tokens, CHANNEL_MULTIPLE)
    bases = _bases(check_windows(packed.windows, packed.shape), packed.block_tokens, code_bits)
    main = main_bytes(kv_heads, packed.block_tokens, head_dim, code_bits)
    check_page_starts(packed, main, PAGE_ALIGN_BYTES)
    patterns = np.empty((kv_heads, tokens, head_dim), np.uint16)
    patterns[:, packed.page_count * packed.block_tokens :] = packed.tail
    entered = np.zeros(len(LEVEL_NAMES[code_bits]), np.int64)
    pages = np.ascontiguousarray(packed.pages)
    bad_page = _decode_pages(
        pages, packed.page_starts, packed.block_tokens, bases, code_bits, main, patterns, entered
    )
    if bad_page >= 0:
        raise CorruptDataError(
            f"page {bad_page}: the lists that the codes of all heads ask for must fill the page "
            f"in the order of its head table"
        )
    return patterns, entered


@njit(cache=True)
def _encode_pages(
    patterns: NDArray[np.uint16],
    block_tokens: int,
    bases: NDArray[np.uint8],
    code_bits: int,
    main: int,
    room: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
) -> None:
    kv_heads, _, head_dim = patterns.shape
    elements = block_tokens * head_dim
    code_bytes = elements // 8 * code_bits
    exponent, codes = np.empty(elements, np.uint8), np.empty(elements, np.uint8)
    escaped = np.empty(elements + 1, np.int64)
    for page in range(len(page_starts) - 1):
        data = room[page_starts[page] :]
        data[:main] = 0
        place = main
        for head in range(kv_heads):
            flat = patterns[head, page * block_tokens : (page + 1) * block_tokens].reshape(elements)
            signs = 4 * kv_heads + head * elements
            split_patterns(flat, data[signs : signs + elements], exponent)
            _first_codes(exponent, bases[head, 0], np.uint8((1 << code_bits) - 1), codes)
            first = kv_heads * (4 + elements) + head * code_bytes
            store_codes(codes.view(np.uint64), code_bits, data[first : first + code_bytes])
            store_uint32(place, data, 4 * head)
            count = _places_of(codes, np.uint8((1 << code_bits) - 1), escaped)
            if code_bits == 2:
                place, count = _write_second(exponent, bases[head], escaped, count, data, place)
            place = _write_rest(exponent, bases[head, 2], escaped, count, data, place)
        end = (place + PAGE_ALIGN_BYTES - 1) // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES
        data[place:end] = 0
        page_starts[page + 1] = page_starts[page] + end


@njit(cache=True)
def _first_codes(
    exponent: NDArray[np.uint8], base: NDArray[np.uint8], escape: np.uint8, codes: NDArray[np.uint8]
) -> None:
    for element in range(len(exponent)):
        offset = np.uint8(exponent[element] - base[element])
        codes[element] = offset if offset < escape else escape


@njit(cache=True)
def _places_of(codes: NDArray[np.uint8], escape: np.uint8, places: NDArray[np.int64]) -> int:
    """Where ``escape`` stands, in order; without a branch, so ``places`` has one spare entry."""
    count = 0
    for element in range(len(codes)):
        places[count] = element
        count += int(codes[element] == escape)
    return count


@njit(cache=True)
def _write_second(
    exponent: NDArray[np.uint8],
    bases: NDArray[np.uint8],
    escaped: NDArray[np.int64],
    count: int,
    data: NDArray[np.uint8],
    place: int,
) -> tuple[int, int]:
    """Write the 2-bit list; where it ends, and how many of ``escaped``, moved to its front, go on."""
    end = place + (count + 3) // 4
    data[place:end] = 0
    going_on = 0
    for entry in range(count):
        element = escaped[entry]
        offset = np.uint8(exponent[element] - bases[1, element])
        above = exponent[element] > bases[0, element]  # the window of 3 lies below it
        code = np.uint8(3)
        if offset < SECOND_WIDTH:
            code = np.uint8(offset - np.uint8(3)) if above else offset
        data[place + entry // 4] |= np.uint8(code << np.uint8(2 * (entry % 4)))
        escaped[going_on] = element
        going_on += int(code == 3)
    return end, going_on


@njit(cache=True)
def _write_rest(
    exponent: NDArray[np.uint8],
    base: NDArray[np.uint8],
    escaped: NDArray[np.int64],
    count: int,
    data: NDArray[np.uint8],
    place: int,
) -> int:
    """Write the nibble list and the byte list; where they end."""
    end = place + (count + 1) // 2
    data[place:end] = 0
    for entry in range(count):
        element = escaped[entry]
        offset = np.uint8(exponent[element] - base[element])
        if 1 <= offset < WIDE_WIDTH:
            data[place + entry // 2] |= np.uint8(offset << np.uint8(4 * (entry % 2)))
        else:
            data[end] = exponent[element]
            end += 1
    return end


@njit(cache=True)
def _decode_pages(
    pages: NDArray[np.uint8],
    page_starts: NDArray[np.int64],
    block_tokens: int,
    bases: NDArray[np.uint8],
    code_bits: int,
    main: int,
    patterns: NDArray[np.uint16],
    entered: NDArray[np.int64],
) -> int:
    """Fill ``patterns``, add up who reaches each level; the first page that is corrupt, or -1."""
    kv_heads, _, head_dim = patterns.shape
    elements = block_tokens * head_dim
    code_bytes = elements // 8 * code_bits
    exponent, codes = np.empty(elements, np.uint8), np.empty(elements, np.uint8)
    escaped = np.empty(elements + 1, np.int64)
    for page in range(len(page_starts) - 1):
        data = pages[page_starts[page] : page_starts[page + 1]]
        place = main
        for head in range(kv_heads):
            if load_uint32(data, 4 * head) != place:
                return page
            first = kv_heads * (4 + elements) + head * code_bytes
            load_codes(data[first : first + code_bytes], code_bits, codes.view(np.uint64))
            for element in range(elements):
                exponent[element] = np.uint8(codes[element] + bases[head, 0, element])
            count = _places_of(codes, np.uint8((1 << code_bits) - 1), escaped)
            entered[0] += elements
            entered[1] += count
            if code_bits == 2:
                if place + (count + 3) // 4 > len(data):
                    return page
                place, count = _read_second(data, place, bases[head], escaped, count, exponent)
                entered[2] += count
            if place + (count + 1) // 2 > len(data):
                return page
            place, raw = _read_rest(data, place, bases[head, 2], escaped, count, exponent)
            if place < 0:
                return page
            entered[-1] += raw
            signs = data[4 * kv_heads + head * elements : 4 * kv_heads + (head + 1) * elements]
            flat = patterns[head, page * block_tokens : (page + 1) * block_tokens].reshape(elements)
            join_patterns(signs, exponent, flat)
        if len(data) - place >= PAGE_ALIGN_BYTES:
            return page
    return -1


@njit(cache=True)
def _read_second(
    data: NDArray[np.uint8],
    place: int,
    bases: NDArray[np.uint8],
    escaped: NDArray[np.int64],
    count: int,
    exponent: NDArray[np.uint8],
) -> tuple[int, int]:
    going_on = 0
    for entry in range(count):
        element = escaped[entry]
        code = np.uint8(np.uint8(data[place + entry // 4] >> np.uint8(2 * (entry % 4))) & np.uint8(3))
        candidate = np.uint8(bases[1, element] + code)
        exponent[element] = candidate if candidate < bases[0, element] else np.uint8(candidate + np.uint8(3))
        escaped[going_on] = element
        going_on += int(code == 3)
    return place + (count + 3) // 4, going_on


@njit(cache=True)
def _read_rest(
    data: NDArray[np.uint8],
    place: int,
    base: NDArray[np.uint8],
    escaped: NDArray[np.int64],
    count: int,
    exponent: NDArray[np.uint8],
) -> tuple[int, int]:
    """Read the nibble list and the byte list; where they end (-1: past the page), and the bytes read."""
    end = place + (count + 1) // 2
    raw = 0
    for entry in range(count):
        element = escaped[entry]
        nibble = np.uint8(np.uint8(data[place + entry // 2] >> np.uint8(4 * (entry % 2))) & np.uint8(15))
        if nibble > 0:
            exponent[element] = np.uint8(base[element] + nibble)
        else:
            if end + raw >= len(data):
                return -1, raw
            exponent[element] = data[end + raw]
            raw += 1
    return end + raw, raw
