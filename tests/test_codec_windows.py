"""Calibration: the windows that cover most, ties to the highest, and keys rotated to later positions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec.windows import (
    Windows,
    calibrate,
    count_outside,
    exponent_histogram,
    exponents,
    rotate_keys,
    windows_of,
)


def one_channel(*values: int) -> np.ndarray:
    """Patterns [1, token, 1] with these exponents."""
    return (np.array(values, np.uint16) << np.uint16(7)).reshape(1, -1, 1)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_no_window_covers_more_and_of_equal_ones_none_is_higher(values):
    windows = calibrate([one_channel(*values)])
    for width, base in ((8, windows.narrow_base), (16, windows.wide_base)):
        covered = [sum(low <= value < low + width for value in values) for low in range(257 - width)]
        highest = max(low for low, count in enumerate(covered) if count == max(covered))
        assert base.tolist() == [[highest]]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 255), st.integers(100, 110)), min_size=1, max_size=40))
def test_the_pair_of_3_and_6_costs_least_and_the_other_inner_windows_cover_most(values):
    windows = calibrate([one_channel(*values)])

    def missed(low, width):
        return sum(not low <= value < low + width for value in values)

    def cost(first, second):
        return missed(first, 3) + 2 * missed(second, 6)

    pairs = [(second, second + shift) for second in range(251) for shift in range(4)]
    least = min(cost(first, second) for second, first in pairs)
    expected = max((second, first) for second, first in pairs if cost(first, second) == least)
    assert (windows.base(6).item(), windows.base(3).item()) == expected
    for width in (4, 7):
        least = min(missed(low, width) for low in range(257 - width))
        highest = max(low for low in range(257 - width) if missed(low, width) == least)
        assert windows.base(width).item() == highest


def test_a_miss_of_6_counts_twice():
    """Ten values spread over six exponents, eight over three others: 5 + 2 x 10 beats 8 + 2 x 8."""
    spread = [100, 100, 101, 102, 102, 103, 103, 104, 105, 105]
    windows = calibrate([one_channel(*spread, 200, 200, 200, 201, 201, 202, 202, 202)])
    assert windows.base(6).item() == 100


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (np.zeros((4, 1, 9), np.uint8), r"inner_bases must be uint8 \[4, 1, 8\], got uint8 \[4, 1, 9\]"),
        (np.zeros((4, 1, 8), np.int64), r"got int64 \[4, 1, 8\]"),
        (np.full((4, 1, 8), 251, np.uint8), "bases of windows of 6 must be at most 250, got 251"),
        (
            np.array([4, 0, 0, 0], np.uint8).repeat(8).reshape(4, 1, 8),
            "window of 3 must lie inside that of 6",
        ),
        (
            np.array([4, 0, 5, 0], np.uint8).repeat(8).reshape(4, 1, 8),
            "window of 3 must lie inside that of 6",
        ),
    ],
)
def test_inner_windows_refuse(inner, message):
    with pytest.raises(ValueError, match=message):
        Windows(np.zeros((1, 8), np.uint8), np.zeros((1, 8), np.uint8), inner)


def test_windows_of_8_and_16_alone_have_no_others():
    windows = Windows(np.zeros((1, 8), np.uint8), np.ones((1, 8), np.uint8))
    assert windows.base(8) is windows.narrow_base
    assert windows.base(16) is windows.wide_base
    with pytest.raises(ValueError, match="windows of 7 exponents must be calibrated"):
        windows.base(7)


@pytest.mark.parametrize(
    ("values", "narrow", "wide"),
    [
        pytest.param([120], 120, 120, id="one exponent sits at the bottom of its window"),
        pytest.param([0], 0, 0, id="dead channel"),
        pytest.param([255], 248, 240, id="infinities: the window ends at 255"),
        pytest.param([100, 100, 110], 100, 100, id="narrow leaves the rarer one out"),
        pytest.param([100, 110], 110, 100, id="a tie goes up"),
    ],
)
def test_window_of_a_channel(values, narrow, wide):
    windows = calibrate([one_channel(*values)])
    assert (int(windows.narrow_base[0, 0]), int(windows.wide_base[0, 0])) == (narrow, wide)


def test_channels_and_all_leading_axes_are_calibrated_apart():
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << 16, (2, 3, 50, 8), dtype=np.uint16)  # [layer, kv_head, token, head_dim]
    windows = calibrate([patterns])
    assert windows.narrow_base.shape == (2, 3, 8)
    for layer, head, channel in np.ndindex(2, 3, 8):
        alone = calibrate([patterns[layer, head, :, channel].reshape(1, -1, 1)])
        assert windows.narrow_base[layer, head, channel] == alone.narrow_base[0, 0]
        assert windows.wide_base[layer, head, channel] == alone.wide_base[0, 0]


def test_histograms_add_up_over_arrays():
    patterns = np.random.default_rng(2).integers(0, 1 << 16, (2, 60, 8), dtype=np.uint16)
    whole = exponent_histogram(patterns)
    parts = exponent_histogram(patterns[:, :13]) + exponent_histogram(patterns[:, 13:])
    assert np.array_equal(whole, parts)
    assert whole.sum() == patterns.size
    assert np.array_equal(windows_of(parts).narrow_base, calibrate([patterns]).narrow_base)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([], "at least one array, got none"),
        ([np.zeros((2, 0, 8), np.uint16)], "at least one value, got none"),
        ([np.zeros((2, 4, 8), np.uint16), np.zeros((3, 4, 8), np.uint16)], r"got \[\(2, 8\), \(3, 8\)\]"),
        ([np.zeros((2, 4, 8), np.float32)], r"got float32 \[2, 4, 8\]"),
    ],
)
def test_calibration_refuses(arrays, message):
    with pytest.raises(ValueError, match=message):
        calibrate(arrays)


@pytest.mark.parametrize(
    ("narrow", "wide", "message"),
    [
        (
            np.full((1, 8), 249, np.uint8),
            np.zeros((1, 8), np.uint8),
            "narrow_base must be at most 248, got 249",
        ),
        (
            np.zeros((1, 8), np.uint8),
            np.full((1, 8), 241, np.uint8),
            "wide_base must be at most 240, got 241",
        ),
        (np.zeros((1, 8), np.int64), np.zeros((1, 8), np.uint8), "narrow_base must be uint8, got int64"),
        (np.zeros((1, 8), np.uint8), np.zeros((1, 9), np.uint8), r"got \(1, 8\) and \(1, 9\)"),
    ],
)
def test_windows_refuse(narrow, wide, message):
    with pytest.raises(ValueError, match=message):
        Windows(narrow, wide)


def bf16(values: np.ndarray) -> np.ndarray:
    import torch

    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def floats(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_rotation_is_multiplication_by_unit_complex_numbers():
    values = np.random.default_rng(3).standard_normal((2, 5, 8)).astype(np.float32)
    keys = bf16(values)
    pairs = floats(keys)[..., :4] + 1j * floats(keys)[..., 4:]
    turned = pairs * np.exp(1j * 300 * 1e4 ** (-2 * np.arange(4) / 8))
    expected = bf16(np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32))
    assert np.array_equal(rotate_keys(keys, 300, 1e4), expected)


def test_rotation_by_nothing_changes_no_bit():
    keys = bf16(np.random.default_rng(4).standard_normal((1, 20, 16)).astype(np.float32))
    assert np.array_equal(rotate_keys(keys, 0, 1e4), keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (np.zeros((1, 1, 7), np.uint16), "head_dim must be even to rotate keys, got 7"),
        (np.array([[[0x7F80, 0x7FC1]]], np.uint16), "finite, got 2 NaN or infinite values"),
    ],
)
def test_rotation_refuses(keys, message):
    with pytest.raises(ValueError, match=message):
        rotate_keys(keys, 1, 1e4)


def test_rotated_calibration_cures_drift_of_real_keys(shared_data):
    early = np.load(shared_data / "kv" / "smollm2_135m_prose_L14_k.npy")
    late = np.load(shared_data / "kv" / "smollm2_135m_code_pos6144_L14_k.npy")

    def miss_share(patterns, windows):
        return count_outside(patterns, windows.narrow_base, 8) / patterns.size

    plain = calibrate([early])
    assert miss_share(early, plain) == pytest.approx(0.0094, abs=1e-4)
    assert miss_share(late, plain) == pytest.approx(0.0246, abs=1e-4)
    rotated = calibrate([early, *(rotate_keys(early, tokens, 1e5) for tokens in (2048, 4096, 6144))])
    assert miss_share(early, rotated) == pytest.approx(0.0096, abs=1e-4)
    assert miss_share(late, rotated) == pytest.approx(0.0108, abs=1e-4)
    assert miss_share(late, rotated) <= 1.2 * miss_share(early, rotated)


def test_exponents_are_bits_14_to_7():
    assert exponents(np.array([0x8000, 0x3F80, 0xFFFF], np.uint16)).tolist() == [0, 127, 255]
