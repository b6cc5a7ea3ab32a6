"""The formats lose no bit, take the bytes that they claim, and refuse bytes that they did not write."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import gaac
from kvfold.codec.cases import CONTENTS, contents, every_pattern
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.packed import Packed
from kvfold.codec.reference import decode_gaac
from kvfold.codec.verify import find_mismatches
from kvfold.codec.windows import Windows, calibrate

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def windows_for(kv_heads: int, head_dim: int, rng: np.random.Generator) -> Windows:
    """Windows calibrated on `normal` contents, so that other contents miss them in every way."""
    return calibrate([contents("normal", (kv_heads, 64, head_dim), rng)])


def assert_same_bits(expected: np.ndarray, actual: np.ndarray) -> None:
    mismatches = find_mismatches(expected, actual)
    assert not mismatches, f"{mismatches.count} differ: {mismatches.first}"


@pytest.mark.parametrize("mode", ["narrow", "wide", "raw"])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_every_pattern_in_every_lane_of_every_mode(mode, axis):
    tag = {"narrow": gaac.NARROW, "wide": gaac.WIDE, "raw": gaac.RAW}[mode]
    seen = np.zeros((1 << 16, 8), bool)
    for patterns, windows in every_pattern(mode):
        if axis == "token":
            # Blocks of 64 x 64 transposed, so that the runs of eight lie along tokens.
            patterns = patterns.reshape(len(patterns), -1, 64, 64).swapaxes(2, 3).reshape(patterns.shape)
        packed = gaac.encode(patterns, windows, 64, axis)
        assert_same_bits(patterns, gaac.decode(packed))
        blocks = patterns.reshape(len(patterns), -1, 64, 64)
        if axis == "token":
            blocks = blocks.swapaxes(2, 3)
        groups = blocks.swapaxes(0, 1).reshape(*gaac.read_tags(packed).shape, 8)
        for lane in range(8):
            seen[groups[gaac.read_tags(packed) == tag][:, lane], lane] = True
    assert seen.all()


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    kind=st.sampled_from(CONTENTS),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(0, 150),
    head_dim=st.sampled_from((8, *HEAD_DIMS)),
    block_tokens=st.integers(1, 80),
    axis=st.sampled_from(["channel", "token"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_contents_and_shape_come_back(kind, kv_heads, tokens, head_dim, block_tokens, axis, seed):
    rng = np.random.default_rng(seed)
    if axis == "token":
        block_tokens = -(-block_tokens // 8) * 8
    patterns = contents(kind, (kv_heads, tokens, head_dim), rng)
    windows = windows_for(kv_heads, head_dim, rng)
    packed = gaac.encode(patterns, windows, block_tokens, axis)
    assert_same_bits(patterns, gaac.decode(packed))
    assert packed.tail.shape == (kv_heads, tokens % block_tokens, head_dim)

    # Every group takes the first mode that holds all of its exponents, and a page is the sum of its parts.
    offsets = (patterns[:, : tokens - tokens % block_tokens] >> 7 & 0xFF).astype(int)
    narrow = (offsets - windows.narrow_base[:, None]) // 8 == 0
    wide = (offsets - windows.wide_base[:, None]) // 16 == 0
    fits = []
    for inside in (narrow, wide):
        blocks = inside.reshape(kv_heads, -1, block_tokens, head_dim).swapaxes(0, 1)
        blocks = blocks if axis == "channel" else blocks.swapaxes(2, 3)
        fits.append(blocks.reshape(packed.page_count, kv_heads, block_tokens * head_dim // 8, 8).all(axis=-1))
    modes = np.where(fits[0], gaac.NARROW, np.where(fits[1], gaac.WIDE, gaac.RAW))
    assert np.array_equal(gaac.read_tags(packed), modes)
    payload = np.choose(modes, (3, 4, 8)).sum(axis=(1, 2))
    fixed = kv_heads * (4 + block_tokens * head_dim + -(-block_tokens * head_dim // 32))
    assert np.array_equal(packed.page_bytes, (fixed + payload + 15) // 16 * 16)


@pytest.mark.parametrize("group", gaac.GROUPS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_the_plain_decoder_reads_the_same_bytes(kind, axis, group):
    rng = np.random.default_rng(11)
    patterns = contents(kind, (2, 70, 32), rng)
    windows = windows_for(2, 32, rng)
    for two_bit in (False, True):
        packed = gaac.encode(patterns, windows, 32, axis, group, two_bit)
        assert_same_bits(patterns, decode_gaac(packed, group))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    kind=st.sampled_from(CONTENTS),
    group=st.sampled_from(gaac.GROUPS),
    axis=st.sampled_from(["channel", "token"]),
    two_bit=st.booleans(),
    tokens=st.integers(0, 100),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_of_any_size_come_back_and_take_their_bits(kind, group, axis, two_bit, tokens, seed):
    rng = np.random.default_rng(seed)
    patterns = contents(kind, (2, tokens, 96), rng)
    windows = windows_for(2, 96, rng)
    packed = gaac.encode(patterns, windows, 32, axis, group, two_bit)
    assert_same_bits(patterns, gaac.decode(packed, group, two_bit))

    blocks = patterns[:, : tokens - tokens % 32].reshape(2, -1, 32, 96).swapaxes(0, 1)
    exponent = (blocks >> 7 & 0xFF).astype(int)
    inside = {
        bits: (exponent - windows.base(width)[:, None]) // width == 0
        for bits, width in ((2, 4), (3, 8), (4, 16))
    }
    bits = np.full((packed.page_count, 2, 32 * 96 // group), 8)
    for width in (4, 3, 2) if two_bit else (4, 3):
        ordered = inside[width] if axis == "channel" else inside[width].swapaxes(2, 3)
        bits[ordered.reshape(*bits.shape, group).all(axis=-1)] = width
    payload = -(-(bits * group).sum(axis=-1) // 8)  # [pages, kv_heads]
    fixed = 2 * (4 + 32 * 96 + -(-32 * 96 // group // 4))
    assert np.array_equal(packed.page_bytes, (fixed + payload.sum(axis=-1) + 15) // 16 * 16)
    counts = gaac.mode_counts(packed, group, two_bit)
    assert list(counts.values()) == [int((bits == width).sum()) for width in (3, 4, 8, 2)[: len(counts)]]


def test_the_bytes_of_a_page_written_out():
    """Two heads, one token, eight channels: head 0 in 3-bit mode, head 1 raw; every byte by hand."""
    windows = Windows(np.full((2, 8), 120, np.uint8), np.full((2, 8), 116, np.uint8))
    exponents = np.array([[120, 121, 122, 123, 124, 125, 126, 127], [1, 2, 3, 4, 5, 6, 7, 255]])
    sign_mantissa = np.array([[0x80, 1, 2, 3, 4, 5, 6, 0xFF], [0, 0, 0, 0, 0, 0, 0, 0x81]])
    patterns = ((sign_mantissa & 0x80) << 8 | exponents << 7 | sign_mantissa & 0x7F).astype(np.uint16)
    packed = gaac.encode(patterns[:, None, :], windows, 1)
    codes = sum(lane << 3 * lane for lane in range(8))
    assert packed.pages.tobytes() == (
        (26).to_bytes(4, "little")
        + (29).to_bytes(4, "little")
        + bytes([0x80, 1, 2, 3, 4, 5, 6, 0xFF])
        + bytes([0, 0, 0, 0, 0, 0, 0, 0x81])
        + bytes([0, 2])
        + codes.to_bytes(3, "little")
        + bytes([1, 2, 3, 4, 5, 6, 7, 255])
        + bytes(11)
    )


def test_a_group_with_one_value_above_its_window_leaves_the_mode():
    windows = Windows(np.full((1, 8), 120, np.uint8), np.full((1, 8), 120, np.uint8))
    for exponent, mode in (
        (119, "raw"),
        (120, "3-bit"),
        (127, "3-bit"),
        (128, "4-bit"),
        (135, "4-bit"),
        (136, "raw"),
    ):
        for lane in range(8):
            patterns = np.full((1, 1, 8), 122 << 7, np.uint16)
            patterns[0, 0, lane] = exponent << 7
            counts = gaac.mode_counts(gaac.encode(patterns, windows, 1))
            assert counts == {name: int(name == mode) for name in ("3-bit", "4-bit", "raw")}


@pytest.mark.parametrize(
    ("shape", "block_tokens", "axis", "message"),
    [
        ((2, 64, 12), 64, "channel", "head_dim must be a multiple of 8, got 12"),
        ((2, 64, 16), 12, "token", "block_tokens must be a multiple of 8 with groups along tokens, got 12"),
        ((2, 64, 16), 0, "channel", "block_tokens must be at least 1, got 0"),
        ((2, 64), 64, "channel", r"got uint16 \[2, 64\]"),
        ((0, 64, 16), 64, "channel", r"got \[0, 64, 16\]"),
        ((2, 64, 16), 64, "head", "axis must be 'channel' or 'token', got 'head'"),
        ((3, 64, 16), 64, "channel", r"windows must have shape \[3, 16\], got \[2, 16\]"),
    ],
)
def test_encode_refuses(shape, block_tokens, axis, message):
    windows = Windows(np.zeros((2, shape[-1]), np.uint8), np.zeros((2, shape[-1]), np.uint8))
    with pytest.raises(ValueError, match=message):
        gaac.encode(np.zeros(shape, np.uint16), windows, block_tokens, axis)


def packed_sample() -> Packed:
    rng = np.random.default_rng(5)
    return gaac.encode(contents("outlier", (2, 16, 16), rng), windows_for(2, 16, rng), 8)


def test_a_page_cut_short_with_its_place_is_corrupt():
    packed = packed_sample()
    for cut in range(16, int(packed.page_bytes[-1]) + 1, 16):
        starts = packed.page_starts.copy()
        starts[-1] -= cut
        with pytest.raises(CorruptDataError):
            gaac.decode(replace(packed, pages=packed.pages[: starts[-1]], page_starts=starts))


def test_a_page_with_bytes_to_spare_is_corrupt():
    packed = packed_sample()
    starts = packed.page_starts.copy()
    starts[-1] += 16
    longer = np.concatenate([packed.pages, np.zeros(16, np.uint8)])
    with pytest.raises(CorruptDataError, match="page 1"):
        gaac.decode(replace(packed, pages=longer, page_starts=starts))


def test_every_flipped_bit_of_table_and_tags_is_noticed():
    """A flip of a table or tag bit moves payloads; in signs, mantissas and codes it only makes another value."""
    packed = packed_sample()
    table, tags = range(8), range(8 + 2 * 128, 8 + 2 * 128 + 2 * 4)
    expected = gaac.decode(packed)
    for byte in (*table, *tags):
        for bit in range(8):
            pages = packed.pages.copy()
            pages[byte] ^= 1 << bit
            try:
                assert find_mismatches(expected, gaac.decode(replace(packed, pages=pages)))
            except CorruptDataError:
                continue


def test_tags_that_ask_for_more_payload_than_the_page_has_are_corrupt():
    windows = Windows(np.zeros((1, 16), np.uint8), np.zeros((1, 16), np.uint8))
    packed = gaac.encode(np.zeros((1, 8, 16), np.uint16), windows, 8)
    assert gaac.mode_counts(packed) == {"3-bit": 16, "4-bit": 0, "raw": 0}
    pages = packed.pages.copy()
    pages[4 + 128 : 4 + 128 + 4] = 0b10101010
    with pytest.raises(CorruptDataError, match="page 0: tags must be 0, 1 or 2 and the payloads"):
        gaac.decode(replace(packed, pages=pages))


def test_random_pages_are_corrupt():
    packed = packed_sample()
    rng = np.random.default_rng(6)
    for _ in range(200):
        pages = rng.integers(0, 256, len(packed.pages), dtype=np.uint8)
        pages[:4] = packed.pages[:4]
        with pytest.raises(CorruptDataError, match="page 0"):
            gaac.decode(replace(packed, pages=pages))


@pytest.mark.parametrize(
    ("head_dim", "group", "message"),
    [
        (64, 12, "group must be one of 4, 8, 16, 32, got 12"),
        (80, 32, "head_dim must be a multiple of 32, got 80"),
    ],
)
def test_encode_refuses_groups(head_dim, group, message):
    windows = Windows(np.zeros((1, head_dim), np.uint8), np.zeros((1, head_dim), np.uint8))
    with pytest.raises(ValueError, match=message):
        gaac.encode(np.zeros((1, 64, head_dim), np.uint16), windows, 64, group=group)


def test_the_2_bit_mode_needs_its_window():
    windows = Windows(np.zeros((1, 8), np.uint8), np.zeros((1, 8), np.uint8))
    with pytest.raises(ValueError, match="windows of 4 exponents must be calibrated"):
        gaac.encode(np.zeros((1, 8, 8), np.uint16), windows, 8, two_bit=True)


def test_find_mismatches_sees_nan_payloads_and_the_sign_of_zero():
    expected = np.array([0x7FC0, 0x0000, 0x3F80], np.uint16)
    mismatches = find_mismatches(expected, np.array([0x7FC1, 0x8000, 0x3F80], np.uint16))
    assert mismatches.count == 2
    assert mismatches.first == ("[0] 0x7fc0 -> 0x7fc1", "[1] 0x0000 -> 0x8000")
    with pytest.raises(ValueError, match="shape"):
        find_mismatches(expected, expected[:2])


@pytest.mark.parametrize(
    ("calibration", "test", "kind", "ratio"),
    [
        ("prose_L14", "prose_L14", "k", 1.411),
        ("prose_L14", "prose_L14", "v", 1.408),
        ("prose_L14", "code_pos6144_L14", "k", 1.396),
        ("prose_L14", "code_pos6144_L14", "v", 1.404),
    ],
)
def test_the_published_ratio_on_real_tensors(shared_data, calibration, test, kind, ratio):
    folder = shared_data / "kv"
    windows = calibrate([np.load(folder / f"smollm2_135m_{calibration}_{kind}.npy")])
    patterns = np.load(folder / f"smollm2_135m_{test}_{kind}.npy")
    packed = gaac.encode(patterns, windows, 64)
    assert_same_bits(patterns, gaac.decode(packed))
    assert 16 * patterns.size / (8 * len(packed.pages)) == pytest.approx(ratio, rel=0.005)
