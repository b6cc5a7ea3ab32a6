"""Attention over `gaac` pages: the sums of raw pages bit for bit, and wrong kernels that must fail."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold.codec import gaac
from kvfold.codec.windows import Windows
from kvfold.kernels import gaac_attend
from kvfold.kernels.gate import check_case
from kvfold.kernels.inputs import Case, draw, gaac_slots, pack_gaac

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WRONG = runpy.run_path(str(Path(__file__).parent / "wrong" / "gaac.py"))

# Ragged and empty sequences, shared pages, raw blocks among packed ones, a window that starts inside a page.
CASES = [
    Case((0, 129), 1, 1, 64, 64, 16),
    Case((130, 65), 1, 4, 64, 64, 64, raw_share=0.5, shared_blocks=1, seed=3),
    Case((150,), 1, 16, 64, 128, 128),
    Case((200,), 2, 5, 64, 64, 32, window=100),
    Case((64,), 1, 2, 128, 64, 16),
    Case((70,), 1, 1, 256, 64, 16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_pages_give_the_sums_of_raw_ones(case):
    assert check_case(case, DEVICE, ["gaac"], splits=2).faults == []


@pytest.mark.parametrize("base", [0, 100, 248], ids=["wide and raw", "raw", "narrow"])
def test_groups_of_every_mode(base):
    """Windows elsewhere than the values: groups of four bits, raw ones, and codes that cross three words."""
    drawn = draw(Case((64,), 1, 1, 64, 64, 16), DEVICE)
    kv, raw = pack_gaac(drawn)
    k, _ = drawn.patterns()
    wide = np.full((1, 64), min(base, 240), np.uint8)
    if base == 0:  # every other token in the wide window
        wide[:] = 112
    windows = Windows(np.full((1, 64), base, np.uint8), wide)
    slots, bases = gaac_slots(k, 64, DEVICE, windows)
    counts = gaac.mode_counts(gaac.encode(k, windows, 64))
    assert counts["3-bit"] == 0 or base == 248
    kv = replace(kv, packed_k=slots, windows_k=bases)
    expected = gaac_attend.attend(drawn.q, replace(kv, table=raw.table), 0.125, 1)
    assert torch.equal(gaac_attend.attend(drawn.q, kv, 0.125, 1), expected)


@pytest.mark.parametrize("wrong", WRONG["KERNELS"], ids=lambda wrong: wrong.__name__)
def test_wrong_kernels_are_rejected(wrong, monkeypatch):
    monkeypatch.setattr(gaac_attend, "attend", wrong)
    assert check_case(Case((201,), 1, 2, 64, 64, 16, window=100), DEVICE, ["gaac"], splits=1).faults


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed_k": torch.zeros(1, 24, dtype=torch.uint8)}, r"packed_k must be uint8 \[page, a multiple"),
        ({"windows_v": torch.zeros(2, 1, 32, dtype=torch.uint8)}, r"windows_v must be uint8 \[2, 1, 64\]"),
        ({"block_tokens": 32}, "of 64, 128 or 256 channels and tokens, got 64 and 32"),
    ],
)
def test_attend_refuses(changes, message):
    drawn = draw(Case((70,), 1, 2, 64, 64, 16), DEVICE)
    kv, _ = pack_gaac(drawn)
    with pytest.raises(ValueError, match=message):
        gaac_attend.attend(drawn.q, replace(kv, **changes), 0.125, 1)
