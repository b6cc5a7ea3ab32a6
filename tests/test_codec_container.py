"""Containers: what is written comes back, every byte is where FORMAT.md says, and every claim is checked."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import bf16, container, fp8, gaac
from kvfold.codec.cases import CONTENTS, contents
from kvfold.codec.corruption import reseal
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.names import find_format, known_names
from kvfold.codec.packed import Packed
from kvfold.codec.windows import Windows, calibrate

BLOCK_TOKENS = 16  # every format takes it


def packed_sample(name: str = "gaac", tokens: int = 37, seed: int = 1) -> tuple[np.ndarray, Packed]:
    rng = np.random.default_rng(seed)
    patterns = contents("outlier", (2, tokens, 16), rng)
    return patterns, packed_of(name, patterns, rng)


def packed_of(name: str, patterns: np.ndarray, rng: np.random.Generator) -> Packed:
    """Windows are calibrated on `normal` contents, so that other contents miss them in every way."""
    kv_format = find_format(name)
    calibration = contents("normal", (patterns.shape[0], 64, patterns.shape[2]), rng)
    return kv_format.encode(patterns, calibrate([kv_format.coded(calibration)]), BLOCK_TOKENS)


@pytest.mark.parametrize("name", known_names())
@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    contents_kind=st.sampled_from(CONTENTS),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(0, 70),
    head_dim=st.sampled_from((8, 16, 40, 64)),
    kind=st.sampled_from((None, "k", "v")),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_written_comes_back(name, contents_kind, kv_heads, tokens, head_dim, kind, seed):
    rng = np.random.default_rng(seed)
    patterns = contents(contents_kind, (kv_heads, tokens, head_dim), rng)
    data = container.write(packed_of(name, patterns, rng), name, kind)
    assert np.array_equal(container.unpack(data), find_format(name).stored(patterns))
    read = container.read(data)
    assert (read.format_name, read.kind) == (name, kind)
    assert container.write(read.packed, read.format_name, read.kind) == data


def test_every_byte_by_hand():
    """One head, two tokens in blocks of one and none left, raw BF16, then three tokens in blocks of two."""
    patterns = np.arange(1, 17, dtype=np.uint16).reshape(1, 2, 8)
    data = container.write(bf16.encode(patterns, None, 1), "bf16", "k")
    pages = patterns.astype("<u2").tobytes()
    header = (
        b"\x89KVF\r\n\x1a\n"
        + bytes([0, 1, 0, 0])
        + struct.pack("<I", 100 + 2 * 8 + 4)
        + b"bf16".ljust(48, b"\0")
        + b"k"
        + bytes([2, 0, 0])
        + struct.pack("<HHIQQfI", 1, 8, 1, 2, 32, 1.0, zlib.crc32(b""))
        + struct.pack("<II", 16, zlib.crc32(pages[:16]))
        + struct.pack("<II", 16, zlib.crc32(pages[16:]))
    )
    assert data == header + struct.pack("<I", zlib.crc32(header)) + pages

    patterns = np.arange(1, 25, dtype=np.uint16).reshape(1, 3, 8)
    data = container.write(bf16.encode(patterns, None, 2), "bf16")
    assert data[64:65] == b"\0"
    assert data[-16:] == patterns[0, 2].astype("<u2").tobytes()
    assert struct.unpack_from("<I", data, 96) == (zlib.crc32(data[-16:]),)


@pytest.mark.parametrize("inner", [False, True])
def test_windows_stand_in_the_header_plane_by_plane(inner):
    planes = np.arange(6 * 16, dtype=np.uint8).reshape(6, 1, 16)
    planes[4] = planes[2]  # the window of 3 inside that of 6
    windows = Windows(planes[0], planes[1], planes[2:] if inner else None)
    packed = gaac.encode(np.zeros((1, 20, 16), np.uint16), windows, 16)
    data = container.write(packed, "gaac")
    stored = planes if inner else planes[:2]
    assert data[67] == len(stored)
    assert data[100 : 100 + stored.size] == stored.tobytes()
    read = container.read(data).packed.windows
    assert np.array_equal(read.narrow_base, planes[0])
    assert (read.inner_bases is None) != inner


def test_fp8_bytes_and_their_scale_are_kept():
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    packed = fp8.encode_bytes(values, 5, scale=0.3)
    read = container.read(container.write(packed, "fp8-e4m3")).packed
    assert np.array_equal(fp8.decode_bytes(read), values)
    assert read.scale == packed.scale == float(np.float32(0.3))
    assert read.tail.dtype == np.uint8


def changed(at: int, value: bytes, name: str = "gaac") -> bytes:
    """A container with other bytes at one place and every checksum right."""
    data = container.write(packed_sample(name)[1], name)
    return reseal(data[:at] + value + data[at + len(value) :])


@pytest.mark.parametrize(
    ("at", "value", "offset", "message"),
    [
        (0, b"x", 0, "a container starts with"),
        (9, b"\2", 8, r"this program reads version \(0, 1\), got \(0, 2\)"),
        (11, b"\1", 10, "bytes 10 and 11 must be zero, got 256"),
        (12, b"\0\0\0\0", 12, "the header must have 104 to"),
        (12, b"\xff\xff\xff\xff", 12, "the header must have 104 to"),
        (16, b"\0" * 48, 16, "the format's name must be printable ASCII, got b''"),
        (16, b"\xe4", 16, "the format's name must be printable ASCII"),
        (64, b"q", 64, "kind must be 0, 'k' or 'v', got b'q'"),
        (65, b"\3", 65, "element bytes must be 1 or 2, got 3"),
        (66, b"\2", 66, r"axis must be 0 \(channel\) or 1 \(token\), got 2"),
        (67, b"\1", 67, r"must be one of \(0, 2, 6\), got 1"),
        (68, b"\0\0", 68, "kv_heads must be at least 1, got 0"),
        (70, b"\0\0", 70, "head_dim must be at least 1, got 0"),
        (72, b"\0\0\0\0", 72, "block_tokens must be at least 1, got 0"),
        (72, b"\xff\xff\xff\xff", 72, "a page must hold at most 16777216 elements"),
        (76, b"\xff", 76, "255 tokens in blocks of 16 need a header of"),
        (84, b"\1", 84, "bytes of pages, and the tail need"),
        (92, b"\0\0\0\0", 92, r"scale must be a normal number above 0, got 0\.0"),
        (92, struct.pack("<f", 0.5), 92, r"scale must be 1 for BF16, got 0\.5"),
        (92, b"\0\0\xc0\x7f", 92, "scale must be a normal number above 0, got nan"),
        (100, b"\xff", 100, "windows: narrow_base must be at most 248, got 255"),
    ],
)
def test_every_rule_of_the_header_names_its_offset(at, value, offset, message):
    with pytest.raises(CorruptDataError, match=message) as caught:
        container.read(changed(at, value))
    assert caught.value.offset == offset
    assert str(caught.value).startswith(f"byte {offset}: ")


def test_the_page_table_must_agree_with_the_pages():
    data = container.write(packed_sample()[1], "gaac")
    table_at = 100 + data[67] * 2 * 16
    first = int.from_bytes(data[table_at : table_at + 4], "little")
    with pytest.raises(CorruptDataError, match="pages must add up to") as caught:
        container.read(changed(table_at, (first + 16).to_bytes(4, "little")))
    assert caught.value.offset == table_at
    second = int.from_bytes(data[table_at + 8 : table_at + 12], "little")
    moved = reseal(
        data[:table_at]
        + struct.pack("<II", 16, 0)
        + struct.pack("<II", second + first - 16, 0)
        + data[table_at + 16 :]
    )
    with pytest.raises(CorruptDataError, match="page 0 must have at least 512 bytes, got 16") as caught:
        container.read(moved)
    assert caught.value.offset == table_at


def test_a_broken_checksum_names_its_page():
    data = bytearray(container.write(packed_sample()[1], "gaac"))
    read = container.read(bytes(data))
    second = read.pages_at + int(read.packed.page_starts[1])
    data[second + 3] ^= 1
    with pytest.raises(CorruptDataError, match="the checksum of page 1") as caught:
        container.read(bytes(data))
    assert caught.value.offset == second
    data[second + 3] ^= 1
    data[-1] ^= 1
    with pytest.raises(CorruptDataError, match="the tail's checksum"):
        container.read(bytes(data))


def test_pages_that_no_encoder_wrote_are_corrupt_behind_good_checksums():
    data = container.write(packed_sample()[1], "gaac")
    pages_at = container.read(data).pages_at
    with pytest.raises(CorruptDataError, match=f"byte {pages_at}: page 0") as caught:
        container.unpack(changed(pages_at, b"\xff"))
    assert caught.value.offset == pages_at


def test_bytes_of_an_element_must_be_those_of_the_format():
    _, packed = packed_sample("bf16", tokens=32)
    data = container.write(packed, "fp8-e4m3")
    with pytest.raises(CorruptDataError, match="byte 65: an element of fp8-e4m3 must have 1 bytes, got 2"):
        container.unpack(data)


def test_an_unknown_format_is_refused():
    with pytest.raises(CorruptDataError, match="got 'gaak'"):
        container.unpack(changed(16, b"gaak"))


def test_what_a_container_cannot_hold():
    _, packed = packed_sample()
    for name in ("", "x" * 49, "gaäc", "ga\nac"):
        with pytest.raises(ValueError, match="a format's name must be 1 to 48 ASCII characters"):
            container.write(packed, name)
    wide = bf16.encode(np.zeros((1, 1, 70_000), np.uint16), None, 1)
    with pytest.raises(ValueError, match="at most 65535"):
        container.write(wide, "bf16")
