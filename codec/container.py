"""One array of K or V in any format as bytes that say what they are: header, page table, pages, raw tail.

FORMAT.md beside this file states every field, what is corrupt, and which version reads what. The header, each
page and the tail carry a CRC-32 (that of zlib), so every flipped bit is noticed. Reading trusts nothing: a
size is used only after the bytes that it claims are known to be there, and what is rebuilt from a file is at
most twice its pages and tail (four times, where FP8 is widened to BF16).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from kvfold.codec.errors import CorruptDataError
from kvfold.codec.header import (
    AXES,
    CRC_BYTES,
    FIELDS,
    FIXED_BYTES,
    LARGEST_PAGE_ELEMENTS,
    MAGIC,
    NAME_BYTES,
    PREFIX,
    VERSION,
    Header,
    check,
    read_header,
)
from kvfold.codec.names import cast_of, find_format, find_fp8
from kvfold.codec.packed import Axis, Packed
from kvfold.codec.windows import INNER_WIDTHS, Windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["k", "v"]
TABLE_ROW = np.dtype([("bytes", "<u4"), ("crc", "<u4")])
OUTER_PLANES = 2  # narrow and wide


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a container holds: the format's name with its parameters, K or V if stated, and the packed array."""

    format_name: str
    kind: Kind | None
    packed: Packed
    pages_at: int  # where the pages start in the container


def write(packed: Packed, format_name: str, kind: Kind | None = None) -> bytes:
    """The container of a packed array; the same arguments give the same bytes.

    Raises ValueError for what its fields cannot hold: a name that is not 1..48 printable ASCII bytes, more
    than 65,535 heads or channels, a page of more than 2**24 elements.
    """
    name = format_name.encode()
    if not (name.isascii() and format_name.isprintable() and 1 <= len(name) <= NAME_BYTES):
        raise ValueError(f"a format's name must be 1 to {NAME_BYTES} ASCII characters, got {format_name!r}")
    kv_heads, tokens, head_dim = packed.shape
    if max(kv_heads, head_dim) > 0xFFFF or packed.page_elements > LARGEST_PAGE_ELEMENTS:
        raise ValueError(
            f"kv_heads and head_dim must be at most 65535 and a page hold at most {LARGEST_PAGE_ELEMENTS} "
            f"elements, got {list(packed.shape)} in blocks of {packed.block_tokens} tokens"
        )
    planes = _planes(packed.windows)
    table = np.empty(packed.page_count, TABLE_ROW)
    table["bytes"] = packed.page_bytes
    pages = packed.pages.tobytes()
    table["crc"] = [zlib.crc32(pages[start:end]) for start, end in pairwise(packed.page_starts)]
    tail = packed.tail.astype(packed.tail.dtype.newbyteorder("<")).tobytes()
    header = Header(
        name=name,
        kind=(kind or "\0").encode(),
        element_bytes=packed.tail.dtype.itemsize,
        axis=AXES.index(packed.axis),
        plane_count=len(planes),
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=packed.block_tokens,
        tokens=tokens,
        pages_bytes=len(packed.pages),
        scale=packed.scale,
        tail_crc=zlib.crc32(tail),
    )
    start = PREFIX.pack(MAGIC, *VERSION, 0, header.header_bytes) + FIELDS.pack(*header)
    return seal(b"".join((start, *planes, table.tobytes()))) + pages + tail


def seal(header: bytes) -> bytes:
    """A header with its checksum."""
    return header + zlib.crc32(header).to_bytes(CRC_BYTES, "little")


