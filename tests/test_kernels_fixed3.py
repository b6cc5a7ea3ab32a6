"""`fixed3` on the GPU, as far as no GPU is needed: the PTX does to the codec's bytes what the kernel counts on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfold.codec import fixed3 as codec
from kvfold.codec.cases import contents
from kvfold.kernels import fixed3
from kvfold.kernels import fixed3_layout as layout
from kvfold.kernels.fixed3_pages import encode_side
from kvfold.kernels.pages import PagedKv, block_table
from tests.ptx import run

PLACES = {name: line * layout.LINE_BYTES for name, line in layout.FIRST_LINES.items()}
TOKENS = np.arange(256)


def real_block(kind: codec.Kind, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Patterns [256, 128] with some exceptions of every sort, their main part and their list."""
    rng = np.random.default_rng(seed)
    patterns = contents("normal", (1, 256, 128), rng)
    places = rng.integers(0, patterns.size, 40)
    patterns.reshape(-1)[places] = rng.integers(0, 1 << 16, 40) & 0x9FFF
    packed = codec.encode(patterns, None, 256, kind)
    assert codec.mode_counts(packed)["raw"] == 0
    return patterns[0], packed.pages[: fixed3.MAIN_BYTES], packed.pages[fixed3.MAIN_BYTES :]


