"""Attention over FP8 pages against the reference over the cast values, and wrong kernels that must fail."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold.codec.fp8 import E4M3, E5M2, widen_table
from kvfold.kernels import fp8
from kvfold.kernels.gate import check_case
from kvfold.kernels.inputs import Case, cast_drawn, draw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WRONG = runpy.run_path(str(Path(__file__).parent / "wrong" / "fp8.py"))

# Ragged and empty sequences, shared pages, a window that starts inside a page, a page that is part full.
CASES = [
    Case((0, 129), 1, 4, 64, 64, 16),
    Case((130, 65), 1, 1, 128, 64, 64, shared_blocks=1),
    Case((300,), 1, 16, 64, 128, 128),
    Case((200,), 2, 5, 64, 64, 32, window=100),
    Case((140,), 1, 2, 256, 64, 16),
]


@pytest.mark.parametrize("kind", ["fp8-e4m3", "fp8-e5m2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference_over_the_cast_values(case, kind):
    assert check_case(case, DEVICE, [kind], splits=2).faults == []


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=lambda kind: kind.name)
def test_every_byte_is_the_codecs_value(kind):
    """One token of weight 1 and V of all 256 patterns: the result is the value itself."""
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 256, 1).expand(1, 1, 256, 16).contiguous()
    kv, _ = cast_drawn(draw(Case((1,), 1, 1, 256, 64, 16), DEVICE), kind)
    kv = replace(kv, raw_v=values.to(DEVICE).view(kv.raw_v.dtype))
    q = torch.zeros((1, 1, 256), dtype=torch.bfloat16, device=DEVICE)
    got = fp8.attend(q, kv, 1.0, 1).cpu().flatten()
    expected = torch.from_numpy(widen_table(kind).view(np.int16)).view(torch.bfloat16).float()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("exponent", [-120, 0, 100])
def test_queries_of_any_magnitude(exponent):
    """FP16 operands hold a query because its head's largest magnitude is brought to 1 first."""
    kv, _ = cast_drawn(draw(Case((70,), 1, 2, 64, 64, 16), DEVICE), E4M3)
    q = torch.randn((1, 2, 64), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    expected = fp8.attend(q, kv, 0.125, 1)
    got = fp8.attend((q.double() * 2.0**exponent).to(torch.bfloat16), kv, 0.125 * 2.0**-exponent, 1)
    assert torch.equal(got, expected)


def test_scales_are_those_of_the_values():
    kv, _ = cast_drawn(draw(Case((70,), 1, 2, 64, 64, 16), DEVICE), E4M3)
    q = torch.randn((1, 2, 64), generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    plain = fp8.attend(q, kv, 0.125, 2)
    assert torch.equal(fp8.attend(q, kv, 0.0625, 2, k_scale=2.0, v_scale=4.0), 4.0 * plain)


@pytest.mark.parametrize("wrong", WRONG["KERNELS"], ids=lambda wrong: wrong.__name__)
def test_wrong_kernels_are_rejected(wrong, monkeypatch):
    monkeypatch.setattr(fp8, "attend", wrong)
    assert check_case(Case((201,), 1, 2, 64, 64, 16, window=100), DEVICE, ["fp8-e4m3"], splits=1).faults


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw_k": torch.zeros(1, 1, 16, 64)}, "pages must be float8_e4m3fn or float8_e5m2"),
        ({"raw_v": torch.zeros(1, 1, 16, 64).to(torch.float8_e5m2)}, "both, got torch.float8_e4m3fn and"),
        ({"raw_v": torch.zeros(1, 1, 16, 64).to(torch.float8_e4m3fn)}, r"raw_v must be \[1, 1, 64, 16\]"),
    ],
)
def test_attend_refuses(changes, message):
    kv, _ = cast_drawn(draw(Case((7,), 1, 1, 64, 64, 16), DEVICE), E4M3)
    changes = {name: value.to(DEVICE) for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        fp8.attend(
            torch.zeros((1, 1, 64), dtype=torch.bfloat16, device=DEVICE), replace(kv, **changes), 0.1, 1
        )