def read(data: bytes) -> Contents:
    """The packed array of a container, all checksums verified; the pages themselves are not decoded.

    Raises CorruptDataError with the offset of what breaks a rule of FORMAT.md.
    """
    header = read_header(data, (0, OUTER_PLANES, OUTER_PLANES + len(INNER_WIDTHS)))
    starts = _read_table(data, header)
    computed = zlib.crc32(memoryview(data)[header.tail_at :])
    check(
        computed == header.tail_crc,
        header.tail_at,
        f"the tail's checksum must be {computed}",
        header.tail_crc,
    )
    stored = np.dtype("<u2") if header.element_bytes == 2 else np.dtype("u1")
    tail = np.frombuffer(data, stored, offset=header.tail_at).astype(stored.newbyteorder("="))
    packed = Packed(
        shape=(header.kv_heads, header.tokens, header.head_dim),
        block_tokens=header.block_tokens,
        pages=np.frombuffer(data, np.uint8, header.pages_bytes, header.header_bytes).copy(),
        page_starts=starts,
        tail=tail.reshape(header.tail_shape),
        windows=_read_windows(data, header) if header.plane_count else None,
        axis=cast("Axis", AXES[header.axis]),
        scale=header.scale,
    )
    kind = cast("Kind", header.kind.decode()) if header.kind != b"\0" else None
    return Contents(header.name.rstrip(b"\0").decode("ascii"), kind, packed, header.header_bytes)


def unpack(data: bytes) -> NDArray[np.uint16]:
    """The BF16 patterns ``uint16 [kv_head, token, head_dim]`` of a container: ``read``, then ``decode``."""
    return decode(read(data))


def decode(contents: Contents, widen: bool = True) -> NDArray[Any]:
    """The patterns ``[kv_head, token, head_dim]`` in a container: BF16 as uint16, FP8 widened to it or as uint8.

    Raises CorruptDataError with an offset for an unknown format, one that cannot have these sizes, and for
    pages that no encoder wrote.
    """
    name, packed = contents.format_name, contents.packed
    is_fp8 = bool(cast_of(name))
    element_bytes, expected_bytes = packed.tail.dtype.itemsize, 1 if is_fp8 else 2
    rule = f"an element of {name} must have {expected_bytes} bytes"
    check(element_bytes == expected_bytes, 65, rule, element_bytes)
    try:
        return find_fp8(name).decode(packed) if is_fp8 and not widen else find_format(name).decode(packed)
    except (CorruptDataError, ValueError) as error:  # a ValueError: a name or sizes that no format has
        raise CorruptDataError(str(error), contents.pages_at) from None


def _planes(windows: Windows | None) -> list[bytes]:
    """The bases of the windows of 8, 16 and, if there, 3, 4, 6 and 7 exponents: ``[kv_head, head_dim]`` each."""
    if windows is None:
        return []
    inner = () if windows.inner_bases is None else windows.inner_bases
    return [base.tobytes() for base in (windows.narrow_base, windows.wide_base, *inner)]


def _read_table(data: bytes, header: Header) -> NDArray[np.int64]:
    """Where each page starts among the pages, and where the last one ends; every page is whole."""
    table = np.frombuffer(data, TABLE_ROW, header.page_count, header.table_at)
    sizes = table["bytes"].astype(np.int64)
    total = int(sizes.sum())
    check(
        total == header.pages_bytes,
        header.table_at,
        f"pages must add up to {header.pages_bytes} bytes",
        total,
    )
    page_elements = header.kv_heads * header.head_dim * header.block_tokens
    smallest = (page_elements * header.element_bytes + 1) // 2
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    view = memoryview(data)[header.header_bytes :]
    for page, (size, crc) in enumerate(table.tolist()):
        row_at = header.table_at + page * TABLE_ROW.itemsize
        check(size >= smallest, row_at, f"page {page} must have at least {smallest} bytes", size)
        start = int(starts[page])
        computed = zlib.crc32(view[start : start + size])
        page_at = header.header_bytes + start
        check(computed == crc, page_at, f"the checksum of page {page} must be {computed}", crc)
    return starts


def _read_windows(data: bytes, header: Header) -> Windows:
    planes = np.frombuffer(data, np.uint8, header.plane_bytes, FIXED_BYTES).copy()
    narrow, wide, *inner = planes.reshape(header.plane_count, header.kv_heads, header.head_dim)
    try:
        return Windows(narrow, wide, np.stack(inner) if inner else None)
    except ValueError as error:
        raise CorruptDataError(f"windows: {error}", FIXED_BYTES) from None
