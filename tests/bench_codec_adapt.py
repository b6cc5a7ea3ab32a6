"""Windows chosen when a block is packed, beside calibrated ones: which wins, at which block length, where.

    python tests/bench_codec_adapt.py KV_FOLDER

Not a test: it prints the table of docs/codec.md. Blocks are packed by the real encoders of `esc3` and `esc2-2`,
each with windows of its own, and the bytes that would tell a decoder those windows are added:

* `calibrated`: windows of one calibration for all blocks;
* `rotated`: the same, with copies of the calibration keys at later positions (K only);
* `base 8 bit`: no calibration; a byte per block and channel says where the first window starts, and the others
  follow from it by fixed distances;
* `shift 4 bit`: calibrated windows, moved together by -8..7 exponents per block and channel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvfold.codec import escape
from kvfold.codec.packed import Packed
from kvfold.codec.survey import ROPE_THETA, ROTATIONS_TOKENS
from kvfold.codec.windows import Windows, calibrate, exponent_histogram, rotate_keys

BLOCKS_TOKENS = (64, 128, 256)
FIRST_BITS = {"esc3": 3, "esc2-2": 2}
# Without calibration: where the other windows start, seen from that of 7 (for esc2-2: from that of 6).
THREE_IN_SIX, WIDE_BELOW_SEVEN, WIDE_BELOW_SIX = 3, 9, 10


def costs(histogram: NDArray[np.int64], windows: Windows, code_bits: int) -> NDArray[np.int64]:
    """Bits of a block's lists in each channel: ``[kv_head, head_dim, 256]`` -> ``[kv_head, head_dim]``."""
    exponent = np.arange(256)

    def outside(base: NDArray[np.uint8], width: int, low: int = 0) -> NDArray[np.bool_]:
        offset = exponent - base[..., None].astype(np.int64)
        return (offset < low) | (offset >= width)

    first = outside(windows.base(escape.FIRST_WIDTH[code_bits]), escape.FIRST_WIDTH[code_bits])
    second = first & outside(windows.base(6), 6) if code_bits == 2 else first
    last = second & outside(windows.wide_base, 16, low=1)
    bits = 4 * second + 8 * last + (2 * first if code_bits == 2 else 0)
    return (histogram * bits).sum(axis=-1)


def at_base(base: NDArray[np.int64], code_bits: int) -> Windows:
    """Windows without calibration: ``base`` ``[kv_head, head_dim]`` is that of 7 exponents, or of 6."""
    below = WIDE_BELOW_SEVEN if code_bits == 3 else WIDE_BELOW_SIX
    wide = np.clip(base - below, 0, 240).astype(np.uint8)
    six = np.minimum(base, 250)
    seven = np.minimum(base, 249)
    inner = np.stack([six + THREE_IN_SIX, seven, six, seven]).astype(np.uint8)
    return Windows(np.minimum(base, 248).astype(np.uint8), wide, inner)


def moved(windows: Windows, shift: NDArray[np.int64]) -> Windows:
    """All windows moved by ``shift`` ``[kv_head, head_dim]``, as far as they stay inside 0..255."""
    assert windows.inner_bases is not None

    def move(base: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
        return np.clip(base.astype(np.int64) + shift, 0, 256 - width).astype(np.uint8)

    inner = np.stack([move(base, 7) for base in windows.inner_bases])
    inner[0] = np.clip(inner[0], inner[2], inner[2] + 3)
    return Windows(move(windows.narrow_base, 8), move(windows.wide_base, 16), inner)


def best(histogram: NDArray[np.int64], candidates: list[Windows], code_bits: int) -> NDArray[np.int64]:
    """Which candidate costs least in each channel."""
    return np.argmin([costs(histogram, windows, code_bits) for windows in candidates], axis=0)


def packed_bits(
    test: NDArray[np.uint16], block_tokens: int, code_bits: int, how: str, windows: Windows
) -> float:
    """Bits per element of all blocks, what the decoder must be told included; every bit is checked."""
    total_bytes = 0.0
    for first in range(0, test.shape[1] - block_tokens + 1, block_tokens):
        block = test[:, first : first + block_tokens]
        told_bits = 0
        if how == "base 8 bit":
            told_bits, bases = 8, np.arange(250)
            options = [at_base(np.full(block.shape[::2], base), code_bits) for base in bases]
            chosen = at_base(bases[best(exponent_histogram(block), options, code_bits)], code_bits)
        elif how == "shift 4 bit":
            told_bits, shifts = 4, np.arange(-8, 8)
            options = [moved(windows, np.full(block.shape[::2], shift)) for shift in shifts]
            chosen = moved(windows, shifts[best(exponent_histogram(block), options, code_bits)])
        else:
            chosen = windows
        packed: Packed = escape.encode(block, chosen, block_tokens, code_bits)
        assert np.array_equal(escape.decode(packed, code_bits), block)
        total_bytes += len(packed.pages) + told_bits * block.shape[0] * block.shape[2] / 8
    return 8 * total_bytes / (test[:, : first + block_tokens].size)


def main(folder: Path) -> None:
    def load(name: str, kind: str) -> NDArray[np.uint16]:
        return np.load(folder / f"smollm2_135m_{name}_{kind}.npy", allow_pickle=False)

    print(
        "format, positions, K/V, block | "
        + " | ".join(("calibrated", "rotated", "base 8 bit", "shift 4 bit"))
    )
    for name, code_bits in FIRST_BITS.items():
        for positions in ("early", "late"):
            for kind in "kv":
                prose = load("prose_L14", kind)
                late = positions == "late"
                calibration = prose if late else prose[:, :1024]
                test = load("code_pos6144_L14", kind) if late else prose[:, 1024:]
                copies = [rotate_keys(calibration, tokens, ROPE_THETA) for tokens in ROTATIONS_TOKENS]
                plain = calibrate([calibration])
                rotated = calibrate([calibration, *copies]) if kind == "k" else plain
                for block_tokens in BLOCKS_TOKENS:
                    ratios = [
                        16 / packed_bits(test, block_tokens, code_bits, how, windows)
                        for how, windows in (
                            ("calibrated", plain),
                            ("rotated", rotated),
                            ("base 8 bit", plain),
                            ("shift 4 bit", plain),
                        )
                    ]
                    figures = " | ".join(f"{ratio:.4f}" for ratio in ratios)
                    print(f"{name}, {positions}, {kind.upper()}, {block_tokens} | {figures}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/bench_codec_adapt.py KV_FOLDER")
    main(Path(sys.argv[1]))
