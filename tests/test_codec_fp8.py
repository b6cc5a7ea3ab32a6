"""FP8 casts: torch's bits on every BF16 pattern, the nearest value by search, the stated rules at the edges."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec.cases import CONTENTS, contents
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.fp8 import E4M3, E5M2, amax_scale, cast_table, decode_bytes, encode_bytes, widen_table
from kvfold.codec.names import find_format

KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=lambda kind: kind.name)
EVERY = np.arange(1 << 16, dtype=np.uint16)


def floats(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def in_torch(patterns: np.ndarray):
    import torch

    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)


def torch_kind(kind):
    import torch

    return torch.float8_e4m3fn if kind is E4M3 else torch.float8_e5m2


@KINDS
def test_every_pattern_is_cast_as_torch_does(kind):
    import torch

    cast = in_torch(EVERY).to(torch_kind(kind)).view(torch.uint8).numpy()
    assert np.array_equal(cast_table(kind), cast)


@KINDS
@pytest.mark.parametrize("scale", [0.01, 0.3, 1.7, 1 / 448, 1e-30, 3e38])
def test_every_pattern_is_cast_with_a_scale_as_torch_does(kind, scale):
    import torch

    scaled = in_torch(EVERY).float() / torch.tensor(scale, dtype=torch.float32)
    cast = scaled.to(torch_kind(kind)).view(torch.uint8).numpy()
    assert np.array_equal(cast_table(kind, scale), cast)


@KINDS
@pytest.mark.parametrize("scale", [1.0, 0.01, 0.3, 1.7, 1e-30, 3e38])
def test_every_byte_is_widened_as_torch_does(kind, scale):
    import torch

    values = torch.arange(256, dtype=torch.uint8).view(torch_kind(kind)).float()
    widened = (values * torch.tensor(scale, dtype=torch.float32)).to(torch.bfloat16)
    widened = widened.view(torch.int16).numpy().view(np.uint16)
    ours = widen_table(kind, scale)
    is_nan = np.isnan(kind.values())
    assert np.array_equal(ours[~is_nan], widened[~is_nan])
    assert (ours[is_nan] & 0x7FFF == 0x7FC0).all()
    assert np.array_equal(ours >> 15, np.arange(256) >> 7)


@KINDS
def test_the_cast_is_the_nearest_value_by_search(kind):
    """Written apart from the integer operations: sorted values, halves between them, ties to the even pattern."""
    finite = kind.values()[: kind.largest + 1].astype(np.float64)
    halfway = (finite[1:] + finite[:-1]) / 2
    magnitudes = floats(EVERY[:0x7F80]).astype(np.float64)
    below = np.searchsorted(halfway, magnitudes, side="left")
    above = np.searchsorted(halfway, magnitudes, side="right")
    nearest = np.where(below % 2 == 0, below, above)
    beyond = (finite[-1] + 2 ** np.floor(np.log2(finite[-1])) * 2.0**-kind.mantissa_bits / 2) <= magnitudes
    nearest[beyond] = kind.beyond
    assert np.array_equal(cast_table(kind)[:0x7F80], nearest)


@KINDS
def test_every_fp8_value_survives_the_way_through_bf16(kind):
    """All but NaNs, which become the one of their sign."""
    back = cast_table(kind)[widen_table(kind)]
    is_nan = np.isnan(kind.values())
    assert np.array_equal(back[~is_nan], np.arange(256)[~is_nan])
    assert (back[is_nan] & 0x7F == 0x7F).all()


@pytest.mark.parametrize(
    ("kind", "pattern", "expected"),
    [
        (E4M3, 0x43E0, 0x7E),  # 448
        (E4M3, 0x43E8, 0x7E),  # 464: halfway to 480, which does not exist
        (E4M3, 0x7F7F, 0x7E),
        (E4M3, 0xFF80, 0xFE),
        (E4M3, 0xFFC1, 0xFF),
        (E5M2, 0x476F, 0x7B),  # 61,184
        (E5M2, 0x4770, 0x7C),  # 61,440: halfway to 65,536
        (E5M2, 0xFF80, 0xFC),
        (E5M2, 0x7F81, 0x7F),
        (E4M3, 0x3A80, 0x00),  # 2**-10: halfway to the smallest subnormal, ties to even
        (E4M3, 0x3A81, 0x01),
        (E4M3, 0x8001, 0x80),
    ],
)
def test_edges(kind, pattern, expected):
    assert cast_table(kind)[pattern] == expected


@KINDS
def test_amax_maps_the_largest_value_to_the_largest(kind):
    patterns = contents("normal", (2, 50, 16), np.random.default_rng(1))
    scale = amax_scale(patterns, kind)
    cast = cast_table(kind, scale)[patterns]
    assert (cast & 0x7F).max() == kind.largest
    largest = np.abs(floats(patterns)).max()
    assert scale * kind.largest_value == pytest.approx(largest, rel=1e-6)
    assert amax_scale(np.array([0x7F80, 0xFFC0, 0x8000], np.uint16), kind) == 1.0
    assert amax_scale(np.array([1], np.uint16), kind) >= np.finfo(np.float32).tiny


@KINDS
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    contents_kind=st.sampled_from(CONTENTS),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(0, 100),
    head_dim=st.integers(1, 40),
    block_tokens=st.integers(1, 40),
    scale=st.sampled_from([1.0, 0.25, 0.037]),
    seed=st.integers(0, 2**32 - 1),
)
def test_pages_hold_the_cast(kind, contents_kind, kv_heads, tokens, head_dim, block_tokens, scale, seed):
    patterns = contents(contents_kind, (kv_heads, tokens, head_dim), np.random.default_rng(seed))
    kv_format = find_format(f"{kind.name}:scale={scale}")
    packed = kv_format.encode(patterns, None, block_tokens)
    cast = cast_table(kind, scale)[patterns]
    assert np.array_equal(decode_bytes(packed), cast)
    assert np.array_equal(kv_format.decode(packed), widen_table(kind, scale)[cast])
    assert np.array_equal(kv_format.stored(patterns), kv_format.decode(packed))
    assert packed.page_bytes.sum() == kv_heads * (tokens - tokens % block_tokens) * head_dim
    assert packed.tail.dtype == np.uint8


def test_what_is_refused():
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39):
        with pytest.raises(ValueError, match="scale must be a normal float32 number above 0, got"):
            cast_table(E4M3, scale)
    with pytest.raises(ValueError, match=r"patterns must be uint8 \[kv_head, token, head_dim\], got uint16"):
        encode_bytes(np.zeros((1, 4, 8), np.uint16), 4)
    packed = encode_bytes(np.zeros((1, 4, 8), np.uint8), 4)
    for kept in range(32):
        with pytest.raises(CorruptDataError, match=f"pages must hold 32 bytes, got {kept}"):
            decode_bytes(replace(packed, pages=packed.pages[:kept]))
