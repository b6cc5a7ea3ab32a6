"""`fixed3` attended in plain Triton against float64, and through the gate; wrong kernels do not pass."""

import runpy
from pathlib import Path

import pytest
import torch

from kvfold.kernels import fixed3_portable, reference
from kvfold.kernels.fixed3_pages import pack_fixed3
from kvfold.kernels.gate import BF16_TOLERANCE, check_case
from kvfold.kernels.inputs import Case, draw, raw_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WRONG = runpy.run_path(str(Path(__file__).parent / "wrong" / "fixed3_portable.py"))


def made(case):
    """Queries, packed pages and what attention over them is."""
    drawn = draw(case, DEVICE)
    kv, _, _ = pack_fixed3(drawn)
    raw = raw_pages(drawn)
    sides = [reference.raw_tokens(raw, b) for b in range(raw.batch)]
    scale = case.head_dim**-0.5
    return drawn.q, kv, reference.attend(drawn.q, [k for k, _ in sides], [v for _, v in sides], scale)


def error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


# Ragged, with raw blocks among packed ones, a tail and a window; one to sixteen query heads.
CASES = [
    Case((270, 40), 1, 4, 128, 256, 64, seed=8),
    Case((135, 70), 1, 1, 64, 64, 16, raw_share=0.4, seed=3),
    Case((140,), 1, 16, 64, 64, 16, window=100, seed=7),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case):
    q, kv, exact = made(case)
    assert int(kv.pages.table.packed_counts.sum()) > 0
    for splits in (1, 2):
        assert error(fixed3_portable.attend(q, kv, case.head_dim**-0.5, splits), exact) < BF16_TOLERANCE


def test_the_gate_finds_nothing_and_sees_a_wrong_byte(monkeypatch):
    case = Case((64, 20), 1, 2, 64, 64, 16, seed=2)
    checks = ("fixed3-pages", "fixed3-portable")
    assert check_case(case, DEVICE, checks).faults == []

    def spoiled(drawn):
        kv, raw, exceptions = pack_fixed3(drawn)
        kv.pages.packed_v[:, :, 0] ^= 16
        return kv, raw, exceptions

    monkeypatch.setattr("kvfold.kernels.gate.pack_fixed3", spoiled)
    faults = check_case(case, DEVICE, checks[:1]).faults
    assert len(faults) == 2
    assert "bytes of packed v differ" in faults[0]
    assert "unpacked v differs" in faults[1]


@pytest.fixture(scope="module")
def windowed():
    q, kv, exact = made(Case((3 * 64 + 9,), 1, 2, 64, 64, 16, window=64 * 2 + 42, seed=6))
    assert error(fixed3_portable.attend(q, kv, 0.125, 1), exact) < BF16_TOLERANCE
    return q, kv, exact


@pytest.mark.parametrize("wrong", WRONG["KERNELS"], ids=lambda wrong: wrong.__name__)
def test_wrong_kernels_are_rejected(wrong, windowed):
    q, kv, exact = windowed
    assert not error(wrong(q, kv, 0.125, 1), exact) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("head_dim", "message"),
    [(32, "head_dim must be 64 or 128"), (64, r"packed pages must be \[page, 1, 5760\]")],
)
def test_what_the_kernel_cannot_take_is_refused(head_dim, message):
    q, kv, _ = made(Case((70,), 1, 4, 64, 64, 16))
    raw = kv.pages.raw_k[..., :head_dim].contiguous()
    pages = type(kv.pages)(
        kv.pages.packed_k[..., :-16], kv.pages.packed_v[..., :-16], raw, raw, kv.pages.table, 64
    )
    kv = type(kv)(pages, kv.k_lists, kv.v_lists, kv.k_entries, kv.v_entries)
    with pytest.raises(ValueError, match=message):
        fixed3_portable.attend(q[..., :head_dim].contiguous(), kv, 1.0, 1)
