"""Codes squeezed into one integer and spread again, words at any byte, patterns split and joined."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from kvfold.codec.swar import join_patterns, load_word, split_patterns, spread, squeeze, store_word


@njit
def squeeze_word(lanes, width):
    return squeeze(lanes, width)


@njit
def spread_word(word, width):
    return spread(word, width)


@njit
def load_at(data, place):
    return load_word(data, place)


@njit
def store_at(data, place, word):
    store_word(data, place, word)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    width=st.sampled_from([1, 2, 3, 4, 8]),
    lanes=st.lists(st.integers(0, 255), min_size=8, max_size=8),
    above=st.integers(0, 2**64),
)
def test_lane_i_stands_at_bit_i_times_width_and_comes_back(width, lanes, above):
    lanes = [lane % 2**width for lane in lanes]
    word = np.uint64(int.from_bytes(bytes(lanes), "little"))
    together = sum(lane << width * number for number, lane in enumerate(lanes))
    assert int(squeeze_word(word, width)) == together
    dirty = np.uint64((together | above << 8 * width) % 2**64)
    assert int(spread_word(dirty, width)) == int(word)


@pytest.mark.parametrize("size", [8, 11, 16])
def test_words_at_any_byte_stay_inside_the_array(size):
    data = np.arange(1, size + 1, dtype=np.uint8)
    for place in range(size + 1):
        assert int(load_at(data, place)) == int.from_bytes(bytes(data[place : place + 8]), "little")
        around = np.zeros(size + 16, np.uint8)
        store_at(around[8 : 8 + size], place, np.uint64(0x8877665544332211))
        expected = np.zeros(size + 16, np.uint8)
        room = min(8, size - place)
        expected[8 + place : 8 + place + room] = [0x11 * (byte + 1) for byte in range(room)]
        assert np.array_equal(around, expected)


def test_every_pattern_is_split_and_joined():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    sign_mantissa, exponent = np.empty(1 << 16, np.uint8), np.empty(1 << 16, np.uint8)
    split_patterns(patterns, sign_mantissa, exponent)
    assert np.array_equal(exponent, patterns >> 7 & 0xFF)
    assert np.array_equal(sign_mantissa, (patterns >> 15 << 7) | patterns & 0x7F)
    joined = np.empty(1 << 16, np.uint16)
    join_patterns(sign_mantissa, exponent, joined)
    assert np.array_equal(joined, patterns)
