"""Lossless formats on top of FP8: `gaac+fp8-e4m3`, `esc3+fp8-e5m2` and their like.

The values are cast to FP8 first (fp8.py), which loses bits once; what follows keeps every FP8 bit. FP8 has
sign, 4 or 5 exponent bits and 3 or 2 mantissa bits, so the code for BF16's exponents serves as it is: each FP8
pattern is *spread* over the places of a BF16 pattern,

    sign in bit 15, exponent + 1 in bits 14..7 (1..16 or 1..32), mantissa in bits 2..0 or 1..0,

packed by the BF16 coder, and then the places that FP8 leaves empty are taken out of each page again. On E4M3
the wide window is not calibrated but set, so that it holds every exponent that it can: from 1 on in `gaac`, which
codes all 16, and from 0 on in `esc3` and `esc2-2`, whose nibbles give up the lowest of a window.

A coded page is the coder's page with these changes, which need nothing but the sizes to be undone:

* its sign-mantissa plane, a byte per element, becomes 4 bits (E4M3: sign in bit 3) or 3 bits (E5M2: sign in
  bit 2) per element. Element i stands at bits ``4 i`` or ``3 i`` and up of the plane, least significant bit of
  a byte first;
* in `gaac` on E4M3 the tags become 1 bit per group, at bit ``g`` of a head's tags: mode 2 does not occur, because
  the wide window holds all exponents;
* zeros follow, so that the page shrinks by a multiple of 16 bytes and what comes after keeps its alignment.

Pointers inside the page still count as in the coder's page. A page that would not be smaller than its FP8
bytes is a *raw page*: those bytes, ``[kv_head, block_token, head_dim]``. A coded page is always smaller than a
raw one, so the size tells them apart. The tail is FP8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Packed, join_blocks, split_blocks
from kvfold.codec.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvfold.codec.fp8 import Fp8

ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Coder:
    """The BF16 format underneath, and where its pages keep what FP8 needs less of."""

    encode: Callable[[NDArray[np.uint16], Windows, int], Packed]
    decode: Callable[[Packed], NDArray[np.uint16]]
    e4m3_wide_base: int  # of spread exponents, the same for all channels
    tag_group: int  # elements per 2-bit tag right after the sign-mantissa plane; 0: nothing to narrow there


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a page, in the coder's form and in the stacked one."""

    kv_heads: int
    elements: int  # of a page
    tag_bytes: int  # of one head, 2 bits each; 0 where tags stay as they are
    value_bits: int  # sign and mantissa of one FP8 value

    @property
    def plane_at(self) -> int:
        """Where the sign-mantissa plane starts: after a uint32 per head."""
        return 4 * self.kv_heads

    @property
    def tags_at(self) -> int:
        return self.plane_at + self.elements

    @property
    def wide_bytes(self) -> int:
        """The coder's page up to the end of what changes."""
        return self.tags_at + self.kv_heads * self.tag_bytes

    @property
    def plane_bytes(self) -> int:
        return -(-self.elements * self.value_bits // 8)

    @property
    def narrow_tag_bytes(self) -> int:
        return -(-self.tag_bytes // 2)

    @property
    def saved_bytes(self) -> int:
        """By how much a page shrinks: a multiple of 16."""
        used = self.plane_at + self.plane_bytes + self.kv_heads * self.narrow_tag_bytes
        return (self.wide_bytes - used) // ALIGN_BYTES * ALIGN_BYTES

    @property
    def narrow_bytes(self) -> int:
        """The stacked page up to the end of what changed."""
        return self.wide_bytes - self.saved_bytes


def spread(values: NDArray[np.uint8], kind: Fp8) -> NDArray[np.uint16]:
    """FP8 patterns in the places of BF16 patterns."""
    wide = values.astype(np.uint16)
    mantissa = wide & np.uint16((1 << kind.mantissa_bits) - 1)
    exponent = ((wide & np.uint16(0x7F)) >> np.uint16(kind.mantissa_bits)) + np.uint16(1)
    return (wide & np.uint16(0x80)) << np.uint16(8) | exponent << np.uint16(7) | mantissa


def gather(patterns: NDArray[np.uint16], kind: Fp8) -> NDArray[np.uint8]:
    """The inverse of ``spread``; CorruptDataError for patterns that are no spread FP8 value."""
    mantissa = patterns & np.uint16(0x7F)
    exponent = (patterns >> np.uint16(7) & np.uint16(0xFF)) - np.uint16(1)
    if (mantissa >> kind.mantissa_bits).any() or (exponent >> kind.exponent_bits).any():
        raise CorruptDataError(
            f"patterns must have exponents 1 to {1 << kind.exponent_bits} and {kind.mantissa_bits} mantissa bits, "
            f"got exponents {int(exponent.min()) + 1 & 0xFF} to {int(exponent.max()) + 1 & 0xFF}, "
            f"mantissas up to {int(mantissa.max())}"
        )
    sign = patterns >> np.uint16(8) & np.uint16(0x80)
    return (sign | exponent << np.uint16(kind.mantissa_bits) | mantissa).astype(np.uint8)


def encode_bytes(
    values: NDArray[np.uint8],
    windows: Windows,
    block_tokens: int,
    coder: Coder,
    kind: Fp8,
    scale: float = 1.0,
) -> Packed:
    """Pack FP8 patterns ``uint8 [kv_head, token, head_dim]``; windows are of ``spread(values)``.

    Raises what the coder raises.
    """
    blocks, tail = split_blocks(values, block_tokens, np.uint8)
    coded = coder.encode(spread(values, kind), _fitted(windows, coder, kind), block_tokens)
    layout = _layout(coded, coder, kind)
    sizes = coded.page_bytes - layout.saved_bytes
    is_raw = sizes >= layout.elements
    sizes[is_raw] = layout.elements
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    pages = np.zeros(int(starts[-1]), np.uint8)
    for page in range(len(sizes)):
        if is_raw[page]:
            pages[starts[page] : starts[page + 1]] = blocks[page].reshape(-1)
            continue
        wide = coded.pages[coded.page_starts[page] : coded.page_starts[page + 1]]
        end = starts[page] + layout.narrow_bytes
        pages[starts[page] : end] = _narrow(wide[: layout.wide_bytes], layout)
        pages[end : starts[page + 1]] = wide[layout.wide_bytes :]
    return replace(coded, pages=pages, page_starts=starts, tail=tail, scale=float(np.float32(scale)))


def decode_bytes(packed: Packed, coder: Coder, kind: Fp8) -> NDArray[np.uint8]:
    """The FP8 patterns ``uint8 [kv_head, token, head_dim]``, bit for bit.

    Raises CorruptDataError when ``encode_bytes`` cannot have written the pages.
    """
    layout = _layout(packed, coder, kind)
    starts, sizes = packed.page_starts, packed.page_bytes
    if len(sizes) != packed.page_count or starts[0] != 0 or starts[-1] != len(packed.pages):
        raise CorruptDataError(
            f"page_starts must give {packed.page_count} pages in {len(packed.pages)} bytes, "
            f"got {len(sizes)} pages from {int(starts[0])} to {int(starts[-1])}"
        )
    is_raw = sizes == layout.elements
    if (bad := ~is_raw & ((sizes < layout.narrow_bytes) | (sizes > layout.elements))).any():
        raise CorruptDataError(
            f"a page must have {layout.narrow_bytes} to {layout.elements} bytes, got {sizes[bad][:5].tolist()}"
        )
    kv_heads, _, head_dim = packed.shape
    blocks = np.empty((packed.page_count, kv_heads, packed.block_tokens, head_dim), np.uint8)
    coded = np.flatnonzero(~is_raw)
    for page in np.flatnonzero(is_raw):
        blocks[page] = packed.pages[starts[page] : starts[page + 1]].reshape(blocks.shape[1:])
    wide_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[coded] + layout.saved_bytes)])
    wide = np.empty(int(wide_starts[-1]), np.uint8)
    for page, start, end in zip(coded, wide_starts[:-1], wide_starts[1:], strict=True):
        narrow = packed.pages[starts[page] : starts[page + 1]]
        wide[start : start + layout.wide_bytes] = _widen(narrow[: layout.narrow_bytes], layout)
        wide[start + layout.wide_bytes : end] = narrow[layout.narrow_bytes :]
    spread_patterns = coder.decode(
        Packed(
            shape=(kv_heads, len(coded) * packed.block_tokens, head_dim),
            block_tokens=packed.block_tokens,
            pages=wide,
            page_starts=wide_starts,
            tail=np.empty((kv_heads, 0, head_dim), np.uint16),
            windows=packed.windows,
            axis=packed.axis,
        )
    )
    blocks[coded] = split_blocks(gather(spread_patterns, kind), packed.block_tokens, np.uint8)[0]
    return join_blocks(blocks, packed.tail)


