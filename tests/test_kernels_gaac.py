"""The Triton decoder gives the reference's bits, touches nothing else, and the check can tell wrong ones apart."""

import numpy as np
import pytest
import torch

from kvfold.codec import gaac
from kvfold.codec.cases import CONTENTS, contents, every_pattern
from kvfold.codec.verify import find_mismatches
from kvfold.codec.windows import calibrate
from kvfold.kernels.gaac import decode_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xA5
GUARD_BYTES = 256

# kind, kv_heads, pages, block_tokens, head_dim, axis, seed: ragged sizes among them.
CASES = [
    *((kind, 2, 2, 64, 64, axis, 1) for kind in CONTENTS for axis in ("channel", "token")),
    *(("normal", 1, 1, 64, head_dim, "channel", 2) for head_dim in (8, 80, 96, 128, 192, 256)),
    *(("outlier", 1, 1, 64, head_dim, "token", 3) for head_dim in (8, 80, 96, 128, 192, 256)),
    *(("outlier", 3, 1, block_tokens, 64, "channel", 4) for block_tokens in (1, 3, 63, 65)),
    *(("outlier", 1, 2, block_tokens, 40, "token", 5) for block_tokens in (8, 24, 72)),
]


def packed_case(kind, kv_heads, pages, block_tokens, head_dim, axis, seed):
    rng = np.random.default_rng(seed)
    patterns = contents(kind, (kv_heads, pages * block_tokens, head_dim), rng)
    windows = calibrate([contents("normal", (kv_heads, 64, head_dim), np.random.default_rng(seed))])
    return patterns, gaac.encode(patterns, windows, block_tokens, axis)


def run_decoder(decoder, packed):
    """The decoder's output as uint16 patterns, written over poison; asserts that the guard bytes are whole."""
    kv_heads, tokens, head_dim = packed.shape
    size = kv_heads * tokens * head_dim
    buffer = torch.full((2 * size + GUARD_BYTES,), POISON, dtype=torch.uint8, device=DEVICE)
    out = buffer[: 2 * size].view(torch.int16).view(kv_heads, tokens, head_dim)
    tensors = [
        torch.from_numpy(array).to(DEVICE).clone()
        for array in (packed.pages, packed.page_starts, packed.windows.narrow_base, packed.windows.wide_base)
    ]
    decoder(*tensors, out, packed.block_tokens, packed.axis)
    assert bool((buffer[2 * size :] == POISON).all()), "wrote past the end"
    return out.cpu().numpy().view(np.uint16)


def check(decoder, patterns, packed):
    """Raise AssertionError unless the decoder gives exactly these bits."""
    mismatches = find_mismatches(patterns, run_decoder(decoder, packed))
    assert not mismatches, f"{mismatches.count} of {patterns.size} differ: {mismatches.first}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_decoder_gives_the_reference_bits(case):
    patterns, packed = packed_case(*case)
    check(decode_pages, gaac.decode(packed), packed)
    check(decode_pages, patterns, packed)


@pytest.mark.parametrize("mode", ["narrow", "wide", "raw"])
def test_every_pattern_in_every_lane_of_every_mode(mode):
    for patterns, windows in every_pattern(mode, head_dim=128):
        check(decode_pages, patterns, gaac.encode(patterns, windows, 128))


def test_nothing_to_decode_is_not_launched():
    _, packed = packed_case("normal", 2, 0, 64, 64, "channel", 1)
    assert run_decoder(decode_pages, packed).shape == (2, 0, 64)


def does_nothing(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis):
    pass


def skips_the_last_page(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis):
    kept = out[:, :-block_tokens].contiguous()
    decode_pages(pages, page_starts[:-1].clone(), narrow_base, wide_base, kept, block_tokens, axis)
    out[:, :-block_tokens] = kept


def takes_every_window_for_narrow(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis):
    decode_pages(pages, page_starts, narrow_base, narrow_base, out, block_tokens, axis)


def quiets_signalling_nans(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis):
    decode_pages(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis)
    is_nan = ((out & 0x7F80) == 0x7F80) & ((out & 0x7F) != 0)
    out[is_nan] = out[is_nan] | 0x40


def loses_the_sign_of_zero(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis):
    decode_pages(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis)
    out[(out & 0x7FFF) == 0] = 0


def writes_one_too_many(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis):
    decode_pages(pages, page_starts, narrow_base, wide_base, out, block_tokens, axis)
    torch.as_strided(out, (out.numel() + 1,), (1,))[-1] = 0


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (does_nothing, "normal"),
        (skips_the_last_page, "normal"),
        (takes_every_window_for_narrow, "outlier"),
        (quiets_signalling_nans, "special"),
        (loses_the_sign_of_zero, "dead"),
        (writes_one_too_many, "normal"),
    ],
)
def test_wrong_decoders_are_rejected(wrong, kind):
    patterns, packed = packed_case(kind, 2, 2, 64, 64, "channel", 1)
    check(decode_pages, patterns, packed)
    with pytest.raises(AssertionError, match=r"differ|past the end"):
        check(wrong, patterns, packed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": torch.zeros(64, dtype=torch.int8)}, "pages must be torch.uint8, got torch.int8"),
        (
            {"out": torch.zeros(2, 64, 64, dtype=torch.bfloat16)},
            "out must be torch.int16, got torch.bfloat16",
        ),
        (
            {"out": torch.zeros(2, 63, 64, dtype=torch.int16)},
            r"hold 1 pages of block_tokens \(64\) tokens, got 63",
        ),
        (
            {"out": torch.zeros(2, 64, 128, dtype=torch.int16)[:, :, ::2]},
            "out must be contiguous, got strides",
        ),
        ({"out": torch.zeros(2, 4096, dtype=torch.int16)}, r"out must have 3 axes.* got \[2, 4096\]"),
        ({"narrow_base": torch.zeros(3, 64, dtype=torch.uint8)}, r"bases must be \[2, 64\], got \[3, 64\]"),
        ({"axis": "head"}, "axis must be 'channel' or 'token', got 'head'"),
        ({"block_tokens": 0}, r"block_tokens \(0\)"),
        ({"pages": torch.zeros(65, dtype=torch.uint8)[1:]}, "pages must start at a multiple of 16 bytes"),
    ],
)
def test_launcher_refuses(changes, message):
    arguments = {
        "pages": torch.zeros(64, dtype=torch.uint8),
        "page_starts": torch.zeros(2, dtype=torch.int64),
        "narrow_base": torch.zeros(2, 64, dtype=torch.uint8),
        "wide_base": torch.zeros(2, 64, dtype=torch.uint8),
        "out": torch.zeros(2, 64, 64, dtype=torch.int16),
        "block_tokens": 64,
    }
    with pytest.raises(ValueError, match=message):
        decode_pages(**(arguments | changes))


def test_launcher_refuses_runs_that_are_no_groups():
    bases = torch.zeros(1, 12, dtype=torch.uint8)
    out = torch.zeros(1, 64, 12, dtype=torch.int16)
    with pytest.raises(ValueError, match="a multiple of 8 elements is needed along the channel axis, got 12"):
        decode_pages(
            torch.zeros(64, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), bases, bases, out, 64
        )
