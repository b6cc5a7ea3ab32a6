"""The formats `fp8-e4m3` and `fp8-e5m2`: a cast of BF16 to one byte, lossy, with one scale per layer, K or V.

A byte is 1 sign bit, then 4 exponent bits (bias 7) and 3 mantissa bits, or 5 (bias 15) and 2, as in the OCP
8-bit floating point specification (OFP8, 2023). A cast divides by the scale in float32 and rounds to nearest,
ties to even, by integer operations on the float32 pattern; subnormals are kept. What lies beyond the range:

==========  =================  ================================  =============================
format      largest finite     larger values and infinities      NaN
==========  =================  ================================  =============================
fp8-e4m3    448 (0x7E)         448 with their sign: saturates    0x7F with its sign
fp8-e5m2    57,344 (0x7B)      infinity with their sign (0x7C)   0x7F with its sign
==========  =================  ================================  =============================

A value that rounds to the largest finite one is not beyond the range (E5M2: below 61,440). The way back
multiplies by the scale in float32 and rounds to BF16, ties to even; with scale 1 it is exact, and each NaN
becomes 0x7FC0 with its sign.

There are only 65,536 BF16 patterns, so a cast with a given scale is a table of 65,536 bytes, and the way back
one of 256 patterns. A page is a byte per element, ``[kv_head, block_token, head_dim]``; the tail is FP8 too,
because a cache casts each token when it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Packed, join_blocks, split_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT32_MANTISSA_BITS = 23
FLOAT32_BIAS = 127


@dataclass(frozen=True, slots=True)
class Fp8:
    """One of the two ways to spend eight bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int  # pattern of the largest finite value
    beyond: int  # pattern that stands for everything larger, infinity included
    # Both: 0x7F is a NaN.

    @property
    def largest_value(self) -> float:
        return float(self.values()[self.largest])

    def values(self) -> NDArray[np.float32]:
        """The value of each of the 256 patterns, exactly."""
        pattern = np.arange(256)
        exponent = pattern >> self.mantissa_bits & (1 << self.exponent_bits) - 1
        mantissa = pattern & (1 << self.mantissa_bits) - 1
        significand = np.where(exponent > 0, mantissa + (1 << self.mantissa_bits), mantissa)
        power = np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        values = np.ldexp(significand.astype(np.float32), power.astype(np.int32))
        magnitude = pattern & 0x7F
        values[magnitude > self.largest] = np.nan
        if self.beyond > self.largest:
            values[magnitude == self.beyond] = np.inf
        return np.where(pattern < 128, values, -values).astype(np.float32)


E4M3 = Fp8("fp8-e4m3", 4, 3, 7, largest=0x7E, beyond=0x7E)
E5M2 = Fp8("fp8-e5m2", 5, 2, 15, largest=0x7B, beyond=0x7C)


def cast_table(kind: Fp8, scale: float = 1.0) -> NDArray[np.uint8]:
    """The FP8 pattern of every BF16 pattern divided by ``scale``: ``uint8 [65536]``.

    Raises ValueError for a scale that is not a finite float32 number above 0.
    """
    check_scale(scale)
    patterns = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    with np.errstate(all="ignore"):  # signalling NaNs, and quotients beyond float32
        bits = (patterns.view(np.float32) / np.float32(scale)).view(np.uint32).astype(np.int64)
    sign = (patterns >> np.uint32(24)).astype(np.int64) & 0x80
    magnitude = bits & 0x7FFFFFFF
    exponent, fraction = magnitude >> FLOAT32_MANTISSA_BITS, magnitude & (1 << FLOAT32_MANTISSA_BITS) - 1

    dropped_bits = FLOAT32_MANTISSA_BITS - kind.mantissa_bits
    lowest = FLOAT32_BIAS - kind.bias + 1  # the float32 exponent of the smallest normal FP8 value
    normal = _shift_to_nearest_even(magnitude, np.full_like(magnitude, dropped_bits))
    normal -= (lowest - 1) << kind.mantissa_bits
    # Below it the significand moves right by as much as the exponent lacks; after 25 bits nothing is left.
    significand = np.where(exponent > 0, fraction | 1 << FLOAT32_MANTISSA_BITS, fraction)
    lacking = np.clip(lowest - np.maximum(exponent, 1), 0, 25)
    subnormal = _shift_to_nearest_even(significand, dropped_bits + lacking)

    cast = np.where(exponent >= lowest, normal, subnormal)
    cast = np.where(cast > kind.largest, kind.beyond, cast)
    is_nan = magnitude > 0x7F800000
    return (sign | np.where(is_nan, 0x7F, cast)).astype(np.uint8)


