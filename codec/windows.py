"""Windows of exponents: where calibration expects the exponents of each head-channel to lie.

A BF16 pattern is 1 sign bit (15), 8 exponent bits (14..7) and 7 mantissa bits (6..0). Every channel gets a
narrow window of 8 consecutive exponents and a wide one of 16; each is the window that covers most of the
calibration values, and of windows that cover equally many the highest. A window lies whole inside 0..255, so
its base is at most 248 (narrow) or 240 (wide): a channel whose values all have exponent 255 gets the window
that ends there, a dead channel (exponent 0 only) the one that starts at 0.

Formats with shorter codes use the inner windows, of 3, 4, 6 and 7 exponents, chosen by the same rule but for
one: those of 3 and 6 are a pair for codes of two levels, the first inside the second, with the fewest
``misses of 3 + 2 x misses of 6`` (a first miss costs a second code of 2 bits, a second one a nibble).

Leading axes are free: ``[kv_head, token, head_dim]`` gives windows per head and channel, and
``[layer, kv, kv_head, token, head_dim]`` per layer, K/V, head and channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NARROW_WIDTH = 8
WIDE_WIDTH = 16
INNER_WIDTHS = (3, 4, 6, 7)
EXPONENTS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The first exponent of each channel's two windows, both ``uint8 [..., head_dim]``.

    Raises ValueError for another dtype, for unequal shapes, and for a window that would leave 0..255.
    """

    narrow_base: NDArray[np.uint8]
    wide_base: NDArray[np.uint8]
    inner_bases: NDArray[np.uint8] | None = None  # [len(INNER_WIDTHS), ..., head_dim]

    def base(self, width: int) -> NDArray[np.uint8]:
        """First exponents of the windows of ``width``; ValueError where they were not calibrated."""
        if width in (NARROW_WIDTH, WIDE_WIDTH):
            return self.narrow_base if width == NARROW_WIDTH else self.wide_base
        if self.inner_bases is None:
            raise ValueError(f"windows of {width} exponents must be calibrated, got windows of 8 and 16 only")
        return self.inner_bases[INNER_WIDTHS.index(width)]

    def __post_init__(self) -> None:
        if self.narrow_base.shape != self.wide_base.shape:
            raise ValueError(
                "narrow_base and wide_base must have one shape, "
                f"got {self.narrow_base.shape} and {self.wide_base.shape}"
            )
        for name, base, width in (
            ("narrow_base", self.narrow_base, NARROW_WIDTH),
            ("wide_base", self.wide_base, WIDE_WIDTH),
        ):
            if base.dtype != np.uint8:
                raise ValueError(f"{name} must be uint8, got {base.dtype}")
            if base.size and int(base.max()) > EXPONENTS - width:
                raise ValueError(f"{name} must be at most {EXPONENTS - width}, got {int(base.max())}")
        if self.inner_bases is not None:
            self._check_inner(self.inner_bases)

    def _check_inner(self, inner: NDArray[np.uint8]) -> None:
        expected = (len(INNER_WIDTHS), *self.narrow_base.shape)
        if inner.dtype != np.uint8 or inner.shape != expected:
            raise ValueError(
                f"inner_bases must be uint8 {list(expected)}, got {inner.dtype} {list(inner.shape)}"
            )
        for width, base in zip(INNER_WIDTHS, inner, strict=True):
            if base.size and int(base.max()) > EXPONENTS - width:
                raise ValueError(
                    f"bases of windows of {width} must be at most {EXPONENTS - width}, got {int(base.max())}"
                )
        first, second = self.base(3).astype(np.int16), self.base(6).astype(np.int16)
        if ((first < second) | (first > second + 3)).any():
            raise ValueError("the window of 3 must lie inside that of 6 in every channel")


