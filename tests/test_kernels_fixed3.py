"""`fixed3` on the GPU, as far as no GPU is needed: the PTX does to the codec's bytes what the kernel counts on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvfold.codec import fixed3 as codec
from kvfold.codec.cases import contents
from kvfold.kernels import fixed3
from kvfold.kernels import fixed3_layout as layout
from kvfold.kernels.pages import PagedKv, block_table
from tests.ptx import run

EVERY_QUAD = [(quads, quad) for quads in layout.QUADS for quad in range(quads)]
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


def shared_with(places: dict[str, int], kind: str, main: np.ndarray, listed: np.ndarray) -> np.ndarray:
    shared = np.full(places["all"], 0xA5, np.uint8)
    data = np.concatenate([main, listed])
    shared[places[kind] : places[kind] + len(data)] = data
    return shared


def put(shared: np.ndarray, place: int, values: np.ndarray) -> None:
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    shared[place : place + len(data)] = data


def in_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def walks() -> list[tuple[int, int, int]]:
    """Quads, the number of one of them, and how many entries are taken at once."""
    return [(1, 0, 1), (1, 0, 3), *((quads, quad, layout.AT_ONCE) for quads, quad in EVERY_QUAD)]


@pytest.mark.parametrize(("quads", "quad", "at_once"), walks())
def test_scores_are_corrected_by_what_exceptions_are_less_what_their_codes_say(quads, quad, at_once):
    patterns, main, listed = real_block("k", seed=1)
    places, heads = layout.PLACES[quads], layout.columns(quads)
    shared = shared_with(places, "k", main, listed)
    codes = in_bf16(np.random.default_rng(2).standard_normal((128, heads)))
    put(shared, places["query"], codes)
    run(layout.correct_k_asm(quads, quad, at_once), {"$1": list(range(256))}, shared, 256)
    extra = shared[places["extra"] : places["extra"] + quads * 4096].view(np.float32)
    corrected = extra.reshape(quads, 256, 4)[quad]
    seen, outside = said_by_codes(patterns, main)
    assert outside.any(axis=1).sum() > 64
    missing = np.where(outside, as_floats(patterns).astype(np.float64) - seen, 0)
    expected = missing @ as_floats(codes).astype(np.float64)[:, 4 * quad : 4 * quad + 4]
    np.testing.assert_allclose(corrected, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    for number in range(2):
        # Two neighbouring heads of token 6 + number get what is theirs; a head that has none gets nothing.
        where = [quad * 4096 + 3 * 32 + 8, 0xFFFFFFFF]
        operands = {"$2": [np.float32(1)] * 2, "$3": [np.float32(2)] * 2, "$4": where}
        added, kept = run(layout.ADD_EXTRA.value[quads][number].value, operands, shared, 2)
        assert [added["$0"], added["$1"]] == [1 + corrected[6 + number, 2], 2 + corrected[6 + number, 3]]
        assert [kept["$0"], kept["$1"]] == [1, 2]


@pytest.mark.parametrize(("quads", "quad", "at_once"), walks())
def test_sums_of_values_are_corrected_and_decayed(quads, quad, at_once):
    patterns, main, listed = real_block("v", seed=3)
    places, heads = layout.PLACES[quads], layout.columns(quads)
    shared = shared_with(places, "v", main, listed)
    codes = in_bf16(np.random.default_rng(4).random((256, heads)))
    lines = np.zeros((256, heads), np.uint16)
    lines[weight_lines()] = codes
    put(shared, places["weights"], lines)
    decay = 2.0 ** np.random.default_rng(6).integers(-2, 2, heads).astype(np.float32)
    put(shared, places["decay"], decay)
    before = np.random.default_rng(5).standard_normal((4, 256)).astype(np.float32)
    operands = {"$4": list(range(256)), **{f"${5 + i}": list(before[i]) for i in range(4)}}
    after = run(layout.correct_v_asm(quads, quad, at_once), operands, shared, 256)
    sums = np.array([[held[f"${i}"] for i in range(4)] for held in after], np.float64)
    seen, outside = said_by_codes(patterns, main)
    missing = np.where(outside, as_floats(patterns).astype(np.float64) - seen, 0)
    of_quad = slice(4 * quad, 4 * quad + 4)
    expected = missing.T @ as_floats(codes).astype(np.float64)[:, of_quad]
    expected += (decay[of_quad] * before.T.astype(np.float64)).reshape(128, 2, 4).sum(axis=1)
    found = sums.reshape(128, 2, 4).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_two_programs_fit_a_multiprocessor_or_one_of_16_columns():
    """228 KiB on an H200, 1 KiB of it reserved per program; Triton's own exchanges take up to 2 KiB."""
    for quads, programs in ((1, 2), (2, 2), (4, 1)):
        assert programs * (layout.PLACES[quads]["all"] + 2048 + 1024) <= 228 * 1024
        assert layout.PLACES[quads]["k"] == 0
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
        ({}, 17, "at most 16 query heads per KV head, got 17"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(changes, group, message):
    kv = small_kv()
    kv = replace(kv, pages=replace(kv.pages, **changes))
    with pytest.raises(ValueError, match=message):
        fixed3.attend(torch.zeros((1, 2 * group, 128), dtype=torch.bfloat16), kv, 1.0, 1)
