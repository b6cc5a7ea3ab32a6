"""Ratio, speed and random access of every format beside general compressors, on the same tensors in one run.

    python tests/bench_codec.py KV_FOLDER

Not a test: a person starts it, and docs/codec.md holds the last figures. The compressors are no dependency of the
project: `pip install zstandard zipnn safetensors pcodec` for the run; one that is absent is named and skipped.

Tensors: the test tokens of the survey's pairs, K and V; windows come from the pairs' other tokens (K rotated as
well), so nothing is calibrated on what it packs. One thread. Speeds are BF16 bytes per second, the best of
several runs over all tensors. *By block*: every block of 64 tokens compressed alone, which is what random access
to one block costs a compressor; pages of the formats are blocks anyway.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfold.codec.formats import FORMATS, Format, with_parameters
from kvfold.codec.packed import Packed
from kvfold.codec.survey import PAIRS, ROPE_THETA, ROTATIONS_TOKENS
from kvfold.codec.windows import Windows, calibrate, rotate_keys

RUNS = 7
BLOCK_TOKENS = 64
OTHER_ORDERS = ("gaac:axis=token", "fixed4:kind=v", "fixed3:kind=v")


@dataclass(frozen=True)
class Tensor:
    patterns: NDArray[np.uint16]  # [kv_head, token, head_dim]
    windows: Windows


@dataclass(frozen=True)
class Compressor:
    """A compressor of bytes that holds BF16 patterns."""

    name: str
    compress: Callable[[bytes], Any]
    decompress: Callable[[Any], bytes]


def tensors(folder: Path) -> list[Tensor]:
    found = []
    for pair in PAIRS:
        for kind in "kv":
            calibration = np.load(folder / f"{pair.calibration}_{kind}.npy")[:, pair.calibration_tokens]
            test = np.load(folder / f"{pair.test}_{kind}.npy")[:, pair.test_tokens]
            copies = [calibration]
            if kind == "k":
                copies += [rotate_keys(calibration, tokens, ROPE_THETA) for tokens in ROTATIONS_TOKENS]
            found.append(Tensor(np.ascontiguousarray(test), calibrate(copies)))
    return found


def compressors() -> tuple[list[Compressor], list[str]]:
    """Those that are installed, and why the others are not there."""
    found, absent = [], []
    try:
        import zstandard

        found.append(
            Compressor(
                "zstd-3", zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress
            )
        )
    except ImportError as error:
        absent.append(f"zstd-3: {error}")
    try:
        import zipnn

        both = zipnn.ZipNN(bytearray_dtype="bfloat16", threads=1)
        # It changes the buffer that it is given.
        found.append(Compressor("zipnn", lambda data: both.compress(bytearray(data)), both.decompress))
    except ImportError as error:
        absent.append(f"zipnn: {error}")
    try:
        from pcodec import ChunkConfig, standalone

        def compress(data: bytes) -> bytes:
            return standalone.simple_compress(np.frombuffer(data, np.uint16), ChunkConfig())

        found.append(
            Compressor("pcodec", compress, lambda data: standalone.simple_decompress(data).tobytes())
        )
    except ImportError as error:
        absent.append(f"pcodec: {error}")
    return found, absent


def fastest_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def one_page(packed: Packed) -> Packed:
    """The first page alone: what a reader of one block is given."""
    kv_heads, _, head_dim = packed.shape
    end = packed.page_starts[1]
    return Packed(
        (kv_heads, packed.block_tokens, head_dim),
        packed.block_tokens,
        packed.pages[:end],
        packed.page_starts[:2],
        packed.tail[:, :0],
        packed.windows,
        packed.axis,
    )


def line(name: str, raw_bytes: int, sizes: tuple[int, int], seconds: tuple[float, float, float]) -> str:
    whole, by_block = (raw_bytes / size for size in sizes)
    encode_s, decode_s, block_s = seconds
    speeds = f"{raw_bytes / encode_s / 1e9:.2f} | {raw_bytes / decode_s / 1e9:.2f}"
    return f"| {name} | {whole:.3f} | {by_block:.3f} | {speeds} | {block_s * 1e6:.0f} |"


def format_line(name: str, kv_format: Format, inputs: list[Tensor]) -> str:
    block_tokens = kv_format.block_tokens
    packed = [kv_format.encode(tensor.patterns, tensor.windows, block_tokens) for tensor in inputs]
    for tensor, pages in zip(inputs, packed, strict=True):
        assert np.array_equal(kv_format.decode(pages), tensor.patterns)
    first = one_page(packed[0])
    seconds = (
        fastest_s(lambda: [kv_format.encode(t.patterns, t.windows, block_tokens) for t in inputs]),
        fastest_s(lambda: [kv_format.decode(pages) for pages in packed]),
        fastest_s(lambda: kv_format.decode(first)),
    )
    size = sum(len(pages.pages) for pages in packed)
    label = f"`{name}`, blocks of {block_tokens}"
    return line(label, sum(tensor.patterns.nbytes for tensor in inputs), (size, size), seconds)


def compressor_line(compressor: Compressor, inputs: list[Tensor]) -> str:
    whole = [tensor.patterns.tobytes() for tensor in inputs]
    blocks = [
        np.ascontiguousarray(tensor.patterns[:, first : first + BLOCK_TOKENS]).tobytes()
        for tensor in inputs
        for first in range(0, tensor.patterns.shape[1], BLOCK_TOKENS)
    ]
    packed = [compressor.compress(data) for data in whole]
    alone = [compressor.compress(data) for data in blocks]
    for data, compressed in zip([*whole, *blocks], [*packed, *alone], strict=True):
        assert bytes(compressor.decompress(compressed)) == data
    seconds = (
        fastest_s(lambda: [compressor.compress(data) for data in whole]),
        fastest_s(lambda: [compressor.decompress(data) for data in packed]),
        fastest_s(lambda: compressor.decompress(alone[0])),
    )
    sizes = (sum(map(len, packed)), sum(map(len, alone)))
    return line(compressor.name, sum(map(len, whole)), sizes, seconds)


def main(folder: Path) -> None:
    inputs = tensors(folder)
    rivals, absent = compressors()
    print("| | ratio | ratio by block | encode GB/s | decode GB/s | one block, us |")
    print("|---|---|---|---|---|---|")
    for name in (*FORMATS, *OTHER_ORDERS):
        print(format_line(name, with_parameters(name), inputs), flush=True)
    for rival in rivals:
        print(compressor_line(rival, inputs), flush=True)
    for reason in absent:
        print(f"skipped {reason}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/bench_codec.py KV_FOLDER")
    main(Path(sys.argv[1]))
