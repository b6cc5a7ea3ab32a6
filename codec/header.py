"""The first bytes of a container: what it claims, and the rules that its claims must keep (FORMAT.md)."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from kvfold.codec.errors import CorruptDataError

MAGIC = b"\x89KVF\r\n\x1a\n"
VERSION = (0, 1)
PREFIX = struct.Struct("<8sBBHI")  # magic, version major and minor, zero, header bytes
FIELDS = struct.Struct("<48scBBBHHIQQfI")  # in the order of Header
FIXED_BYTES = PREFIX.size + FIELDS.size
CRC_BYTES = 4
TABLE_ROW_BYTES = 8  # a page's bytes and its CRC, uint32 each

NAME_BYTES = 48
KINDS = (b"\0", b"k", b"v")
AXES = ("channel", "token")
# A page is what one GPU program decodes; real ones are a hundred times smaller.
LARGEST_PAGE_ELEMENTS = 1 << 24
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # float32's normal numbers


class Header(NamedTuple):
    """The fixed fields after the prefix, as they stand in the file."""

    name: bytes  # at byte 16; of the format, with its parameters, padded with zeros
    kind: bytes  # at 64
    element_bytes: int  # at 65; 2 for BF16, 1 for FP8
    axis: int  # at 66
    plane_count: int  # at 67
    kv_heads: int  # at 68
    head_dim: int  # at 70
    block_tokens: int  # at 72
    tokens: int  # at 76
    pages_bytes: int  # at 84
    scale: float  # at 92
    tail_crc: int  # at 96

    @property
    def page_count(self) -> int:
        return self.tokens // self.block_tokens

    @property
    def plane_bytes(self) -> int:
        """All window planes together."""
        return self.plane_count * self.kv_heads * self.head_dim

    @property
    def table_at(self) -> int:
        return FIXED_BYTES + self.plane_bytes

    @property
    def header_bytes(self) -> int:
        return self.table_at + self.page_count * TABLE_ROW_BYTES + CRC_BYTES

    @property
    def tail_at(self) -> int:
        return self.header_bytes + self.pages_bytes

    @property
    def tail_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.tokens % self.block_tokens, self.head_dim

    @property
    def file_bytes(self) -> int:
        kv_heads, tail_tokens, head_dim = self.tail_shape
        return self.tail_at + kv_heads * tail_tokens * head_dim * self.element_bytes


def read_header(data: bytes, plane_counts: tuple[int, ...]) -> Header:
    """The fixed fields of a container, with every rule checked that needs no page.

    After this the file has exactly the bytes that its header claims. ``plane_counts`` says how many
    window planes there may be. Raises CorruptDataError with the offset of the field that breaks a rule.
    """
    claimed_bytes = _check_prefix(data)
    header = Header._make(FIELDS.unpack_from(data, PREFIX.size))
    name = header.name.rstrip(b"\0")
    page_elements = header.kv_heads * header.head_dim * header.block_tokens
    printable = name.isascii() and name.decode("ascii", "replace").isprintable()
    check(printable and name != b"", 16, "the format's name must be printable ASCII", name)
    check(header.kind in KINDS, 64, "kind must be 0, 'k' or 'v'", header.kind)
    check(header.element_bytes in (1, 2), 65, "element bytes must be 1 or 2", header.element_bytes)
    check(header.axis < len(AXES), 66, "axis must be 0 (channel) or 1 (token)", header.axis)
    planes_hold = header.plane_count in plane_counts
    check(planes_hold, 67, f"the number of window planes must be one of {plane_counts}", header.plane_count)
    check(header.kv_heads > 0, 68, "kv_heads must be at least 1", header.kv_heads)
    check(header.head_dim > 0, 70, "head_dim must be at least 1", header.head_dim)
    check(header.block_tokens > 0, 72, "block_tokens must be at least 1", header.block_tokens)
    check(
        page_elements <= LARGEST_PAGE_ELEMENTS,
        72,
        f"a page must hold at most {LARGEST_PAGE_ELEMENTS} elements",
        page_elements,
    )
    scale_holds = SMALLEST_SCALE <= header.scale <= LARGEST_SCALE
    check(scale_holds, 92, "scale must be a normal number above 0", header.scale)
    check(header.element_bytes == 1 or header.scale == 1, 92, "scale must be 1 for BF16", header.scale)
    check(
        claimed_bytes == header.header_bytes,
        76,
        f"{header.tokens} tokens in blocks of {header.block_tokens} need a header of {header.header_bytes} bytes",
        claimed_bytes,
    )
    check(
        len(data) == header.file_bytes,
        84,
        f"header, {header.pages_bytes} bytes of pages, and the tail need {header.file_bytes} bytes",
        len(data),
    )
    return header


def check(holds: bool, offset: int, rule: str, value: object) -> None:
    """Raise CorruptDataError that names offset, rule and value, unless the rule holds."""
    if not holds:
        raise CorruptDataError(f"{rule}, got {value!r}", offset)


def _check_prefix(data: bytes) -> int:
    """The header's length, once all of it is known to be there and whole."""
    smallest = FIXED_BYTES + CRC_BYTES
    check(len(data) >= smallest, len(data), f"a container has at least {smallest} bytes", len(data))
    magic, major, minor, zero, header_bytes = PREFIX.unpack_from(data)
    check(magic == MAGIC, 0, f"a container starts with {MAGIC!r}", magic)
    check((major, minor) == VERSION, 8, f"this program reads version {VERSION}", (major, minor))
    check(zero == 0, 10, "bytes 10 and 11 must be zero", zero)
    check(
        smallest <= header_bytes <= len(data),
        12,
        f"the header must have {smallest} to {len(data)} bytes",
        header_bytes,
    )
    crc_at = header_bytes - CRC_BYTES
    crc = int.from_bytes(data[crc_at:header_bytes], "little")
    computed = zlib.crc32(memoryview(data)[:crc_at])
    check(crc == computed, crc_at, f"the header's checksum must be {computed}", crc)
    return header_bytes
