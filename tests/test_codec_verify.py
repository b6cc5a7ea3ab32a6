"""Ten million values through every format; and the checker itself must see what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.codec import names, verify
from kvfold.codec.cases import CONTENTS
from kvfold.codec.formats import FORMATS
from kvfold.codec.names import find_format, known_names, split_names
from kvfold.codec.verify import HEAD_DIMS, every_pattern_in_every_lane, find_mismatches, verify_format


@pytest.mark.parametrize("name", known_names())
def test_ten_million_values_come_back(name):
    *_, last = verify_format(name, 10_000_000, seed=2)
    assert last.values >= 10_000_000
    assert last.mismatches == 0, last.first


@pytest.mark.parametrize(
    "name", ["gaac:group=4,axis=token", "gaac:group=32", "fixed4:kind=v", "gaac-2bit:group=16"]
)
def test_formats_with_parameters_too(name):
    *_, last = verify_format(name, 1, seed=3)
    assert (last.mismatches, last.first) == (0, ())


def test_every_pattern_is_sent_in_every_lane():
    arrays = list(every_pattern_in_every_lane())
    for patterns, _ in arrays:
        lanes = patterns.reshape(-1, 8)
        for lane in range(8):
            assert len(np.unique(lanes[:, lane])) == 1 << 16
    assert len(arrays) == 5


def test_all_kinds_and_sizes_take_turns(monkeypatch):
    seen = []
    monkeypatch.setattr(
        verify, "contents", lambda kind, shape, rng: seen.append((kind, shape)) or np.zeros(shape, np.uint16)
    )
    for found in verify_format("gaac", 40_000_000, seed=1):
        assert found.mismatches == 0
    sent = seen[::2]
    assert {kind for kind, _ in sent} == set(CONTENTS)
    assert {shape[2] for _, shape in sent} == set(HEAD_DIMS)
    assert any(shape[1] % 64 for _, shape in sent)


@pytest.mark.parametrize("name", ["gaac", "esc3+fp8-e4m3"])
def test_one_lost_bit_in_one_rare_pattern_is_seen(name, monkeypatch):
    """A decoder that mistakes one NaN payload, or one FP8 byte."""
    good = find_format(name)

    def lose(packed):
        patterns = good.decode(packed)
        patterns[patterns == 0x7F81] ^= 1
        patterns[patterns == 0x3D00] ^= 1
        return patterns

    monkeypatch.setattr(verify, "find_format", lambda _: replace(good, decode=lose))
    *_, last = verify_format(name, 1, seed=1)
    assert last.mismatches >= 5 * 8
    assert len(last.first) == 5
    assert "-> 0x" in last.first[0]


def test_a_lost_fp8_bit_is_seen_where_bf16_hides_it(monkeypatch):
    """Both NaN bytes of E5M2 widen to one BF16 NaN: only the check of bytes can tell them apart."""
    good = names.fp8.decode_bytes

    def lose(packed):
        values = good(packed)
        values[values == 0x7D] = 0x7F
        return values

    monkeypatch.setattr(names.fp8, "decode_bytes", lose)
    *_, last = verify_format("fp8-e5m2", 1, seed=1)
    assert last.mismatches > 0
    assert "0x7d -> 0x7f" in last.first[0]


def test_the_same_seed_sends_the_same_values():
    runs = [[found.values for found in verify_format("bf16", 8_000_000, seed=seed)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_mismatches_show_bytes_with_two_digits():
    found = find_mismatches(np.array([1, 2], np.uint8), np.array([1, 3], np.uint8))
    assert found.first == ("[1] 0x02 -> 0x03",)


def test_names_in_a_list_keep_their_parameters():
    assert split_names("gaac:group=16,axis=token,esc3,fp8-e4m3:scale=amax") == [
        "gaac:group=16,axis=token",
        "esc3",
        "fp8-e4m3:scale=amax",
    ]
    assert split_names("all") == known_names()
    assert set(FORMATS) <= set(known_names())