def as_floats(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def said_by_codes(patterns: np.ndarray, main: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What tensor cores see of each element, in true scale, and where that is not its value."""
    start = codec.word_bytes(256, 128)
    base = main[start : start + 128].astype(np.uint32)
    exponent = patterns.astype(np.uint32) >> np.uint32(7) & np.uint32(0xFF)
    outside = exponent - base > np.uint32(7)
    moved = ((patterns.astype(np.uint32) & np.uint32(0xFF)) << np.uint32(18)) + (base << np.uint32(23))
    return np.where(outside, moved.view(np.float32), as_floats(patterns)), outside


def weight_lines() -> np.ndarray:
    """The line of each token's weights: its position, with bit 2 turned by bit 4."""
    j, x, half = TOKENS % 16, TOKENS // 32, TOKENS // 16 % 2
    position = j // 4 * 64 + x * 8 + j // 2 % 2 * 4 + half * 2 + j % 2
    return position ^ (position >> 2 & 4)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_decoding_gives_every_pair_of_codes_with_64_as_lowest_exponent(kind):
    patterns, main, _ = real_block(kind)
    words = main[: codec.word_bytes(256, 128)].view(np.uint32)
    planes, rest = words[: 8 * 1024].reshape(4, 128, 8, 2), words[8 * 1024 : 10 * 1024].reshape(128, 8, 2)
    last = words[10 * 1024 :].reshape(128, 8)
    seen, _ = said_by_codes(patterns, main)
    base = main[codec.word_bytes(256, 128) :][:128].astype(np.float64)
    for m in range(16):
        for row, c in ((0, 0), (5, 3), (127, 7), (64, 4)):
            operands = [*planes[m // 4, row, c], *rest[row, c], last[row, c]]
            named = {f"${i + 1}": [int(word)] for i, word in enumerate(operands)}
            pair = run(layout.DECODE.value[m], named, np.zeros(0, np.uint8))[0]["$0"]
            if kind == "k":
                channels = m // 4 * 32 + c * 4 + m % 4 // 2 * 2 + np.arange(2)
                expected = seen[2 * row + m % 2, channels] * 2.0 ** (64 - base[channels])
            else:
                expected = seen[32 * c + m + np.array([0, 16]), row] * 2.0 ** (64 - base[row])
            assert as_floats(np.array([pair & 0xFFFF, pair >> 16])).tolist() == expected.tolist()


def shared_with(kind: str, main: np.ndarray, listed: np.ndarray) -> np.ndarray:
    shared = np.full(PLACES["all"], 0xA5, np.uint8)
    shared[PLACES[kind] : PLACES[kind] + len(main)] = main
    shared[PLACES[kind] + len(main) : PLACES[kind] + len(main) + len(listed)] = listed
    return shared


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_scores_are_corrected_by_what_exceptions_are_less_what_their_codes_say(at_once):
    patterns, main, listed = real_block("k", seed=1)
    shared = shared_with("k", main, listed)
    query = np.random.default_rng(2).standard_normal((128, 8)).astype(np.float32)
    codes = (query.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    shared[PLACES["query"] : PLACES["query"] + 2048] = codes.view(np.uint8).reshape(-1)
    run(layout._correct_k_asm(at_once), {"$1": list(range(256))}, shared, 256)
    corrected = shared[PLACES["extra"] : PLACES["extra"] + 4096].view(np.float32).reshape(256, 4)
    seen, outside = said_by_codes(patterns, main)
    assert outside.any(axis=1).sum() > 64
    missing = np.where(outside, as_floats(patterns).astype(np.float64) - seen, 0)
    expected = missing @ as_floats(codes).astype(np.float64)[:, :4]
    np.testing.assert_allclose(corrected, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_sums_of_values_are_corrected_and_decayed(at_once):
    patterns, main, listed = real_block("v", seed=3)
    shared = shared_with("v", main, listed)
    weights = np.random.default_rng(4).random((256, 8)).astype(np.float32)
    codes = (weights.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    lines = np.zeros((256, 8), np.uint16)
    lines[weight_lines()] = codes
    shared[PLACES["weights"] : PLACES["weights"] + 4096] = lines.view(np.uint8).reshape(-1)
    decay = np.array([0.5, 1.0, 0.25, 2.0], np.float32)
    shared[PLACES["decay"] : PLACES["decay"] + 16] = decay.view(np.uint8)
    before = np.random.default_rng(5).standard_normal((4, 256)).astype(np.float32)
    operands = {"$4": list(range(256)), **{f"${5 + i}": list(before[i]) for i in range(4)}}
    after = run(layout._correct_v_asm(at_once), operands, shared, 256)
    sums = np.array([[held[f"${i}"] for i in range(4)] for held in after], np.float64)
    seen, outside = said_by_codes(patterns, main)
    missing = np.where(outside, as_floats(patterns).astype(np.float64) - seen, 0)
    expected = missing.T @ as_floats(codes).astype(np.float64)[:, :4]
    expected += (decay * before.T.astype(np.float64)).reshape(128, 2, 4).sum(axis=1)
    found = sums.reshape(128, 2, 4).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_everything_fits_two_programs_on_a_multiprocessor():
    """228 KiB on an H200, 1 KiB of it reserved per program; Triton's own exchanges take up to 2 KiB."""
    assert 2 * (PLACES["all"] + 2048 + 1024) <= 228 * 1024
    assert PLACES["k"] == 0
    assert fixed3.MAIN_BYTES % layout.LINE_BYTES == 0


def small_kv() -> fixed3.Fixed3Kv:
    def mains() -> torch.Tensor:
        return torch.zeros((1, 2, fixed3.MAIN_BYTES), dtype=torch.uint8)

    raw = torch.zeros((4, 2, 64, 128), dtype=torch.bfloat16)
    pages = PagedKv(mains(), mains(), raw, raw, block_table([[0]], [[]], [0], "cpu"), 256)
    lists, entries = torch.zeros(16, dtype=torch.uint8), torch.zeros((1, 2), dtype=torch.int32)
    return fixed3.Fixed3Kv(pages, lists, lists, entries, entries)


@pytest.mark.parametrize(
    ("changes", "group", "message"),
    [
        ({"block_tokens": 128}, 4, "packed pages of 256 tokens, got 128 and 128"),
        (
            {"packed_v": torch.zeros((1, 2, 64), dtype=torch.uint8)},
            4,
            r"packed_v must be uint8 \[page, 2, 45312\]",
        ),
        ({}, 5, "4"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(changes, group, message):
    kv = small_kv()
    kv = replace(kv, pages=replace(kv.pages, **changes))
    with pytest.raises(ValueError, match=message):
        fixed3.attend(torch.zeros((1, 2 * group, 128), dtype=torch.bfloat16), kv, 1.0, 1)


def test_pages_that_no_query_or_sum_can_be_scaled_for_stay_raw():
    patterns = np.full((2, 512, 128), 126 << 7, np.uint16)
    patterns[1, 256:] = (fixed3.LARGEST_K_BASE + 8) << 7
    assert encode_side(patterns, 256, "k").is_raw.tolist() == [False, True]
    assert encode_side(patterns, 256, "v").is_raw.tolist() == [False, True]
    patterns[1, 256:] = (fixed3.LARGEST_K_BASE - 8) << 7
    patterns[0, :256] = 64 << 7
    assert encode_side(patterns, 256, "v").is_raw.tolist() == [True, False]
    assert encode_side(patterns, 256, "k").is_raw.tolist() == [False, False]
