"""The gate sees both modes of a fused format in every case, in few variants; the codec packs as the packer."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kvfold.kernels import bf16, gate
from kvfold.kernels.fused import FIXED4
from kvfold.kernels.fuzz import VARIANTS, Variant
from kvfold.kernels.gate import check_case, check_fused
from kvfold.kernels.inputs import Case, draw, encode_fixed4, pack_fixed4, raw_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = Case((70, 33), 1, 2, 64, 64, 16, seed=5)


def stand_in(exceptions, changes, seen):
    """A format whose packed pages are raw ones; ``changes`` are added to what a mode makes of packed pages.

    The gate launches the raw pages first. Every launch is noted in ``seen``.
    """

    def attend(q, kv, scale, splits, out, has_skips, copies, in_tile=False):
        bf16.attend(q, kv, scale, splits, out)
        if seen:
            out[0, 0, 0] += changes.get("in tile" if in_tile else "fast", 0.0)
        seen.append((has_skips, copies, in_tile))
        return out

    def pack_drawn(drawn):
        return raw_pages(drawn), raw_pages(drawn), exceptions

    return replace(FIXED4, name="stand-in", attend=attend, pack_drawn=pack_drawn)


@pytest.mark.parametrize(
    ("exceptions", "changes", "fault"),
    [
        (0, {}, None),
        (3, {"fast": 1e-5}, None),  # out of order: as exact as BF16
        (0, {"fast": 1e-5}, "stand-in: sums differ from raw pages' without an exception"),
        (3, {"fast": 1.0}, "stand-in: the error against float64"),
        (0, {"in tile": 1e-5}, "stand-in in tile: sums differ from raw pages'"),
        (3, {"in tile": 1e-5}, "stand-in in tile: sums differ from raw pages'"),
    ],
)
@pytest.mark.parametrize("has_skips", [False, True])
def test_both_modes_of_every_case_are_checked(monkeypatch, has_skips, exceptions, changes, fault):
    seen = []
    fused = stand_in(exceptions, changes, seen)
    monkeypatch.setitem(gate.CHECKS, fused.name, partial(check_fused, fused=fused))
    found = check_case(CASE, DEVICE, [fused.name], splits=2, has_skips=has_skips, copies=1)
    assert [line.startswith(fault) for line in found.faults] == ([] if fault is None else [True])
    assert found.checked[:2] == ["stand-in", "stand-in in tile"]
    assert ("stand-in without an exception" in found.checked) == (exceptions == 0)
    assert seen == [(has_skips, 1, in_tile) for in_tile in (False, False, False, True)]


def test_a_kernel_for_windows_takes_all_cases_of_its_variant():
    assert not Variant((), 4, 128, 256, 64, 3, (None,)).has_skips
    assert Variant((), 4, 128, 256, 64, 3, (None, 64)).has_skips
    assert {variant.has_skips for variant in VARIANTS} == {False, True}


def test_the_fuzz_keeps_one_and_two_copies_on_their_way():
    for name in ("fixed4", "fixed3", "fixed4-coded"):
        assert {variant.copies for variant in VARIANTS if name in variant.checks} == {1, 2}


def test_the_fuzz_compiles_at_most_40_variants():
    script = Path(__file__).parent / "fuzz_variants.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "52"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    by_kernel = json.loads(found.stdout)
    assert sum(by_kernel.values()) <= 40
    # Both modes of each: shapes, ways to divide the work and query heads.
    assert by_kernel["fixed4_gluon.attend_kernel"] == 10
    assert by_kernel["fixed3_gluon.attend_kernel"] == 6


# The shapes whose pages the fuzz takes from the codec.
@pytest.mark.parametrize(("head_dim", "block_tokens", "page_tokens"), [(64, 128, 16), (256, 256, 256)])
def test_the_codec_packs_what_the_packer_packs(head_dim, block_tokens, page_tokens):
    lengths = (2 * block_tokens + 20, 0, 2 * block_tokens)
    case = Case(lengths, 2, 1, head_dim, block_tokens, page_tokens, shared_blocks=1, seed=4)
    drawn = draw(case, DEVICE)
    drawn.raw_v[drawn.block_pages[0][0], 1, :10, 5:9] = 1e-30  # does not fit: raw in both
    kv, raw, exceptions = pack_fixed4(drawn)
    coded, coded_raw, coded_exceptions = pack_fixed4(drawn, encode_fixed4)
    assert coded_exceptions == exceptions > 0
    for made, expected in ((coded, kv), (coded_raw, raw)):
        for name in ("packed_pages", "packed_counts", "raw_pages", "raw_tokens"):
            assert torch.equal(getattr(made.table, name), getattr(expected.table, name))
    used = kv.table.packed_pages[kv.table.packed_pages >= 0].unique().long()
    assert used.tolist() == [1, 2]
    assert torch.equal(coded.packed_k[used], kv.packed_k[used])
    assert torch.equal(coded.packed_v[used], kv.packed_v[used])
