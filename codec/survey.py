"""Measure the formats' sizes on real K/V tensors, always on tokens that calibration did not see.

    python -m kvfold.codec.survey KV_FOLDER

writes `codec/data/sizes.csv` (what the simulator reads) and `codec/data/expected_ratios.csv` (what tests compare
with) from the SmolLM2-135M tensors in KV_FOLDER. Windows of K come from the calibration keys and from copies of
them rotated to later positions; values do not depend on position.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.formats import FORMATS
from kvfold.codec.names import find_format, known_names
from kvfold.codec.ratio import Measured, calibrate_format, measure
from kvfold.codec.sizes import BF16_BITS, COLUMNS, SIZES_CSV
from kvfold.codec.windows import rotate_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROPE_THETA = 1e5  # SmolLM2-135M
ROTATIONS_TOKENS = (2048, 4096, 6144)  # to the end of its 8192 positions
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
EXPECTED_CSV = SIZES_CSV.with_name("expected_ratios.csv")
EXPECTED_COLUMNS = (
    *("format", "codec_block_tokens", "kind", "source", "rotated_calibration"),
    *("encoded_ratio", "entropy_bound_ratio", "worst_block_bits", "exception_share"),
    *("slotted_saving", "pooled_saving", "raw_block_share"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens to calibrate on and other tokens to test on; files are named without kind and ending."""

    name: str
    calibration: str
    calibration_tokens: slice
    test: str
    test_tokens: slice


PAIRS = (
    Pair(
        "layer 14 prose -> code at 6144..8191",
        *("smollm2_135m_prose_L14", slice(None)),
        *("smollm2_135m_code_pos6144_L14", slice(None)),
    ),
    *(
        Pair(
            f"layer {layer} prose -> prose at 1024..2047",
            *(f"smollm2_135m_prose_L{layer:02d}", slice(0, 1024)),
            *(f"smollm2_135m_prose_L{layer:02d}", slice(1024, 2048)),
        )
        for layer in (0, 1)
    ),
)


EARLY_PAIR = Pair(
    "layer 14 prose -> prose at 1024..2047",
    *("smollm2_135m_prose_L14", slice(0, 1024)),
    *("smollm2_135m_prose_L14", slice(1024, 2048)),
)


#: Formats of which every element takes the same bits, in pool pages that no codec packs.
DEFINED_BITS = {"bf16": BF16_BITS, "fp8-e4m3": 8.0, "fp8-e5m2": 8.0}
PAGE_TOKENS = FORMATS["bf16"].block_tokens


def survey(folder: Path) -> list[dict[str, str]]:
    """The rows of sizes.csv from the tensors in ``folder``.

    Per format, kind and pair: quantiles of the blocks' encoded bits per element, their mean, and what they take
    in memory: a slot, or for formats with lists the mean of main plane and chunks; the table entry included, and
    the share of blocks that stay raw.
    """
    rows = [
        _row(
            name,
            kind,
            f"{bits:g} bits by definition",
            str(quantile),
            bits,
            "0.000000" if quantile == "slot" else "",
        )
        for name, bits in DEFINED_BITS.items()
        for kind in "kv"
        for quantile in (*(f"{quantile:g}" for quantile in QUANTILES), "mean", "slot")
    ]
    for name in list(FORMATS)[1:]:
        for kind in "kv":
            for pair in PAIRS:
                rows += _format_rows(folder, name, kind, pair)
    return rows


def _format_rows(folder: Path, name: str, kind: str, pair: Pair) -> list[dict[str, str]]:
    measured, slot = _measure(folder, name, kind, pair, rotated=kind == "k")
    source = f"SmolLM2-135M {pair.name}"
    page_elements = measured.elements // len(measured.page_bits)
    bits = (slot + FORMATS[name].table_entry_bytes) * 8 / page_elements
    raw_share = measured.raw_block_share
    if measured.pooled_bytes is not None:
        bits, raw_share = measured.pooled_bytes * 8 / measured.elements, 0.0
    return [
        *(
            _row(name, kind, source, f"{quantile:g}", float(bits))
            for quantile, bits in zip(QUANTILES, np.quantile(measured.page_bits, QUANTILES), strict=True)
        ),
        _row(name, kind, source, "mean", measured.bits_per_element),
        _row(name, kind, source, "slot", bits, f"{raw_share:.6f}"),
    ]


def _measure(folder: Path, name: str, kind: str, pair: Pair, rotated: bool) -> tuple[Measured, int]:
    """The test tokens of a pair in a format calibrated on the others, and the slot."""

    def load(file: str, tokens: slice) -> NDArray[np.uint16]:
        return np.load(folder / f"{file}_{kind}.npy", allow_pickle=False)[:, tokens]

    calibration, test = load(pair.calibration, pair.calibration_tokens), load(pair.test, pair.test_tokens)
    copies = [calibration]
    if rotated:
        copies += [rotate_keys(calibration, tokens, ROPE_THETA) for tokens in ROTATIONS_TOKENS]
    kv_format = find_format(name)
    windows, slot = calibrate_format(copies, kv_format, kv_format.block_tokens)
    packed = kv_format.encode(test, windows, kv_format.block_tokens)
    return measure(test, packed, windows, kv_format, slot), slot


def expected_ratios(folder: Path) -> list[dict[str, str]]:
    """The rows of expected_ratios.csv: every format on every sample, K with and without rotated calibration."""
    rows = []
    for name in known_names()[1:]:
        for pair in (*PAIRS, EARLY_PAIR):
            for kind, rotated in (("k", False), ("k", True), ("v", False)):
                measured, _ = _measure(folder, name, kind, pair, rotated)
                pooled = measured.pooled_saving
                figures = (
                    *(measured.encoded_ratio, measured.entropy_bound_ratio, float(measured.page_bits.max())),
                    *(measured.exception_share, measured.resident_saving),
                )
                values = (
                    *(name, str(find_format(name).block_tokens), kind, f"SmolLM2-135M {pair.name}"),
                    "yes" if rotated else "no",
                    *(f"{figure:.5f}" for figure in figures),
                    "" if pooled is None else f"{pooled:.5f}",
                    f"{measured.raw_block_share:.5f}",
                )
                rows.append(dict(zip(EXPECTED_COLUMNS, values, strict=True)))
    return rows


def _row(
    name: str, kind: str, source: str, quantile: str, bits: float, raw_block_share: str = ""
) -> dict[str, str]:
    block_tokens = PAGE_TOKENS if name in DEFINED_BITS else FORMATS[name].block_tokens
    values = (name, str(block_tokens), kind, source, quantile, f"{bits:.6f}", raw_block_share)
    return dict(zip(COLUMNS, values, strict=True))


def write_table(rows: list[dict[str, str]], path: Path) -> None:
    """Write rows of one shape as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kvfold.codec.survey KV_FOLDER")
    write_table(survey(Path(sys.argv[1])), SIZES_CSV)
    write_table(expected_ratios(Path(sys.argv[1])), EXPECTED_CSV)
