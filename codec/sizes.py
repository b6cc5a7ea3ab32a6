"""The sizes of each KV format for the simulator: reads `codec/data/sizes.csv`, standard library only.

`python -m kvfold.codec.survey KV_FOLDER` measures and writes that table.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

COLUMNS = (
    "format",
    "codec_block_tokens",
    "kind",
    "source",
    "quantile",
    "bits_per_element",
    "raw_block_share",
)
BF16_BITS = 16.0
SIZES_CSV = Path(__file__).parent / "data" / "sizes.csv"


class DecodeCost(NamedTuple):
    """What decoding one element costs, and how that is known."""

    int_ops: float  # an estimate for packed registers, re-placing sign and mantissa included
    overlap: float  # share of the shorter of reading and decoding that hides behind the longer
    sizes_origin: str  # of the format's sizes, not of this cost
    basis: str


#: Formats whose lists live in a pool of chunks, so that a block takes what it needs; those of others take a slot.
CHUNKED = ("fixed3", "esc3", "esc2-2", "tag8", "tag32")

_ESTIMATE = "decoding estimated, its overlap with reading not measured and taken as 0"
# GAAC's preprint accounts for a step with -294.3 us of reading and +49.2 us of computing, which add up: nothing is
# hidden. `fixed4`, bases and exceptions included, was measured on an H200: 373.6 us where the best BF16 kernel
# took 491.2 (1.315x, its bytes allow 1.326x; docs/kernels.md). `fixed3` took 367.1 where it took 492.0 (1.340x of
# 1.420x; docs/kernels_dense.md).
DECODE_COSTS = {
    "bf16": DecodeCost(0.0, 0.0, "published", "nothing to decode"),
    "fp8-e4m3": DecodeCost(0.0, 0.0, "published", "lossy cast; tensor cores read it as it is"),
    "fp8-e5m2": DecodeCost(0.0, 0.0, "published", "lossy cast; tensor cores read it as it is"),
    "gaac": DecodeCost(7.75, 0.0, "measured", "decoding estimated (7.5 to 8), no overlap as published"),
    "gaac-2bit": DecodeCost(10.0, 0.0, "measured", f"{_ESTIMATE} (10 or more)"),
    "fixed4": DecodeCost(4.5, 1.0, "measured", "decoding estimated, its overlap measured on an H200"),
    "fixed3": DecodeCost(4.75, 1.0, "measured", "decoding estimated, its overlap measured on an H200"),
    "esc3": DecodeCost(11.0, 0.0, "measured", f"{_ESTIMATE} (10 to 12)"),
    "esc2-2": DecodeCost(17.0, 0.0, "measured", f"{_ESTIMATE} (16 to 18)"),
    "tag8": DecodeCost(6.75, 0.0, "measured", f"{_ESTIMATE} (6.5 to 7)"),
    "tag32": DecodeCost(6.25, 0.0, "measured", f"{_ESTIMATE} (6 to 6.5)"),
}


@dataclass(frozen=True, slots=True)
class BlockBits:
    """Measured sizes of the blocks of one kind (k or v) of one source, in bits per element.

    A block that is not raw takes `encoded_bits` at the quantile `shares` (linear between them), moved so that
    their mean is `resident_bits`; where `chunked` is False it takes `resident_bits`, its slot.
    """

    kind: str
    shares: tuple[float, ...]
    encoded_bits: tuple[float, ...]
    resident_bits: float
    raw_block_share: float
    chunked: bool


@dataclass(frozen=True, slots=True)
class FormatSizes:
    """How large a format's KV is, and what decoding costs; bits are per element, K and V together."""

    name: str
    block_tokens: int  # tokens packed at once; for bf16 the pool page
    encoded_bits: float  # mean of encoded blocks, all metadata included
    slot_bits: float  # of a fixed slot, or of main plane and list chunks on average; table entry included
    raw_block_share: float  # share of blocks (one layer, K or V) that do not fit and stay raw BF16
    decode_int_ops_per_element: float
    decode_overlap: float  # share of the shorter of (reading, decoding) hidden behind the longer
    source: str
    origin: str  # measured | modelled | published
    blocks: tuple[BlockBits, ...] = ()  # what the means above are of; empty: no distribution is known

    @property
    def lossless(self) -> bool:
        """Whether every BF16 value comes back."""
        return "fp8-" not in self.name

    @property
    def packed(self) -> bool:
        """Whether a codec packs whole blocks, so that tokens wait in a raw tail until theirs is full."""
        return self.slot_bits < BF16_BITS and not self.name.startswith("fp8-")

    @property
    def resident_bits(self) -> float:
        """Mean bits per element in memory. A raw block's own table entry (< 0.01 bit) is left out."""
        return (1 - self.raw_block_share) * self.slot_bits + self.raw_block_share * BF16_BITS

    @property
    def resident_saving(self) -> float:
        """1 - resident bytes / BF16 bytes of the same full blocks."""
        return 1 - self.resident_bits / BF16_BITS


