"""What a format saves on given arrays: encoded (its bytes) and resident (its slots, or planes and chunks), apart.

Both sides of every ratio are the same full blocks; the raw tail is reported by its share alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.residence import pooled_bytes, raw_bytes, slotted_bytes
from kvfold.codec.windows import calibrate, exponent_histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvfold.codec.formats import Format
    from kvfold.codec.packed import Packed
    from kvfold.codec.windows import Windows

SLOT_ALIGN_BYTES = 16
# How far the largest page of other text may lie above the largest calibration page. Measured on SmolLM2-135M in
# blocks of 64 tokens, always on later tokens than those calibrated (K / V): layer 0 +1.28 / +0.27 %, layer 1
# +1.10 / +0.36 %, layer 14 +1.28 / +0.37 %; K with rotated copies in its calibration at most +0.55 %. The next
# half per cent up is the same when any one of these layers is left out, but with 128 pages none of which
# overflows the share of raw pages is only known to be below 2.3 % (95 %). One per cent of slack costs 0.7 points
# of resident saving, one per cent of pages left raw 0.28: the slack pays where it keeps 4 % of the pages packed.
SLOT_SLACK = 0.015


def slot_bytes(calibration: Sequence[Packed], slack: float = SLOT_SLACK) -> int:
    """The slot for pages like these: the largest page plus slack, a multiple of 16 bytes, at most a raw page.

    Pages that are no smaller than raw ones stay raw anyway and ask for no slot. The pages must have been packed
    with the windows that they calibrated. Quantiles below the maximum are a trap: a page over its slot stays
    raw and loses its whole saving. Raises ValueError when there is no page or the pages differ in size.
    """
    raw_sizes = {raw_bytes(packed) for packed in calibration}
    if len(raw_sizes) != 1:
        raise ValueError(f"calibration pages must all have one raw size, got {sorted(raw_sizes)}")
    raw_size = raw_sizes.pop()
    if not sum(packed.page_count for packed in calibration):
        raise ValueError("a slot needs at least one full calibration block, got none")
    sizes = np.concatenate([packed.page_bytes for packed in calibration])
    largest = int(sizes[sizes < raw_size].max(initial=0)) or raw_size
    with_slack = int(np.ceil(largest * (1 + slack) / SLOT_ALIGN_BYTES)) * SLOT_ALIGN_BYTES
    return min(with_slack, raw_size)


def calibrate_format(
    arrays: Sequence[NDArray[np.uint16]], kv_format: Format, block_tokens: int
) -> tuple[Windows, int]:
    """Windows and slot bytes from arrays ``uint16 [kv_head, token, head_dim]`` of one layer, K or V."""
    windows = calibrate([kv_format.coded(array) for array in arrays])
    packed = [kv_format.encode(array, windows, block_tokens) for array in arrays]
    return windows, slot_bytes(packed, 0.0 if kv_format.fixed_size else SLOT_SLACK)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Counts over the pages of one or more arrays; every share and ratio follows from them."""

    elements: int  # of full blocks
    tail_elements: int
    page_bits: NDArray[np.float64]  # encoded bits per element of each page, all metadata included
    encoded_bits: int
    resident_bytes: int  # slots, table entries, pages kept raw
    raw_pages: int  # pages that do not fit their slot
    # Resident as main planes, chunks of lists, table entries and pages kept raw; None for formats without lists.
    pooled_bytes: int | None
    entropy_bits: float  # of sign, mantissa and order-0 exponents per head-channel
    exceptions: int  # elements outside their narrow window
    mode_counts: dict[str, int]

    @property
    def bits_per_element(self) -> float:
        return self.encoded_bits / self.elements

    @property
    def encoded_ratio(self) -> float:
        return 16 / self.bits_per_element

    @property
    def resident_saving(self) -> float:
        """1 - (slots + table entries + pages kept raw) / BF16 bytes of the same full blocks."""
        return 1 - self.resident_bytes / (2 * self.elements)

    @property
    def pooled_saving(self) -> float | None:
        """1 - (main planes + chunks of lists + table entries + pages kept raw) / the same; None without lists."""
        return None if self.pooled_bytes is None else 1 - self.pooled_bytes / (2 * self.elements)

    @property
    def entropy_bound_ratio(self) -> float:
        """16 / (8 + H): the reach of a static exponent code per head-channel, fitted to this very data."""
        return 16 * self.elements / self.entropy_bits

    @property
    def exception_share(self) -> float:
        return self.exceptions / self.elements

    @property
    def raw_block_share(self) -> float:
        return self.raw_pages / len(self.page_bits)

    @property
    def raw_tail_share(self) -> float:
        return self.tail_elements / (self.elements + self.tail_elements)

    @property
    def mode_shares(self) -> dict[str, float]:
        groups = sum(self.mode_counts.values())
        return {name: count / groups for name, count in self.mode_counts.items()}


def measure(
    patterns: NDArray[np.uint16], packed: Packed, windows: Windows, kv_format: Format, slot_bytes: int
) -> Measured:
    """Counts of one array ``uint16 [kv_head, token, head_dim]``, packed, in slots of ``slot_bytes``.

    Raises ValueError when the array holds no full block.
    """
    if packed.page_count == 0:
        raise ValueError(
            f"one full block of {packed.block_tokens} tokens is needed, got {packed.shape[1]} tokens"
        )
    full = patterns[:, : packed.page_count * packed.block_tokens]
    tables = packed.page_count * kv_format.table_entry_bytes
    pooled = None
    if kv_format.main_bytes is not None:
        main = kv_format.main_bytes(packed.shape[0], packed.block_tokens, packed.shape[2])
        pooled = int(pooled_bytes(packed, main).sum()) + tables
    return Measured(
        elements=full.size,
        tail_elements=packed.tail.size,
        page_bits=packed.page_bytes * 8 / packed.page_elements,
        encoded_bits=8 * len(packed.pages),
        resident_bytes=int(slotted_bytes(packed, slot_bytes).sum()) + tables,
        raw_pages=int(np.count_nonzero(packed.page_bytes > slot_bytes)),
        pooled_bytes=pooled,
        entropy_bits=full.size * kv_format.plain_bits + exponent_entropy_bits(kv_format.coded(full)),
        exceptions=kv_format.count_exceptions(full, packed),
        mode_counts=kv_format.mode_counts(packed),
    )


def exponent_entropy_bits(patterns: NDArray[np.uint16]) -> float:
    """Order-0 entropy of the exponents, a table per head-channel, summed over elements (plug-in estimate)."""
    counts = exponent_histogram(patterns)  # [kv_heads, head_dim, 256]
    tokens = patterns.shape[-2]
    used = counts[counts > 0]
    return float(np.sum(used * np.log2(tokens / used)))


def total(parts: Sequence[Measured]) -> Measured:
    """The counts of several arrays together."""
    modes = [part.mode_counts for part in parts]
    pooled = [part.pooled_bytes for part in parts]
    return Measured(
        elements=sum(part.elements for part in parts),
        tail_elements=sum(part.tail_elements for part in parts),
        page_bits=np.concatenate([part.page_bits for part in parts]),
        encoded_bits=sum(part.encoded_bits for part in parts),
        resident_bytes=sum(part.resident_bytes for part in parts),
        raw_pages=sum(part.raw_pages for part in parts),
        pooled_bytes=None if None in pooled else sum(part for part in pooled if part is not None),
        entropy_bits=sum(part.entropy_bits for part in parts),
        exceptions=sum(part.exceptions for part in parts),
        mode_counts={name: sum(counts[name] for counts in modes) for name in modes[0]},
    )
