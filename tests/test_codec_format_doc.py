"""FORMAT.md is what the program does: its header table, versions and names; and a reader from it alone."""

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from kvfold.codec import container, header
from kvfold.codec.calibration import VERSION as CALIBRATION_VERSION
from kvfold.codec.golden import golden_bytes
from kvfold.codec.names import known_names

TEXT = (Path(__file__).parent.parent / "codec" / "FORMAT.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (\d+) \| (.*?) \|", TEXT, re.MULTILINE)  # offset, bytes, field


def test_the_fields_follow_each_other_and_are_those_of_the_program():
    places = [(int(offset), int(size)) for offset, size, _ in ROWS]
    assert [offset for offset, _ in places] == [
        sum(size for _, size in places[:n]) for n in range(len(places))
    ]
    assert sum(size for _, size in places) == header.FIXED_BYTES
    assert len(places) == 5 + len(header.Header._fields)
    values = header.Header(b"gaac", b"k", 2, 0, 2, 3, 64, 64, 100, 5000, 1.0, 77)
    packed = header.FIELDS.pack(*values)
    for (offset, size), value in zip(places[5:], values, strict=True):
        raw = packed[offset - 16 : offset - 16 + size]
        if isinstance(value, float):
            assert struct.unpack("<f", raw) == (value,)
        elif isinstance(value, int):
            assert int.from_bytes(raw, "little") == value
        else:
            assert raw.rstrip(b"\0") == value


def test_magic_and_versions():
    magic = bytes.fromhex(re.search(r"\| magic \| `([0-9A-F ]+)`", TEXT).group(1))
    assert magic == header.MAGIC
    version = ".".join(map(str, header.VERSION))
    assert f"Version **{version}**" in TEXT
    assert f"| {version} | kvfold" in TEXT
    assert f'| `kvfold_calibration` | "{CALIBRATION_VERSION}" |' in TEXT


def test_every_format_has_its_section():
    headings = " ".join(re.findall(r"^## .*", TEXT, re.MULTILINE))
    for name in known_names():
        assert f"`{name}`" in headings or f"`{name.partition('+')[0]}+fp8-…`" in headings


def read_by_the_document(data: bytes) -> tuple[str, np.ndarray]:
    """A reader of raw containers written from FORMAT.md: struct, zlib, and nothing of the program."""
    assert data[:8] == bytes.fromhex("894B56460D0A1A0A")
    assert data[8:12] == b"\0\1\0\0"
    (header_bytes,) = struct.unpack_from("<I", data, 12)
    name = data[16:64].rstrip(b"\0").decode()
    kind, element_bytes, _, planes = struct.unpack_from("<cBBB", data, 64)
    assert kind == b"k"
    kv_heads, head_dim, block_tokens, tokens, pages_bytes, _, tail_crc = struct.unpack_from(
        "<HHIQQfI", data, 68
    )
    pages, tail_tokens = divmod(tokens, block_tokens)
    table = 100 + planes * kv_heads * head_dim
    assert header_bytes == table + 8 * pages + 4
    assert struct.unpack_from("<I", data, header_bytes - 4) == (zlib.crc32(data[: header_bytes - 4]),)
    array = np.empty((kv_heads, tokens, head_dim), f"<u{element_bytes}")
    place = header_bytes
    for page in range(pages):
        size, crc = struct.unpack_from("<II", data, table + 8 * page)
        block = data[place : place + size]
        assert zlib.crc32(block) == crc
        rows = slice(page * block_tokens, (page + 1) * block_tokens)
        array[:, rows] = np.frombuffer(block, array.dtype).reshape(kv_heads, block_tokens, head_dim)
        place += size
    assert place == header_bytes + pages_bytes
    tail = data[place:]
    assert zlib.crc32(tail) == tail_crc
    array[:, tokens - tail_tokens :] = np.frombuffer(tail, array.dtype).reshape(
        kv_heads, tail_tokens, head_dim
    )
    return name, array


@pytest.mark.parametrize("name", ["bf16", "fp8-e4m3"])
def test_a_reader_from_the_document_alone(name):
    data = golden_bytes(name, "special")
    told, array = read_by_the_document(data)
    assert told == name
    if name == "bf16":
        assert np.array_equal(array, container.unpack(data))
    else:
        from kvfold.codec.names import find_fp8

        assert np.array_equal(array, find_fp8(name).decode(container.read(data).packed))
