"""Eight small codes in one 64-bit register: squeezed together, spread to bytes, loaded and stored anywhere.

All for Numba code. Lane i of a register is byte i; words are little-endian, as this machine must be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _load_anywhere(typing_context: Any, array: Any, place: Any) -> Any:
    """The eight bytes of a contiguous uint8 array from byte ``place`` on, aligned or not; no bounds check."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(data, [arguments[1]])
        word_pointer = builder.bitcast(pointer, cgutils.ir.IntType(64).as_pointer())
        return builder.load(word_pointer, align=1)

    return types.uint64(array, types.int64), generate


def _store_anywhere(typing_context: Any, array: Any, place: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(data, [arguments[1]])
        word_pointer = builder.bitcast(pointer, cgutils.ir.IntType(64).as_pointer())
        builder.store(arguments[2], word_pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


# Called from Numba code without the typing context.
_load: Any = intrinsic(_load_anywhere)
_store: Any = intrinsic(_store_anywhere)


@njit(cache=True, inline="always")
def load_word(data: NDArray[np.uint8], place: int) -> np.uint64:
    """Eight bytes from ``place`` on; bytes past the end of ``data`` read as zero."""
    if place + 8 <= len(data):
        return _load(data, place)
    word = np.uint64(0)
    for byte in range(len(data) - place):
        word |= np.uint64(data[place + byte]) << np.uint64(8 * byte)
    return word


@njit(cache=True, inline="always")
def store_word(data: NDArray[np.uint8], place: int, word: np.uint64) -> None:
    """Eight bytes from ``place`` on; those past the end of ``data`` are dropped."""
    if place + 8 <= len(data):
        _store(data, place, word)
    else:
        for byte in range(len(data) - place):
            data[place + byte] = np.uint8(word >> np.uint64(8 * byte))


def _masks(width: int) -> list[int]:
    """Where codes of ``width`` bits lie: a code per byte, two per 16 bits, four per 32, eight together."""
    return [
        sum(((1 << width * codes) - 1) << (8 * codes * field) for field in range(8 // codes))
        for codes in (1, 2, 4, 8)
    ]


# [width, 4]; width 0 is unused
MASKS = np.array([_masks(width) for width in range(9)], np.uint64)


@njit(cache=True, inline="always")
def squeeze(lanes: np.uint64, width: int) -> np.uint64:
    """Eight bytes below ``2 ** width`` to one integer of ``8 x width`` bits, lane i at bit ``i x width``.

    Widths 1..4 and 8: between them a code moved down would meet the place that it came from.
    """
    free = np.uint64(8 - width)
    word = (lanes | (lanes >> free)) & MASKS[width, 1]
    word = (word | (word >> np.uint64(2) * free)) & MASKS[width, 2]
    return (word | (word >> np.uint64(4) * free)) & MASKS[width, 3]


@njit(cache=True, inline="always")
def spread(word: np.uint64, width: int) -> np.uint64:
    """The inverse of `squeeze` for its widths; bits of ``word`` above the codes are ignored."""
    free = np.uint64(8 - width)
    lanes = word & MASKS[width, 3]
    lanes = (lanes | (lanes << np.uint64(4) * free)) & MASKS[width, 2]
    lanes = (lanes | (lanes << np.uint64(2) * free)) & MASKS[width, 1]
    return (lanes | (lanes << free)) & MASKS[width, 0]


@njit(cache=True)
def store_codes(lanes: NDArray[np.uint64], width: int, plane: NDArray[np.uint8]) -> None:
    """Codes below ``2 ** width``, a byte each in eights, to a plane of ``width`` bytes per eight."""
    for octet in range(len(lanes)):
        store_word(plane, octet * width, squeeze(lanes[octet], width))


@njit(cache=True)
def load_codes(plane: NDArray[np.uint8], width: int, lanes: NDArray[np.uint64]) -> None:
    """The inverse of `store_codes`."""
    for octet in range(len(lanes)):
        lanes[octet] = spread(load_word(plane, octet * width), width)


@njit(cache=True)
def store_uint32(value: int, data: NDArray[np.uint8], place: int) -> None:
    """Four bytes, the lowest first."""
    for byte in range(4):
        data[place + byte] = np.uint8(value >> (8 * byte))


@njit(cache=True)
def load_uint32(data: NDArray[np.uint8], place: int) -> int:
    value = 0
    for byte in range(4):
        value |= int(data[place + byte]) << (8 * byte)
    return value


@njit(cache=True)
def split_patterns(
    patterns: NDArray[np.uint16], sign_mantissa: NDArray[np.uint8], exponent: NDArray[np.uint8]
) -> None:
    """BF16 patterns to two bytes each: bit 7 sign and bits 6..0 mantissa, and the exponent."""
    for element in range(len(patterns)):
        pattern = patterns[element]
        exponent[element] = np.uint8(pattern >> np.uint16(7))
        sign_mantissa[element] = np.uint8(((pattern >> np.uint16(8)) & 0x80) | (pattern & np.uint16(0x7F)))


@njit(cache=True)
def join_patterns(
    sign_mantissa: NDArray[np.uint8], exponent: NDArray[np.uint8], patterns: NDArray[np.uint16]
) -> None:
    """The inverse of `split_patterns`."""
    for element in range(len(patterns)):
        low = np.uint16(sign_mantissa[element])
        sign = np.uint16((low & np.uint16(0x80)) << np.uint16(8))
        magnitude = np.uint16(np.uint16(exponent[element]) << np.uint16(7)) | np.uint16(low & np.uint16(0x7F))
        patterns[element] = np.uint16(sign | magnitude)
