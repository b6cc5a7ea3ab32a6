"""Broken containers: what reading one may do is raise CorruptDataError or give the right data, nothing else.

A mutation changes a few bytes, cuts or lengthens the file. A *sealed* mutation has its checksums made right
again afterwards, so that it reaches the rules behind them: the fields of the header and the decoders, which
must then refuse it or rebuild some patterns of the claimed shape, without reading outside their arrays.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec import container
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.header import CRC_BYTES, FIELDS, FIXED_BYTES, PREFIX, TABLE_ROW_BYTES, Header

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST_RUN_BYTES = 16
# Values that sit at the edges of integer fields.
EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """One random mutation: a flipped bit, other bytes, an edge value, a copied run, a cut, bytes too many."""
    changed = bytearray(data)
    at = int(rng.integers(len(data)))
    # Half of them in the header, where the rules are.
    if rng.random() < 0.5:
        at %= int.from_bytes(data[12:16], "little")
    run = int(rng.integers(1, LONGEST_RUN_BYTES + 1))
    match int(rng.integers(6)):
        case 0:
            changed[at] ^= 1 << int(rng.integers(8))
        case 1:
            changed[at : at + run] = rng.bytes(len(changed[at : at + run]))
        case 2:
            width = int(rng.choice((1, 2, 4, 8)))
            edge = EDGES[int(rng.integers(len(EDGES)))].to_bytes(8, "little")[:width]
            changed[at : at + width] = edge[: len(changed) - at]
        case 3:
            source = int(rng.integers(len(data)))
            run = min(run, len(data) - max(at, source))
            changed[at : at + run] = data[source : source + run]
        case 4:
            del changed[at:]
        case _:
            changed += rng.bytes(run)
    return bytes(changed)


def reseal(data: bytes) -> bytes:
    """The same bytes with every checksum recomputed that the header's own claims can place in the file."""
    if len(data) < FIXED_BYTES + CRC_BYTES:
        return data
    changed = bytearray(data)
    header = Header._make(FIELDS.unpack_from(data, PREFIX.size))
    if header.block_tokens > 0:
        tail_crc = zlib.crc32(data[header.tail_at :])
        FIELDS.pack_into(changed, PREFIX.size, *header._replace(tail_crc=tail_crc))
        page_at = header.header_bytes
        for row_at in range(header.table_at, min(page_at - CRC_BYTES, len(data) - 7), TABLE_ROW_BYTES):
            page_end = page_at + int.from_bytes(data[row_at : row_at + 4], "little")
            changed[row_at + 4 : row_at + 8] = zlib.crc32(data[page_at:page_end]).to_bytes(4, "little")
            page_at = page_end
    header_bytes = int.from_bytes(data[12:16], "little")
    if FIXED_BYTES + CRC_BYTES <= header_bytes <= len(data):
        changed[:header_bytes] = container.seal(bytes(changed[: header_bytes - CRC_BYTES]))
    return bytes(changed)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of the mutations of one container."""

    refused: int  # CorruptDataError
    same: int  # the right data all the same
    other: int  # sealed only: other patterns of the claimed shape
    undetected: int  # not sealed, and yet other data: must be 0

    @property
    def mutations(self) -> int:
        return self.refused + self.same + self.other + self.undetected


def try_mutations(data: bytes, count: int, seed: int, *, sealed: bool) -> Outcomes:
    """Unpack a good container after each of ``count`` mutations; any other exception is a fault and passes."""
    rng = np.random.default_rng(seed)
    expected = container.unpack(data)
    outcomes = Counter(
        outcome(reseal(mutate(data, rng)) if sealed else mutate(data, rng), expected, sealed=sealed)
        for _ in range(count)
    )
    return Outcomes(outcomes["refused"], outcomes["same"], outcomes["other"], outcomes["undetected"])


def outcome(data: bytes, expected: NDArray, *, sealed: bool) -> str:
    """``refused``, ``same``, ``other`` or ``undetected``, as in Outcomes."""
    try:
        patterns = container.unpack(data)
    except CorruptDataError:
        return "refused"
    if patterns.dtype == expected.dtype and np.array_equal(patterns, expected):
        return "same"
    return "other" if sealed else "undetected"