def widen_table(kind: Fp8, scale: float = 1.0) -> NDArray[np.uint16]:
    """The BF16 pattern of every FP8 pattern times ``scale``: ``uint16 [256]``. Raises as `cast_table` does."""
    check_scale(scale)
    with np.errstate(over="ignore"):
        bits = (kind.values() * np.float32(scale)).view(np.uint32).astype(np.int64)
    widened = _shift_to_nearest_even(bits, np.full_like(bits, 16))
    sign = (np.arange(256) & 0x80) << 8
    return np.where(np.isnan(kind.values()), sign | 0x7FC0, widened).astype(np.uint16)


def amax_scale(patterns: NDArray[np.uint16], kind: Fp8) -> float:
    """The scale that maps the largest finite magnitude of BF16 patterns to the largest FP8 value.

    1.0 when all are zero. At least float32's smallest normal number, which is the smallest scale.
    """
    magnitude = patterns & np.uint16(0x7FFF)
    largest = int(magnitude[magnitude < 0x7F80].max(initial=0))
    if largest == 0:
        return 1.0
    value = float(np.array([largest << 16], np.uint32).view(np.float32)[0])
    scale = np.float32(value / kind.largest_value)
    return float(max(scale, np.finfo(np.float32).tiny))


def check_scale(scale: float) -> None:
    """Raises ValueError unless ``scale`` is a normal, positive float32 number."""
    limits = np.finfo(np.float32)
    if not float(limits.tiny) <= scale <= float(limits.max):
        raise ValueError(f"scale must be a normal float32 number above 0, got {scale}")


def encode_bytes(values: NDArray[np.uint8], block_tokens: int, scale: float = 1.0) -> Packed:
    """Cut FP8 patterns ``uint8 [kv_head, token, head_dim]`` into pages, as they are."""
    blocks, tail = split_blocks(values, block_tokens, np.uint8)
    page_bytes = values.shape[0] * block_tokens * values.shape[2]
    return Packed(
        shape=values.shape,
        block_tokens=block_tokens,
        pages=np.ascontiguousarray(blocks).reshape(-1),
        page_starts=np.arange(len(blocks) + 1, dtype=np.int64) * page_bytes,
        tail=tail,
        scale=float(np.float32(scale)),
    )


def decode_bytes(packed: Packed) -> NDArray[np.uint8]:
    """FP8 patterns ``uint8 [kv_head, token, head_dim]``, bit for bit."""
    expected_bytes = packed.page_count * packed.page_elements
    if len(packed.pages) != expected_bytes:
        raise CorruptDataError(f"pages must hold {expected_bytes} bytes, got {len(packed.pages)}")
    kv_heads, _, head_dim = packed.shape
    blocks = packed.pages.reshape(-1, kv_heads, packed.block_tokens, head_dim)
    return join_blocks(blocks, packed.tail)


def _shift_to_nearest_even(numbers: NDArray[np.int64], bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """``numbers / 2**bits`` rounded to nearest, ties to even; bits at least 1."""
    half = np.int64(1) << (bits - 1)
    return (numbers + half - 1 + (numbers >> bits & 1)) >> bits
