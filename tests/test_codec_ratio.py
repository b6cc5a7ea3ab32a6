"""Encoded and resident saving: laws, an example by hand, and the figures on real tensors."""

from math import erf, log2, sqrt

import numpy as np
import pytest

from kvfold.codec import fixed4
from kvfold.codec.cases import contents
from kvfold.codec.formats import FORMATS
from kvfold.codec.packed import Packed
from kvfold.codec.ratio import (
    SLOT_SLACK,
    calibrate_format,
    exponent_entropy_bits,
    measure,
    slot_bytes,
    total,
)
from kvfold.codec.survey import PAIRS, ROPE_THETA, ROTATIONS_TOKENS
from kvfold.codec.windows import calibrate, rotate_keys

GAAC = FORMATS["gaac"]


def packed_pages(*page_bytes: int) -> Packed:
    """Pages of these sizes that hold 2 heads x 64 tokens x 64 channels: 16,384 raw bytes."""
    starts = np.concatenate([[0], np.cumsum(page_bytes)]).astype(np.int64)
    shape = (2, 64 * len(page_bytes), 64)
    return Packed(shape, 64, np.zeros(starts[-1], np.uint8), starts, np.empty((2, 0, 64), np.uint16))


def test_slot_is_the_largest_calibration_page_plus_slack_in_steps_of_16():
    calibration = [packed_pages(9_600, 10_000), packed_pages(9_800)]
    assert slot_bytes(calibration, slack=0) == 10_000
    assert slot_bytes(calibration, slack=0.0001) == 10_016
    assert slot_bytes(calibration) == 16 * -(-10_000 * (1 + SLOT_SLACK) // 16)


def test_a_slot_is_never_larger_than_a_raw_page():
    assert slot_bytes([packed_pages(16_640)]) == 16_384


def test_pages_as_large_as_raw_ones_ask_for_no_slot():
    assert slot_bytes([packed_pages(10_000, 16_384, 16_640)], slack=0) == 10_000


def test_a_format_of_one_size_has_a_slot_of_that_size_and_raw_pages_beside_it():
    """The second page has an infinity in every element, so it stays raw; no slack where no page can be larger."""
    patterns = contents("normal", (2, 768, 64), np.random.default_rng(4))
    patterns[:, 256:512] = 0x7F80
    windows, slot = calibrate_format([patterns], FORMATS["fixed4"], 256)
    assert slot == fixed4.coded_page_bytes(2, 256, 64)
    measured = measure(
        patterns, FORMATS["fixed4"].encode(patterns, windows, 256), windows, FORMATS["fixed4"], slot
    )
    assert measured.raw_pages == 1
    assert measured.resident_bytes == 2 * slot + 65_536 + 3 * 8


@pytest.mark.parametrize(
    ("calibration", "message"),
    [([], r"one raw size, got \[\]"), ([packed_pages()], "at least one full calibration block, got none")],
)
def test_slot_refuses(calibration, message):
    with pytest.raises(ValueError, match=message):
        slot_bytes(calibration)


def test_resident_saving_by_hand():
    """Ten pages, one of which does not fit its slot: it stays raw and keeps no slot."""
    rng = np.random.default_rng(1)
    patterns = contents("normal", (2, 64 * 10 + 5, 64), rng)
    patterns[:, 128:192] = contents("outlier", (2, 64, 64), rng)
    windows = calibrate([patterns])
    packed = GAAC.encode(patterns, windows, 64)
    second = sorted(packed.page_bytes.tolist())[-2]
    assert packed.page_bytes.argmax() == 2
    assert packed.page_bytes[2] > second
    measured = measure(patterns, packed, windows, GAAC, slot_bytes=second)
    assert measured.raw_pages == 1
    assert measured.raw_block_share == 0.1
    assert measured.resident_bytes == 9 * second + 16_384 + 10 * 8
    assert measured.resident_saving == 1 - measured.resident_bytes / (10 * 16_384)
    assert measured.bits_per_element == 8 * packed.page_bytes.sum() / (10 * 8192)
    assert measured.raw_tail_share == 5 / 645
    assert sum(measured.mode_shares.values()) == pytest.approx(1)


def test_bf16_saves_nothing_and_costs_nothing():
    patterns = contents("uniform", (2, 130, 64), np.random.default_rng(2))
    windows, slot = calibrate_format([patterns], FORMATS["bf16"], 64)
    packed = FORMATS["bf16"].encode(patterns, windows, 64)
    measured = measure(patterns, packed, windows, FORMATS["bf16"], slot)
    assert measured.encoded_ratio == 1
    assert measured.resident_saving == 0
    assert measured.mode_shares == {}


def test_random_bits_expand_and_then_stay_raw():
    rng = np.random.default_rng(3)
    windows, slot = calibrate_format([contents("normal", (2, 640, 64), rng)], GAAC, 64)
    patterns = contents("uniform", (2, 640, 64), rng)
    measured = measure(patterns, GAAC.encode(patterns, windows, 64), windows, GAAC, slot)
    assert measured.encoded_ratio < 1
    assert measured.raw_block_share == 1
    assert measured.resident_saving == -8 / 16_384


def test_total_is_the_sum_of_its_parts():
    patterns = contents("normal", (2, 64 * 6, 64), np.random.default_rng(4))
    windows, slot = calibrate_format([patterns], GAAC, 64)
    parts = [patterns[:, :128], patterns[:, 128:]]
    together = total([measure(part, GAAC.encode(part, windows, 64), windows, GAAC, slot) for part in parts])
    whole = measure(patterns, GAAC.encode(patterns, windows, 64), windows, GAAC, slot)
    assert together.entropy_bits < whole.entropy_bits  # each part has its own tables
    for name in ("elements", "encoded_bits", "resident_bytes", "raw_pages", "exceptions", "mode_counts"):
        assert getattr(together, name) == getattr(whole, name), name
    assert np.array_equal(together.page_bits, whole.page_bits)


def test_measure_needs_a_full_block():
    patterns = np.zeros((1, 63, 8), np.uint16)
    windows = calibrate([patterns])
    with pytest.raises(ValueError, match="one full block of 64 tokens is needed, got 63 tokens"):
        measure(patterns, GAAC.encode(patterns, windows, 64), windows, GAAC, 100)


def test_entropy_of_known_distributions():
    even = (np.repeat(np.arange(4), 25).astype(np.uint16) << 7).reshape(1, 100, 1)  # 2 bits each
    assert exponent_entropy_bits(even) == pytest.approx(200)
    constant = np.full((1, 100, 1), 0x3F80, np.uint16)
    assert exponent_entropy_bits(np.concatenate([even, constant], axis=2)) == pytest.approx(200)


def test_no_static_exponent_code_beats_the_bound():
    patterns = contents("normal", (4, 64 * 100, 64), np.random.default_rng(5))
    windows, slot = calibrate_format([patterns], GAAC, 64)
    measured = measure(patterns, GAAC.encode(patterns, windows, 64), windows, GAAC, slot)
    # Exponents of a normal variable whose deviation is a power of two, of which 5 in 10,000 are set to zero.
    octaves = [(1 - 5e-4) * (erf(2 ** (k + 1) / sqrt(2)) - erf(2**k / sqrt(2))) for k in range(-40, 5)]
    entropy = -sum(share * log2(share) for share in (*octaves, 5e-4) if share)
    # The plug-in estimate lies low by about (symbols - 1) / (2 ln 2 * tokens) = 0.001 bits.
    assert 16 / measured.entropy_bound_ratio - 8 == pytest.approx(entropy, abs=0.003)
    assert 1.38 < measured.encoded_ratio < measured.entropy_bound_ratio


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_slot_holds_later_and_other_text(shared_data, pair, kind, rotated):
    """The measurement behind SLOT_SLACK: no page of tokens that calibration did not see outgrows its slot."""
    folder = shared_data / "kv"
    calibration = np.load(folder / f"{pair.calibration}_{kind}.npy")[:, pair.calibration_tokens]
    test = np.load(folder / f"{pair.test}_{kind}.npy")[:, pair.test_tokens]
    copies = [calibration]
    if kind == "k" and rotated:
        copies += [rotate_keys(calibration, tokens, ROPE_THETA) for tokens in ROTATIONS_TOKENS]
    windows, slot = calibrate_format(copies, GAAC, 64)
    measured = measure(test, GAAC.encode(test, windows, 64), windows, GAAC, slot)
    largest = max(GAAC.encode(copy, windows, 64).page_bytes.max() for copy in copies)
    excess = measured.page_bits.max() / (largest * 8 / (3 * 64 * 64)) - 1
    assert excess < SLOT_SLACK
    assert measured.raw_block_share == 0
    assert measured.resident_saving == pytest.approx(0.276, abs=0.004)
