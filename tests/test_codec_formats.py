"""What every format owes: any contents come back bit for bit, and a cut or a flip never gives garbage silently."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import reference
from kvfold.codec.cases import CONTENTS, MODES, contents, every_pattern
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.formats import FORMATS, with_parameters
from kvfold.codec.verify import find_mismatches
from kvfold.codec.windows import Windows, calibrate, exponents

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PLAIN = {
    "gaac": reference.decode_gaac,
    "gaac-2bit": reference.decode_gaac,
    "fixed4": reference.decode_fixed4,
    "fixed3": reference.decode_fixed3,
    "esc3": lambda packed: reference.decode_escape(packed, 3),
    "esc2-2": lambda packed: reference.decode_escape(packed, 2),
    "tag8": lambda packed: reference.decode_tags(packed, 8),
    "tag32": lambda packed: reference.decode_tags(packed, 32),
}


def windows_for(kv_heads: int, head_dim: int, rng: np.random.Generator) -> Windows:
    """Windows calibrated on `normal` contents, so that other contents miss them in every way."""
    return calibrate([contents("normal", (kv_heads, 64, head_dim), rng)])


def assert_same_bits(expected: np.ndarray, actual: np.ndarray) -> None:
    mismatches = find_mismatches(expected, actual)
    assert not mismatches, f"{mismatches.count} differ: {mismatches.first}"


# Which of a format's modes must take every element when the windows of a width do.
MODE_TAKES = {
    ("gaac", "narrow"): "3-bit",
    ("gaac", "wide"): "4-bit",
    ("gaac-2bit", "narrow"): "3-bit",
    ("gaac-2bit", "wide"): "4-bit",
    ("gaac-2bit", "four"): "2-bit",
    ("esc3", "seven"): "3-bit",
    ("esc2-2", "three"): "2-bit",
    ("tag8", "narrow"): "3-bit",
    ("tag32", "narrow"): "3-bit",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", [*MODES, "raw"])
def test_every_pattern_in_every_lane(name, mode):
    """All 65,536 patterns in every lane, in the mode that the windows ask for or in what is left to them."""
    for patterns, windows in every_pattern(mode):
        packed = FORMATS[name].encode(patterns, windows, 32)
        assert_same_bits(patterns, FORMATS[name].decode(packed))
        assert packed.tail.size == 0
        if taken := MODE_TAKES.get((name, mode)):
            counts = FORMATS[name].mode_counts(packed)
            assert counts[taken] == sum(counts.values())


@pytest.mark.parametrize("mode", [*MODES, "raw"])
def test_the_cases_hold_every_pattern_in_every_lane(mode):
    for patterns, windows in every_pattern(mode):
        lanes = patterns.reshape(len(patterns), -1, 8)
        assert all(len(np.unique(lanes[..., lane])) == 1 << 16 for lane in range(8))
        if mode != "raw":
            offsets = exponents(patterns).astype(int) - windows.base(MODES[mode])[:, None]
            assert ((offsets >= 0) & (offsets < MODES[mode])).all()


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    kind=st.sampled_from(CONTENTS),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(0, 200),
    head_dim=st.sampled_from((8, *HEAD_DIMS)),
    blocks=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_contents_and_shape_come_back(name, kind, kv_heads, tokens, head_dim, blocks, seed):
    kv_format = FORMATS[name]
    rng = np.random.default_rng(seed)
    block_tokens = blocks * kv_format.block_multiple
    patterns = contents(kind, (kv_heads, tokens, head_dim), rng)
    windows = windows_for(kv_heads, head_dim, rng)
    packed = kv_format.encode(patterns, windows, block_tokens)
    assert_same_bits(patterns, kv_format.decode(packed))
    assert_same_bits(packed.tail, patterns[:, tokens - tokens % block_tokens :])
    assert packed.page_starts[-1] == len(packed.pages)
    # Deterministic, and blind to how the array lies in memory.
    again = kv_format.encode(np.asfortranarray(patterns), windows, block_tokens)
    assert np.array_equal(packed.pages, again.pages)
    # A page depends on its own block alone: packed later or elsewhere it has the same bytes.
    if packed.page_count:
        last = patterns[:, (packed.page_count - 1) * block_tokens : packed.page_count * block_tokens]
        alone = kv_format.encode(last, windows, block_tokens)
        assert np.array_equal(alone.pages, packed.pages[packed.page_starts[-2] :])


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", CONTENTS)
def test_the_plain_decoder_reads_the_same_bytes(name, kind):
    rng = np.random.default_rng(11)
    patterns = contents(kind, (2, 40, 24), rng)
    packed = FORMATS[name].encode(patterns, windows_for(2, 24, rng), 16)
    assert_same_bits(patterns, PLAIN[name](packed))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tails_of_every_length_come_back(name, head_dim):
    rng = np.random.default_rng(head_dim)
    windows = windows_for(2, head_dim, rng)
    for tail_tokens in range(1, 64):
        patterns = contents("outlier", (2, 64 + tail_tokens, head_dim), rng)
        assert_same_bits(patterns, FORMATS[name].decode(FORMATS[name].encode(patterns, windows, 64)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_ten_million_values_come_back(name, kind):
    patterns = contents(kind, (8, 64 * 154, 128), np.random.default_rng(7))
    assert patterns.size > 10_000_000
    windows = calibrate([patterns[:, :2048]])
    assert_same_bits(patterns, FORMATS[name].decode(FORMATS[name].encode(patterns, windows, 64)))


@pytest.mark.parametrize("name", FORMATS)
def test_mode_counts_and_exceptions_add_up(name):
    rng = np.random.default_rng(2)
    patterns = contents("outlier", (2, 64, 64), rng)
    packed = FORMATS[name].encode(patterns, windows_for(2, 64, rng), 64)
    counts = FORMATS[name].mode_counts(packed)
    assert min(counts.values(), default=0) >= 0
    if name not in ("bf16", "gaac", "gaac-2bit"):
        assert sum(counts.values()) == patterns.size
    if name.startswith(("esc", "tag")):
        coded = next(iter(counts))
        assert FORMATS[name].count_exceptions(patterns, packed) == patterns.size - counts[coded]


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_pages_are_corrupt_at_every_length(name):
    rng = np.random.default_rng(5)
    packed = FORMATS[name].encode(contents("outlier", (2, 32, 16), rng), windows_for(2, 16, rng), 16)
    for kept in range(len(packed.pages)):
        with pytest.raises(CorruptDataError):
            FORMATS[name].decode(replace(packed, pages=packed.pages[:kept]))
        if name != "bf16" and kept > packed.page_starts[1]:
            starts = np.array([0, packed.page_starts[1], kept])
            with pytest.raises(CorruptDataError):
                FORMATS[name].decode(replace(packed, pages=packed.pages[:kept], page_starts=starts))


@pytest.mark.parametrize("name", FORMATS)
def test_random_damage_is_an_error_or_other_values_and_never_more(name):
    """Bytes changed at random: a typed error, or an array of the right shape whose tail is untouched."""
    rng = np.random.default_rng(6)
    patterns = contents("outlier", (2, 70, 16), rng)
    packed = FORMATS[name].encode(patterns, windows_for(2, 16, rng), 32)
    for _ in range(500):
        pages = packed.pages.copy()
        places = rng.integers(0, len(pages), rng.integers(1, 6))
        pages[places] = rng.integers(0, 256, len(places))
        try:
            decoded = FORMATS[name].decode(replace(packed, pages=pages))
        except CorruptDataError:
            continue
        assert decoded.shape == patterns.shape
        assert np.array_equal(decoded[:, 64:], patterns[:, 64:])


def test_one_outlier_per_group_in_every_lane():
    """Groups that each format must leave its best mode for, by the value just above and far below the window."""
    windows = Windows(
        np.full((1, 64), 120, np.uint8),
        np.full((1, 64), 115, np.uint8),
        np.array([124, 123, 122, 121], np.uint8).repeat(64).reshape(4, 1, 64),
    )
    for exponent in (0, 1, 115, 116, 119, 128, 130, 131, 254, 255):
        patterns = np.full((1, 64, 64), 125 << 7 | 0x15, np.uint16)
        flat = patterns.reshape(-1, 8)
        flat[np.arange(len(flat)), np.arange(len(flat)) % 8] = exponent << 7 | 0x8001
        for kv_format in FORMATS.values():
            assert_same_bits(patterns, kv_format.decode(kv_format.encode(patterns, windows, 64)))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "fixed4", "fixed3")])
def test_windows_of_another_shape_or_none_are_refused(name):
    rng = np.random.default_rng(1)
    patterns = contents("normal", (2, 64, 16), rng)
    with pytest.raises(ValueError, match=r"windows must have shape \[2, 16\], got \[1, 16\]"):
        FORMATS[name].encode(patterns, windows_for(1, 16, rng), 64)
    packed = FORMATS[name].encode(patterns, windows_for(2, 16, rng), 64)
    with pytest.raises(ValueError, match="windows are needed"):
        FORMATS[name].decode(replace(packed, windows=None))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
@pytest.mark.parametrize("shape", [(2, 70, 12), (2, 70, 20), (0, 70, 16), (2, 70, 0)])
def test_decode_refuses_shapes_that_no_encoder_takes(name, shape):
    rng = np.random.default_rng(1)
    packed = FORMATS[name].encode(contents("normal", (2, 70, 16), rng), windows_for(2, 16, rng), 32)
    bases = np.zeros((shape[0], shape[2]), np.uint8)
    windows = Windows(bases, bases, np.zeros((4, shape[0], shape[2]), np.uint8))
    with pytest.raises(ValueError, match=r"must (be a multiple of|have at least)"):
        FORMATS[name].decode(replace(packed, shape=shape, windows=windows))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_a_sign_lost_in_one_lane_is_seen(name):
    """The comparison behind every test here notices one flipped bit of one element."""
    patterns = contents("normal", (1, 64, 64), np.random.default_rng(4))
    decoded = FORMATS[name].decode(FORMATS[name].encode(patterns, calibrate([patterns]), 64))
    decoded[0, 63, 63] ^= 0x8000
    assert find_mismatches(patterns, decoded).count == 1


@pytest.mark.parametrize("group", [4, 8, 16, 32])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("name", ["gaac", "gaac-2bit"])
def test_parameters_of_gaac(name, axis, group):
    rng = np.random.default_rng(3)
    patterns = contents("outlier", (2, 70, 32), rng)
    windows = windows_for(2, 32, rng)
    kv_format = with_parameters(f"{name}:group={group},axis={axis}")
    packed = kv_format.encode(patterns, windows, 32)
    assert packed.axis == axis
    assert sum(kv_format.mode_counts(packed).values()) == 2 * 64 * 32 // group
    assert_same_bits(patterns, kv_format.decode(packed))
    if (axis, group) == ("channel", 8):
        assert np.array_equal(packed.pages, FORMATS[name].encode(patterns, windows, 32).pages)


@pytest.mark.parametrize("name", ["fixed4", "fixed3"])
def test_parameters_of_formats_with_kinds(name):
    patterns = contents("normal", (2, 64, 32), np.random.default_rng(3))
    v = with_parameters(f"{name}:kind=v").encode(patterns, windows_for(2, 32, np.random.default_rng(1)), 64)
    assert v.axis == "token"
    assert not np.array_equal(v.pages, FORMATS[name].encode(patterns, v.windows, 64).pages)
    assert_same_bits(patterns, FORMATS[name].decode(v))
    assert with_parameters(name) is FORMATS[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zip", "format must be one of bf16, gaac, .* got 'zip'"),
        ("gaac:group=7", "parameters of gaac are: group 4, 8, 16, 32; axis channel, token; got group=7"),
        ("gaac:size=8", "got size=8"),
        ("gaac:group", "got group="),
        ("fixed4:kind=q", "parameters of fixed4 are: kind k, v; got kind=q"),
        ("esc3:group=8", "parameters of esc3 are: none; got group=8"),
    ],
)
def test_unknown_parameters_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        with_parameters(name)


def test_a_dead_channel_and_one_of_infinities_beside_normal_ones():
    rng = np.random.default_rng(9)
    patterns = contents("normal", (2, 128, 64), rng)
    patterns[:, :, 5], patterns[:, :, 6] = 0x8000, 0xFF80
    patterns[0, 7, :] = 0x7FC1
    windows = calibrate([patterns])
    assert exponents(patterns).max() == 255
    for kv_format in FORMATS.values():
        assert_same_bits(patterns, kv_format.decode(kv_format.encode(patterns, windows, 64)))