def _fitted(windows: Windows, coder: Coder, kind: Fp8) -> Windows:
    if kind.exponent_bits == 4:
        return replace(windows, wide_base=np.full_like(windows.wide_base, coder.e4m3_wide_base))
    return windows


def layout_of(page_shape: tuple[int, int, int], coder: Coder, kind: Fp8) -> Layout:
    """The layout of pages of ``page_shape``: kv_heads, block_tokens, head_dim."""
    kv_heads, block_tokens, head_dim = page_shape
    narrows_tags = coder.tag_group > 0 and kind.exponent_bits == 4
    groups = block_tokens * head_dim // coder.tag_group if narrows_tags else 0
    return Layout(kv_heads, kv_heads * block_tokens * head_dim, -(-groups // 4), 1 + kind.mantissa_bits)


def _layout(packed: Packed, coder: Coder, kind: Fp8) -> Layout:
    kv_heads, _, head_dim = packed.shape
    return layout_of((kv_heads, packed.block_tokens, head_dim), coder, kind)


def _narrow(wide: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """The changed part of a page, from the coder's form; tags are 0 or 1."""
    plane = wide[layout.plane_at : layout.tags_at]
    sign = plane >> np.uint8(7)
    tags = _unpack_bits(wide[layout.tags_at :], 2).reshape(layout.kv_heads, -1)
    narrow = np.zeros(layout.narrow_bytes, np.uint8)
    parts = (
        wide[: layout.plane_at],
        _pack_bits(sign << np.uint8(layout.value_bits - 1) | plane & np.uint8(0x7F), layout.value_bits),
        np.packbits(tags, axis=1, bitorder="little").reshape(-1),
    )
    used = np.concatenate(parts)
    narrow[: len(used)] = used
    return narrow


def _widen(narrow: NDArray[np.uint8], layout: Layout) -> NDArray[np.uint8]:
    """The inverse of ``_narrow``."""
    tags_at = layout.plane_at + layout.plane_bytes
    values = _unpack_bits(narrow[layout.plane_at : tags_at], layout.value_bits)[: layout.elements]
    sign_bit = np.uint8(1 << layout.value_bits - 1)
    plane = np.where(values & sign_bit, values ^ (sign_bit | np.uint8(0x80)), values)
    tags = narrow[tags_at : tags_at + layout.kv_heads * layout.narrow_tag_bytes].reshape(layout.kv_heads, -1)
    bits = np.unpackbits(tags, axis=1, bitorder="little")[:, : 4 * layout.tag_bytes]
    return np.concatenate((narrow[: layout.plane_at], plane, _pack_bits(bits.reshape(-1), 2)))


def _pack_bits(values: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Values below ``2**width`` side by side, the first in the lowest bits."""
    bits = values[:, None] >> np.arange(width, dtype=np.uint8) & np.uint8(1)
    return np.packbits(bits, bitorder="little")


def _unpack_bits(packed: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """The inverse of ``_pack_bits``, as many values as there is room for."""
    bits = np.unpackbits(packed, bitorder="little")
    whole = bits[: len(bits) // width * width].reshape(-1, width)
    return (whole << np.arange(width, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
