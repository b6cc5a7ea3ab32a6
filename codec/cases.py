"""Contents that a format must carry bit for bit: one seeded generator for tests of codec and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.windows import EXPONENTS, NARROW_WIDTH, WIDE_WIDTH, Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

LANES = 8
CONTENTS = ("normal", "uniform", "special", "outlier", "constant", "dead")
SPECIAL_PATTERNS = (
    *(0x0000, 0x8000),  # zeros
    *(0x0001, 0x8001, 0x007F, 0x807F),  # subnormals
    *(0x0080, 0x7F7F, 0xFF7F),  # smallest normal, largest of both signs
    *(0x7F80, 0xFF80),  # infinities
    *(0x7F81, 0x7FBF, 0x7FC0, 0xFFFF),  # signalling and quiet NaN with payloads
)


def contents(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> NDArray[np.uint16]:
    """BF16 patterns ``uint16 [kv_head, token, head_dim]`` of one kind of ``CONTENTS``.

    `normal` has a scale per channel and some exact zeros, as K and V have; `uniform` random bits; `special`
    zeros, subnormals, infinities and NaNs; `outlier` one random pattern in every eight elements of tame ones;
    `constant` one value; `dead` zeros of both signs. Raises ValueError for another kind.
    """
    if kind == "uniform":
        return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    if kind == "special":
        return rng.choice(np.array(SPECIAL_PATTERNS, np.uint16), shape)
    if kind == "constant":
        return np.full(shape, rng.integers(0, 1 << 16), np.uint16)
    if kind == "dead":
        return rng.choice(np.array([0x0000, 0x8000], np.uint16), shape)
    if kind in ("normal", "outlier"):
        scales = 2.0 ** rng.integers(-20, 20, (shape[0], 1, shape[2]))
        values = (rng.standard_normal(shape) * scales).astype(np.float32)
        patterns = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if kind == "outlier":
            flat = patterns.reshape(-1)
            places = np.arange(0, flat.size, LANES)
            places = np.minimum(places + rng.integers(0, LANES, places.size), flat.size - 1)
            flat[places] = rng.integers(0, 1 << 16, places.size, dtype=np.uint16)
        else:
            patterns[rng.random(shape) < 5e-4] = 0
        return patterns
    raise ValueError(f"contents must be one of {', '.join(CONTENTS)}, got {kind!r}")


def every_pattern(mode: str, head_dim: int = 64) -> Iterator[tuple[NDArray[np.uint16], Windows]]:
    """All 65,536 patterns in one mode of `gaac` (``narrow``, ``wide``, ``raw``), each in every lane.

    Yields patterns ``[kv_head, token, head_dim]`` and windows that put every group into that mode (``raw``:
    in two parts, each of which leaves some groups to the other). Raises ValueError for another mode.
    """
    by_value = np.arange(1 << 16, dtype=np.uint16)
    exponent = (by_value >> 7) & 0xFF
    by_exponent = by_value[np.argsort(exponent, kind="stable")]
    if mode == "raw":
        # Windows at either end: whatever the first part codes, the second must leave raw, and the reverse.
        for base in (0, EXPONENTS - WIDE_WIDTH):
            bases = np.full((1, head_dim), base, np.uint8)
            yield _in_every_lane(by_exponent[None], head_dim), Windows(bases, bases)
        return
    if mode not in ("narrow", "wide"):
        raise ValueError(f"mode must be narrow, wide or raw, got {mode!r}")
    width = NARROW_WIDTH if mode == "narrow" else WIDE_WIDTH
    heads = EXPONENTS // width  # one window per head, side by side
    first = np.repeat((np.arange(heads) * width).astype(np.uint8)[:, None], head_dim, axis=1)
    # A window that shares no exponent with `first`, so that it can take no group.
    elsewhere = np.where(first < EXPONENTS // 2, EXPONENTS - WIDE_WIDTH, 0).astype(np.uint8)
    windows = Windows(first, elsewhere) if mode == "narrow" else Windows(elsewhere, first)
    yield _in_every_lane(by_exponent.reshape(heads, -1), head_dim), windows


def _in_every_lane(by_head: NDArray[np.uint16], head_dim: int) -> NDArray[np.uint16]:
    """``[kv_head, pattern]`` repeated with each of the 8 shifts, so that every pattern meets every lane."""
    shifted = [np.roll(by_head, shift, axis=1) for shift in range(LANES)]
    return np.concatenate(shifted, axis=1).reshape(len(by_head), -1, head_dim)
