"""Measure the formats' sizes on real K/V tensors, always on tokens that calibration did not see.

    python -m kvfold.codec.survey KV_FOLDER

writes `codec/data/sizes.csv` from the SmolLM2-135M tensors in KV_FOLDER. Windows of K come from the
calibration keys and from copies of them rotated to later positions; values do not depend on position.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.formats import FORMATS
from kvfold.codec.ratio import calibrate_format, measure
from kvfold.codec.sizes import BF16_BITS, COLUMNS, SIZES_CSV
from kvfold.codec.windows import rotate_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROPE_THETA = 1e5  # SmolLM2-135M
ROTATIONS_TOKENS = (2048, 4096, 6144)  # to the end of its 8192 positions
BLOCK_TOKENS = {"bf16": 16, "gaac": 64}
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


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


def survey(folder: Path) -> list[dict[str, str]]:
    """The rows of sizes.csv from the tensors in ``folder``.

    Per format, kind and pair: quantiles of the blocks' encoded bits per element, their mean, and the slot
    (its table entry included) with the share of blocks that do not fit it.
    """
    rows = [
        _row(
            "bf16",
            kind,
            "16 bits by definition",
            str(quantile),
            BF16_BITS,
            "0.000000" if quantile == "slot" else "",
        )
        for kind in "kv"
        for quantile in (*(f"{quantile:g}" for quantile in QUANTILES), "mean", "slot")
    ]
    for kind in "kv":
        for pair in PAIRS:
            calibration = np.load(folder / f"{pair.calibration}_{kind}.npy", allow_pickle=False)
            test = np.load(folder / f"{pair.test}_{kind}.npy", allow_pickle=False)
            rows += _gaac_rows(kind, pair, calibration[:, pair.calibration_tokens], test[:, pair.test_tokens])
    return rows


def _gaac_rows(
    kind: str, pair: Pair, calibration: NDArray[np.uint16], test: NDArray[np.uint16]
) -> list[dict[str, str]]:
    gaac, block_tokens = FORMATS["gaac"], BLOCK_TOKENS["gaac"]
    copies = [calibration]
    source = f"SmolLM2-135M {pair.name}"
    if kind == "k":
        copies += [rotate_keys(calibration, tokens, ROPE_THETA) for tokens in ROTATIONS_TOKENS]
    windows, slot = calibrate_format(copies, gaac, block_tokens)
    packed = gaac.encode(test, windows, block_tokens)
    measured = measure(test, packed, windows, gaac, slot)
    slot_bits = (slot + gaac.table_entry_bytes) * 8 / packed.page_elements
    return [
        *(
            _row("gaac", kind, source, f"{quantile:g}", float(bits))
            for quantile, bits in zip(QUANTILES, np.quantile(measured.page_bits, QUANTILES), strict=True)
        ),
        _row("gaac", kind, source, "mean", measured.bits_per_element),
        _row("gaac", kind, source, "slot", slot_bits, f"{measured.raw_block_share:.6f}"),
    ]


def _row(
    name: str, kind: str, source: str, quantile: str, bits: float, raw_block_share: str = ""
) -> dict[str, str]:
    values = (name, str(BLOCK_TOKENS[name]), kind, source, quantile, f"{bits:.6f}", raw_block_share)
    return dict(zip(COLUMNS, values, strict=True))


def write_sizes(folder: Path, path: Path = SIZES_CSV) -> None:
    """Measure the tensors in ``folder`` and write the table to ``path``."""
    rows = survey(folder)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m kvfold.codec.survey KV_FOLDER")
    write_sizes(Path(sys.argv[1]))
