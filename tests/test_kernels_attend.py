"""Attention over raw pages against the reference, with windows, ragged lengths and tails; `fixed4` on a GPU."""

import math
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold.codec.formats import FORMATS
from kvfold.codec.windows import calibrate
from kvfold.kernels import bf16, fixed4, fixed4_portable, fp8, gaac_attend, reference
from kvfold.kernels.fixed4_layout import nibble_layout, weight_layouts
from kvfold.kernels.fuzz import VARIANTS, cases
from kvfold.kernels.gate import check_case
from kvfold.kernels.inputs import Case, draw, make, raw_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU_ONLY = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="Gluon has no interpreter: needs an NVIDIA GPU"
)
WRONG, PORTABLE_WRONG = (
    runpy.run_path(str(Path(__file__).parent / "wrong" / name)) for name in ("attend.py", "portable.py")
)
# BF16 weights (2^-9 each) and float32 sums: the relative error of a weighted mean of independent values.
TOLERANCE = 2.0**-8

CASES = [
    Case((1, 63, 64), 1, 4, 64, 64, 16),
    Case((130, 65), 2, 1, 64, 64, 64),
    Case((130,), 1, 16, 128, 128, 128),
    Case((200, 130), 2, 5, 64, 64, 32, raw_share=0.5),
    Case((200, 40), 2, 2, 64, 64, 16, window=100),
    Case((140,), 1, 2, 256, 64, 16),
]


def exact(q, kv, scale):
    sides = [reference.dense(kv, b) for b in range(kv.batch)]
    return reference.attend(q.cpu(), [k for k, _ in sides], [v for _, v in sides], scale)


def only_raw(case):
    """Queries and raw pages of a case; packing them is slow in the interpreter."""
    drawn = draw(case, DEVICE)
    return drawn.q, raw_pages(drawn)


def check(kernel, case, splits):
    """Raise AssertionError unless the kernel's result is that of float64, and nothing else was written."""
    q, raw = only_raw(case)
    scale = case.head_dim**-0.5
    expected = exact(q, raw, scale)
    guarded = torch.full((len(q) + 2, *q.shape[1:]), math.nan, device=DEVICE)
    kernel(q, raw, scale, splits, guarded[: len(q)])
    assert bool(guarded[len(q) :].isnan().all()), "wrote past the end"
    error = (guarded[: len(q)].cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCE, f"error {error:.2e}"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_raw_pages_against_float64(case, splits):
    check(bf16.attend, case, splits)


@pytest.mark.parametrize("programs", [1, 5, 100])
@pytest.mark.parametrize("case", CASES[:1] + CASES[3:5], ids=str)
def test_even_shares_against_float64(case, programs):
    check(partial(bf16.attend, tile_tokens=64, programs=programs), case, 1)


@pytest.mark.parametrize("wrong", WRONG["KERNELS"], ids=lambda wrong: wrong.__name__)
def test_wrong_kernels_are_rejected(wrong):
    case = Case((200, 40), 2, 2, 64, 64, 16, window=100)
    with pytest.raises(AssertionError, match="error"):
        check(wrong, case, 3)


@pytest.mark.parametrize("case", CASES[3:5], ids=str)
def test_packed_pages_hold_the_same_tokens_in_the_same_order(case):
    _, kv, raw = make(case, DEVICE)
    for sequence in range(kv.batch):
        for packed, plain in zip(reference.dense(kv, sequence), reference.dense(raw, sequence), strict=True):
            assert torch.equal(packed.view(torch.int16), plain.view(torch.int16))


def test_a_window_is_the_last_tokens():
    (q, whole), (_, windowed) = (only_raw(Case((150,), 1, 2, 64, 64, 16, window=w)) for w in (None, 100))
    k, v = reference.dense(whole, 0)
    expected = reference.attend(q.cpu(), [k], [v], 0.125, window=100)
    assert torch.equal(exact(q, windowed, 0.125), expected)


def test_the_reference_by_hand():
    q = torch.tensor([[[1.0], [2.0]]])  # one sequence, two query heads of one KV head
    k = torch.tensor([[[0.0], [math.log(3.0)]]])
    v = torch.tensor([[[1.0], [5.0]]])
    assert reference.attend(q, [k], [v], 1.0).flatten().tolist() == pytest.approx([16 / 4, 46 / 10])


@pytest.mark.parametrize("name", sorted(set(FORMATS) & {"bf16", "gaac"}))
def test_the_reference_over_a_format_is_that_over_its_values(name):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn((2, 2, 150, 64), generator=generator).to(torch.bfloat16)
    patterns = values.view(torch.int16).numpy().view(np.uint16)
    windows = calibrate([patterns[0]])
    k, v = (FORMATS[name].encode(side, windows, 64) for side in patterns)
    q = torch.randn((1, 4, 64), generator=generator).to(torch.bfloat16)
    expected = reference.attend(q, [values[0]], [values[1]], 0.125)
    assert torch.equal(reference.attend_packed(q, [k], [v], name, 0.125), expected)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(1, 4, 64), "must be contiguous bfloat16"),
        (
            torch.zeros(2, 4, 64, dtype=torch.bfloat16),
            r"q must be \[1, a multiple of 1, 64\], got \[2, 4, 64\]",
        ),
        (torch.zeros(1, 17, 64, dtype=torch.bfloat16), "at most 16 query heads per KV head, got 17"),
    ],
)
def test_attend_refuses(q, message):
    _, raw = only_raw(Case((70,), 1, 4, 64, 64, 16))
    for kernel in (bf16, fixed4, fixed4_portable, fp8, gaac_attend):
        with pytest.raises(ValueError, match=message):
            kernel.attend(q.to(DEVICE), raw, 0.125, 1)


