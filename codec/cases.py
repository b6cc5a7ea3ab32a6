"""Contents that a format must carry bit for bit: one seeded generator for tests of codec and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.windows import EXPONENTS, INNER_WIDTHS, NARROW_WIDTH, WIDE_WIDTH, Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

LANES = 8
# Widths of the windows by name.
MODES = {"narrow": NARROW_WIDTH, "wide": WIDE_WIDTH, "three": 3, "four": 4, "six": 6, "seven": 7}
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
    """All 65,536 patterns in one mode, each in every lane of eight.

    Modes are the windows by name (``MODES``: `narrow` is that of 8, `wide` of 16), and ``raw``. Yields patterns
    ``[kv_head, token, head_dim]``, tokens in multiples of 32, and windows: one window of the mode per head, side
    by side, takes every element; those of other widths take none, but for the pair of 3 and 6. `six` comes in
    two parts, in which the window of 3 leaves the upper and the lower half of that of 6. ``raw`` comes in two
    parts, each of which leaves to the other what its windows take. Raises ValueError for another mode.
    """
    by_value = np.arange(1 << 16, dtype=np.uint16)
    exponent = (by_value >> 7) & 0xFF
    by_exponent = by_value[np.argsort(exponent, kind="stable")].reshape(EXPONENTS, -1)
    if mode == "raw":
        # Windows at either end: whatever the first part codes, the second must leave raw, and the reverse.
        for end in (0, EXPONENTS):
            bases = {width: np.full((1, head_dim), max(end - width, 0), np.uint8) for width in MODES.values()}
            yield _in_every_lane(by_exponent.reshape(1, -1), head_dim), _windows(bases)
        return
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)} or raw, got {mode!r}")
    width = MODES[mode]
    starts = np.minimum(np.arange(0, EXPONENTS, width), EXPONENTS - width)  # [kv_head]
    patterns = _in_every_lane(
        np.stack([by_exponent[start : start + width].ravel() for start in starts]), head_dim
    )
    first = np.repeat(starts.astype(np.uint8)[:, None], head_dim, axis=1)
    # Windows that share no exponent with `first`, so that they can take no element.
    bases = {
        other: np.where(first < EXPONENTS // 2, EXPONENTS - other, 0).astype(np.uint8)
        for other in MODES.values()
    }
    bases[width] = first
    if mode == "three":
        bases[6] = np.minimum(first, EXPONENTS - 6)
    parts = (0, 3) if mode == "six" else (None,)
    for shift in parts:
        if shift is not None:
            bases[3] = first + np.uint8(shift)
        yield patterns, _windows(bases)


def _windows(bases: dict[int, NDArray[np.uint8]]) -> Windows:
    return Windows(bases[NARROW_WIDTH], bases[WIDE_WIDTH], np.stack([bases[width] for width in INNER_WIDTHS]))


def _in_every_lane(by_head: NDArray[np.uint16], head_dim: int) -> NDArray[np.uint16]:
    """``[kv_head, pattern]`` repeated with each of the 8 shifts, so that every pattern meets every lane."""
    shifted = [np.roll(by_head, shift, axis=1) for shift in range(LANES)]
    return np.concatenate(shifted, axis=1).reshape(len(by_head), -1, head_dim)