def exponents(patterns: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """The biased exponents of BF16 patterns, any shape."""
    return ((patterns >> np.uint16(7)) & np.uint16(0xFF)).astype(np.uint8)


def exponent_histogram(patterns: NDArray[np.uint16]) -> NDArray[np.int64]:
    """How often each channel holds each exponent: ``[..., token, head_dim]`` -> ``[..., head_dim, 256]``.

    Histograms add up, so calibration over many arrays never needs them all in memory.
    """
    if patterns.dtype != np.uint16 or patterns.ndim < 2:
        raise ValueError(
            f"patterns must be uint16 [..., token, head_dim], got {patterns.dtype} {list(patterns.shape)}"
        )
    *leading, tokens, head_dim = patterns.shape
    channels = int(np.prod(leading, dtype=np.int64)) * head_dim
    by_channel = np.moveaxis(exponents(patterns), -2, -1).reshape(channels, tokens)
    bins = by_channel + np.arange(channels, dtype=np.int64)[:, None] * EXPONENTS  # [channels, tokens]
    counts = np.bincount(bins.ravel(), minlength=channels * EXPONENTS)
    return counts.reshape(*leading, head_dim, EXPONENTS)


def windows_of(histogram: NDArray[np.int64]) -> Windows:
    """The best narrow and wide window of each channel of an exponent histogram ``[..., head_dim, 256]``."""
    if not histogram.any():
        raise ValueError("calibration needs at least one value, got none")
    first, second = _best_pair(histogram)
    inner = np.stack([first, _best_base(histogram, 4), second, _best_base(histogram, 7)])
    return Windows(_best_base(histogram, NARROW_WIDTH), _best_base(histogram, WIDE_WIDTH), inner)


def calibrate(arrays: Sequence[NDArray[np.uint16]]) -> Windows:
    """Windows per head and channel from BF16 patterns ``[..., token, head_dim]``, alike in the other axes.

    Raises ValueError when there is no array, no value, or when the shapes disagree.
    """
    if not arrays:
        raise ValueError("calibration needs at least one array, got none")
    shapes = sorted({(*array.shape[:-2], array.shape[-1]) for array in arrays})
    if len(shapes) > 1:
        raise ValueError(f"calibration arrays must agree in all axes but tokens, got {shapes}")
    histogram = exponent_histogram(arrays[0])
    for array in arrays[1:]:
        histogram = histogram + exponent_histogram(array)
    return windows_of(histogram)


def rotate_keys(keys: NDArray[np.uint16], by_tokens: int, rope_theta: float) -> NDArray[np.uint16]:
    """The same keys as if every token stood ``by_tokens`` positions later: ``R(p + d) = R(d) R(p)``.

    ``keys`` are BF16 patterns ``[..., head_dim]`` after RoPE in the half-split form, which turns channels
    (i, i + head_dim / 2) by ``position * rope_theta ** (-2 i / head_dim)``. Rotated in float64, rounded to
    BF16 to nearest even. RoPE moves the exponents of keys with position, so windows calibrated on rotated
    copies as well stay right at positions that no calibration text reached.
    Raises ValueError for an odd head_dim and for keys that are not finite.
    """
    head_dim = keys.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim must be even to rotate keys, got {head_dim}")
    if (not_finite := int(np.count_nonzero(exponents(keys) == 255))) > 0:
        raise ValueError(f"keys to rotate must be finite, got {not_finite} NaN or infinite values")
    half = head_dim // 2
    angles = by_tokens * rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    values = (keys.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    first, second = values[..., :half], values[..., half:]
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    bits = rotated.astype(np.float32).view(np.uint32)
    to_nearest_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + to_nearest_even) >> np.uint32(16)).astype(np.uint16)


def count_outside(patterns: NDArray[np.uint16], base: NDArray[np.uint8], width: int) -> int:
    """Elements of ``[kv_head, token, head_dim]`` whose exponent lies outside their channel's window."""
    offsets = exponents(patterns).astype(np.int16) - base[:, None, :].astype(np.int16)
    return int(np.count_nonzero((offsets < 0) | (offsets >= width)))


def _covered(histogram: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Values inside the window at every base: ``[..., head_dim, 257 - width]``."""
    below = np.concatenate([np.zeros_like(histogram[..., :1]), np.cumsum(histogram, axis=-1)], axis=-1)
    return below[..., width:] - below[..., :-width]


def _best_base(histogram: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    return _highest_argmax(_covered(histogram, width))


def _best_pair(histogram: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Bases of the windows of 3 and 6, the first inside the second; ties to the highest 6, then 3."""
    three, six = _covered(histogram, 3), _covered(histogram, 6)  # [..., 254], [..., 251]
    inside = np.stack([three[..., shift : shift + six.shape[-1]] for shift in range(4)])  # [4, ..., 251]
    second = _highest_argmax(inside.max(axis=0) + 2 * six)
    at_second = np.take_along_axis(inside, second[None, ..., None].astype(np.int64), axis=-1)[..., 0]
    shift = len(inside) - 1 - np.argmax(at_second[::-1], axis=0)
    return (second + shift).astype(np.uint8), second


def _highest_argmax(scores: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The last index of the largest score along the last axis."""
    return (scores.shape[-1] - 1 - np.argmax(scores[..., ::-1], axis=-1)).astype(np.uint8)
