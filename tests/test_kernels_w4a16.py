"""4-bit weights: the product against float64 over the weights that codes, scales and zeros stand for."""

import pytest
import torch

from kvfold.kernels import w4a16

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Outputs and unpacked weights are rounded to BF16: 2^-9, and 2^-8 in the interpreter, which cuts bits off.
TOLERANCE = 2.0**-8


def made(in_features, out_features):
    """Codes, the weights packed from them, and the weights in float64."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (in_features, out_features), generator=generator)
    groups = (in_features // w4a16.GROUP_INPUTS, out_features)
    scales = (0.001 + 0.02 * torch.rand(groups, generator=generator)).half()
    zeros = (7 + 2 * torch.rand(groups, generator=generator)).half()
    repeat = w4a16.GROUP_INPUTS
    dense = (codes - zeros.double().repeat_interleave(repeat, 0)) * scales.double().repeat_interleave(
        repeat, 0
    )
    words = w4a16.pack_codes(codes)
    return w4a16.Weights(words.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE)), dense


@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features", "rows", "splits"),
    [
        (1, 256, 128, 16, 1),
        (5, 384, 128, 16, 3),
        (17, 256, 128, 16, 2),
        (70, 256, 128, 32, 2),
        (3, 128, 128, 16, 2),
    ],
)
def test_linear_against_float64(tokens, in_features, out_features, rows, splits):
    weights, dense = made(in_features, out_features)
    x = torch.randn((tokens, in_features), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = x.double() @ dense
    got = w4a16.linear(x.to(DEVICE), weights, rows, splits).cpu().double()
    assert (got - expected).norm() / expected.norm() < TOLERANCE


def test_unpacked_weights_are_those_of_the_codes():
    weights, dense = made(256, 256)
    got = w4a16.unpack(weights).cpu().double()
    assert ((got - dense).abs() <= 2 * TOLERANCE * dense.abs() + 1e-12).all()


def test_a_wrong_zero_is_seen():
    weights, dense = made(256, 128)
    x = torch.ones((1, 256), dtype=torch.bfloat16)
    wrong = w4a16.Weights(weights.words, weights.scales, weights.zeros + 1)
    got = w4a16.linear(x.to(DEVICE), wrong).cpu().double()
    assert (got - x.double() @ dense).norm() / (x.double() @ dense).norm() > TOLERANCE


@pytest.mark.parametrize(
    ("x", "rows", "message"),
    [
        (torch.zeros(1, 256), 16, "x must be contiguous torch.bfloat16"),
        (torch.zeros(1, 128, dtype=torch.bfloat16), 16, r"x must be contiguous torch.bfloat16 \[1, 256\]"),
        (torch.zeros(1, 256, dtype=torch.bfloat16), 8, r"rows must be one of \(16, 32\)"),
    ],
)
def test_linear_refuses(x, rows, message):
    with pytest.raises(ValueError, match=message):
        w4a16.linear(x.to(DEVICE), made(256, 128)[0], rows)
