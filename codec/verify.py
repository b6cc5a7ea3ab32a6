"""Whether bits come back: two arrays compared, and any number of values sent through a format."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.codec import stacked
from kvfold.codec.cases import CONTENTS, contents
from kvfold.codec.names import cast_of, find_format, find_fp8
from kvfold.codec.windows import calibrate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
CHUNK_VALUES = 1 << 20  # bounds memory, whatever the number of values
KV_HEADS = 4
# Random bits and contents like those of K and V take turns with one planted kind at a time.
TURNS = tuple(kind for planted in CONTENTS[2:] for kind in ("uniform", "normal", planted))


@dataclass(frozen=True, slots=True)
class Mismatches:
    """How many patterns differ, and the first of them as lines ``[head, token, channel] expected -> got``."""

    count: int
    first: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.count > 0


def find_mismatches(expected: NDArray[Any], actual: NDArray[Any], show: int = 5) -> Mismatches:
    """Compare bits, so NaN payloads and signs of zero count. Raises ValueError when shape or dtype differ."""
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        raise ValueError(
            f"arrays must agree in shape and dtype, expected {expected.dtype} {list(expected.shape)}, "
            f"got {actual.dtype} {list(actual.shape)}"
        )
    if np.array_equal(expected, actual):
        return Mismatches(0, ())
    places = np.argwhere(expected != actual)
    digits = 2 * expected.dtype.itemsize
    lines = tuple(
        f"{place.tolist()} 0x{int(expected[tuple(place)]):0{digits}x} -> 0x{int(actual[tuple(place)]):0{digits}x}"
        for place in places[:show]
    )
    return Mismatches(len(places), lines)


@dataclass(frozen=True, slots=True)
class Verified:
    """Values sent through a format and back so far, and what did not come back as it should."""

    values: int
    mismatches: int
    first: tuple[str, ...] = ()

    def plus(self, values: int, found: Mismatches) -> Verified:
        return Verified(self.values + values, self.mismatches + found.count, self.first or found.first)


def verify_format(name: str, values: int, seed: int) -> Iterator[Verified]:
    """Send at least ``values`` values through a format, in chunks; yields the totals after each.

    First all 65,536 patterns, in every lane of eight, once inside their windows and once outside; then chunks
    of random and planted contents of every head_dim with windows that were calibrated on others, each with a
    raw tail. FP8 formats must give back what the cast keeps of BF16 values, and every bit of FP8 values.
    """
    kv_format = find_format(name)
    total = Verified(0, 0)
    for patterns, calibration, required in _chunks(kv_format.block_tokens, kv_format.channel_multiple, seed):
        if total.values >= values and not required:
            return
        windows = calibrate([kv_format.coded(calibration)])
        decoded = kv_format.decode(kv_format.encode(patterns, windows, kv_format.block_tokens))
        total = total.plus(patterns.size, find_mismatches(kv_format.stored(patterns), decoded))
        if cast_of(name):
            total = total.plus(patterns.size, _fp8_mismatches(name, patterns, kv_format.block_tokens))
        yield total


def _fp8_mismatches(name: str, patterns: NDArray[np.uint16], block_tokens: int) -> Mismatches:
    """The lower bytes of the patterns taken for FP8 values, which have more mantissas than casts make."""
    fp8_format = find_fp8(name)
    values = (patterns & np.uint16(0xFF)).astype(np.uint8)
    windows = calibrate([stacked.spread(values, fp8_format.kind)])
    return find_mismatches(values, fp8_format.decode(fp8_format.encode(values, windows, block_tokens)))


def _chunks(
    block_tokens: int, channel_multiple: int, seed: int
) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.uint16], bool]]:
    """Patterns ``[kv_head, token, head_dim]``, what to calibrate on, and whether they must be sent in any case."""
    for patterns, calibration in every_pattern_in_every_lane():
        yield patterns, calibration, True
    rng = np.random.default_rng(seed)
    head_dims = [head_dim for head_dim in HEAD_DIMS if head_dim % channel_multiple == 0]
    for turn in count():
        head_dim = head_dims[turn % len(head_dims)]
        blocks = max(1, CHUNK_VALUES // (KV_HEADS * block_tokens * head_dim))
        tokens = blocks * block_tokens + int(rng.integers(block_tokens))
        patterns = contents(TURNS[turn % len(TURNS)], (KV_HEADS, tokens, head_dim), rng)
        yield patterns, contents("normal", (KV_HEADS, 64, head_dim), rng), False


def every_pattern_in_every_lane() -> Iterator[tuple[NDArray[np.uint16], NDArray[np.uint16]]]:
    """All 65,536 patterns in each place of eight, and calibrations that hold them and that miss them.

    Heads of 2, 4, 8 and 16 consecutive exponents, calibrated on themselves, bring every pattern into windows and
    lists of every width; calibrated on the head half the exponents away, out of all of them.
    """
    by_value = np.arange(1 << 16, dtype=np.uint16)
    by_exponent = by_value[np.argsort(by_value >> 7 & 0xFF, kind="stable")]
    for exponents in (2, 4, 8, 16):
        heads = by_exponent.reshape(256 // exponents, -1)
        lanes = np.concatenate([np.roll(heads, shift, axis=1) for shift in range(8)], axis=1)
        patterns = lanes.reshape(len(heads), -1, 64)
        yield patterns, patterns
        if exponents == 16:
            yield patterns, np.roll(patterns, len(heads) // 2, axis=0)