def load_sizes(path: Path | None = None) -> dict[str, FormatSizes]:
    """Sizes by format name, from the bundled table or another with the same columns.

    Every (kind, source) of a format weighs the same. The bundled sources are one middle layer and two extreme
    ones (first layer, widest values), so their mean is on the large side of a whole model's.
    Raises ValueError, naming file and line, for other columns, unknown formats and values that are no number.
    """
    path = path or SIZES_CSV
    rows_of: dict[str, list[_Row]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = tuple(reader.fieldnames or ())
        if names != COLUMNS:
            raise ValueError(f"{path}:1: columns must be {','.join(COLUMNS)}, got {','.join(names)}")
        for fields in reader:
            try:
                row = _Row.parse(fields)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{reader.line_num}: {error}") from None
            rows_of.setdefault(row.format, []).append(row)
    return {name: _sizes(path, name, rows) for name, rows in rows_of.items()}


@dataclass(frozen=True, slots=True)
class _Row:
    format: str
    block_tokens: int
    kind: str
    source: str
    quantile: str
    bits_per_element: float
    raw_block_share: float

    @staticmethod
    def parse(fields: dict[str, str]) -> _Row:
        if fields["format"] not in DECODE_COSTS:
            raise ValueError(f"format must be one of {', '.join(DECODE_COSTS)}, got {fields['format']!r}")
        return _Row(
            format=fields["format"],
            block_tokens=int(fields["codec_block_tokens"]),
            kind=fields["kind"],
            source=fields["source"],
            quantile=fields["quantile"],
            bits_per_element=float(fields["bits_per_element"]),
            raw_block_share=float(fields["raw_block_share"] or 0),
        )


def _sizes(path: Path, name: str, rows: list[_Row]) -> FormatSizes:
    means = [row.bits_per_element for row in rows if row.quantile == "mean"]
    slots = [row for row in rows if row.quantile == "slot"]
    blocks = {row.block_tokens for row in rows}
    kinds = {row.kind for row in rows}
    if not means or len(means) != len(slots) or len(blocks) != 1 or kinds != {"k", "v"}:
        raise ValueError(
            f"{path}: {name} needs one mean and one slot row per kind (k, v) and source, all of one "
            f"codec_block_tokens; got {len(means)} mean rows, {len(slots)} slot rows, kinds {sorted(kinds)}, "
            f"codec_block_tokens {sorted(blocks)}"
        )
    # Slots weigh by the blocks that use them, so that resident_bits is exact.
    packed_share = sum(1 - slot.raw_block_share for slot in slots)
    slot_bits = sum((1 - slot.raw_block_share) * slot.bits_per_element for slot in slots)
    cost = DECODE_COSTS[name]
    return FormatSizes(
        name=name,
        block_tokens=blocks.pop(),
        encoded_bits=sum(means) / len(means),
        slot_bits=slot_bits / packed_share if packed_share else BF16_BITS,
        raw_block_share=1 - packed_share / len(slots),
        decode_int_ops_per_element=cost.int_ops,
        decode_overlap=cost.overlap,
        source="; ".join([*dict.fromkeys(row.source for row in rows), cost.basis]),
        origin=cost.sizes_origin,
        blocks=tuple(_block_bits(name, slot, rows) for slot in rows if slot.quantile == "slot"),
    )


def _block_bits(name: str, slot: _Row, rows: list[_Row]) -> BlockBits:
    """The quantiles that belong to one slot row."""
    points = sorted(
        (float(row.quantile), row.bits_per_element)
        for row in rows
        if (row.kind, row.source) == (slot.kind, slot.source) and row.quantile not in ("mean", "slot")
    )
    return BlockBits(
        kind=slot.kind,
        shares=tuple(share for share, _ in points),
        encoded_bits=tuple(bits for _, bits in points),
        resident_bits=slot.bits_per_element,
        raw_block_share=slot.raw_block_share,
        chunked=name in CHUNKED,
    )