@pytest.mark.parametrize(
    ("batch", "blocks", "splits"), [(1, 256, 16), (8, 256, 2), (32, 32, 1), (256, 4, 1), (1, 3, 3)]
)
def test_splits_fill_the_gpu_once(batch, blocks, splits):
    assert fixed4.split_count(batch, 8, blocks, 132) == splits


@pytest.mark.parametrize("units", [16, 32])
@pytest.mark.parametrize("heads", [8, 16])
def test_shared_layouts_are_bijections(units, heads):
    written, read = weight_layouts(units, heads)
    for layout, shape in (
        (written, (2 * units, heads)),
        (read, (units, heads)),
        (nibble_layout(units, 128), (2 * units, 128)),
    ):
        seen = set()
        for offset in range(1 << len(layout.offset_bases)):
            at = [0, 0]
            for bit, basis in enumerate(layout.offset_bases):
                if offset >> bit & 1:
                    at = [at[0] ^ basis[0], at[1] ^ basis[1]]
            seen.add(tuple(at))
        assert seen == {(r, c) for r in range(shape[0]) for c in range(shape[1])}


# Ragged, with raw blocks among packed ones, a tail, a window; on a GPU only pages of 256 tokens.
PORTABLE = [
    Case((270, 40), 1, 4, 64, 256, 64, seed=8),
    Case((150, 130), 2, 2, 64, 64, 16, raw_share=0.5, seed=6),
    Case((140,), 1, 16, 64, 64, 16, window=100, seed=7),
]


@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_portable_fixed4_against_float64(case):
    if DEVICE == "cuda" and case.block_tokens != 256:
        pytest.skip("tiles of this page are smaller than a GPU's products")
    q, kv, _ = make(case, DEVICE)
    plant_exceptions(kv, case)
    expected = exact(q, kv, 0.125)
    error = (fixed4_portable.attend(q, kv, 0.125, 2).cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCE, f"error {error:.2e}"


def plant_exceptions(kv, case):
    """Large values in the lists of packed pages: a kernel that overlooks one is far off."""
    start = case.block_tokens * case.head_dim * 3 // 2
    for records in (kv.packed_k, kv.packed_v):
        for page in range(len(records)):
            for head in range(records.shape[1]):
                count = records[page, head, start + 64 + case.head_dim :][:4].view(torch.int32)
                entries = records[page, head, start : start + 64].view(torch.int32)
                values = reference.decode_records(
                    records[page : page + 1], "k" if records is kv.packed_k else "v", case.block_tokens, 64
                )[head]
                zeros = (values.view(torch.int16) == 0).nonzero()
                if int(count) > 0:  # a listed value is tiny: make it large
                    entries[0] = (int(entries[0]) & ~0xFFFF) | 0x41A0
                elif len(zeros):
                    token, channel = zeros[0].tolist()
                    entries[0] = (token << 24 | channel << 16 | 0x41A0) - (1 << 32 if token > 127 else 0)
                    count[0] = 1


@pytest.fixture(scope="module")
def planted():
    """Queries, pages whose lists matter and whose first page is skipped in part, and the attention over them."""
    block_tokens = 256 if DEVICE == "cuda" else 64
    case = Case((2 * block_tokens + 9,), 1, 2, 64, block_tokens, 16, window=block_tokens + 42, seed=6)
    q, kv, _ = make(case, DEVICE)
    plant_exceptions(kv, case)
    expected = exact(q, kv, 0.125)
    right = fixed4_portable.attend(q, kv, 0.125, 1).cpu().double()
    assert (right - expected).norm() / expected.norm() < TOLERANCE
    return q, kv, expected


@pytest.mark.parametrize("wrong", PORTABLE_WRONG["KERNELS"], ids=lambda wrong: wrong.__name__)
def test_wrong_portable_kernels_are_rejected(wrong, planted):
    q, kv, expected = planted
    result = wrong(q, kv, 0.125, 1).cpu().double()
    assert not (result - expected).norm() / expected.norm() < TOLERANCE


@GPU_ONLY
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_every_variant_passes_the_gate(number):
    case = next(case for found, case in cases(200, 1) if found == number)
    variant = VARIANTS[number]
    faults = check_case(
        case, DEVICE, variant.checks, variant.splits, variant.programs, variant.has_skips, variant.copies
    ).faults
    assert faults == []
