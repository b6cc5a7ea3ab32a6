"""`fixed4`: no bit is lost, the words lie where a kernel looks for them, and what no encoder wrote is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import fixed4
from kvfold.codec.cases import CONTENTS, contents
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.reference import decode_fixed4
from kvfold.codec.verify import find_mismatches

KINDS = ("k", "v")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def assert_same_bits(expected: np.ndarray, actual: np.ndarray) -> None:
    mismatches = find_mismatches(expected, actual)
    assert not mismatches, f"{mismatches.count} differ: {mismatches.first}"


def pattern(exponent: int, sign_mantissa: int = 0) -> int:
    return (sign_mantissa & 0x80) << 8 | exponent << 7 | sign_mantissa & 0x7F


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_as_a_code_in_every_lane(kind):
    """Exponents in runs of 15 as channels see them: every finite normal pattern and both zeros, none listed."""
    lanes = 16  # places in a stripe of tokens: unit, j and half of the pair for kind v
    for top in (*range(15, 255, 15), 254):
        exponents = np.arange(max(top - 14, 1), top + 1)
        values = (exponents[:, None] << 7 | np.arange(128)).ravel()
        values = np.concatenate([values, values | 0x8000, [0x0000, 0x8000, top << 7, top << 7]]).astype(
            np.uint16
        )
        values = values[: len(values) - len(values) % 4]
        values = np.concatenate([values, np.full(-len(values) % 16, top << 7, np.uint16)])
        # [channel, token]: the last channel row holds the top so that every channel has it
        rows = np.stack([np.roll(values, shift) for shift in range(lanes)], axis=1)  # [value, lane]
        rows = np.concatenate([rows, np.full((-len(rows) % 255, lanes), top << 7, np.uint16)])
        blocks = rows.reshape(-1, 255, lanes)
        tops = np.full((len(blocks), 1, lanes), top << 7, np.uint16)
        patterns = np.concatenate([blocks, tops], axis=1).reshape(1, -1, lanes)
        packed = fixed4.encode(patterns, None, 256, kind)
        assert fixed4.mode_counts(packed) == {"4-bit": patterns.size, "listed": 0, "raw": 0}
        assert_same_bits(patterns, fixed4.decode(packed))


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_as_an_exception_and_in_raw_pages(kind):
    values = np.arange(1 << 16, dtype=np.uint16)
    # Sixteen patterns a block, each in a channel and token of its own, the rest at 2**0 with exponent 127.
    blocks = np.full((1 << 12, 64, 16), pattern(127), np.uint16)
    number = np.arange(16)
    blocks[:, (number * 7) % 64, number] = values.reshape(-1, 16)
    patterns = blocks.reshape(1, -1, 16)
    packed = fixed4.encode(patterns, None, 64, kind)
    # Below the window: exponents 1..112 and subnormals; 255 has no code; from 142 on 2**0 falls out of it.
    assert fixed4.mode_counts(packed)["listed"] == 2 * (112 * 128 + 127 + 128)
    assert fixed4.mode_counts(packed)["raw"] == (255 - 142) * 2 * 128 // 16 * 64 * 16
    assert_same_bits(patterns, fixed4.decode(packed))
    patterns = values.reshape(1, -1, 16)
    packed = fixed4.encode(patterns, None, 64, kind)
    assert_same_bits(patterns, fixed4.decode(packed))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    contents_kind=st.sampled_from(CONTENTS),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(0, 300),
    head_dim=st.sampled_from((8, *HEAD_DIMS)),
    block_tokens=st.integers(1, 16).map(lambda stripes: 16 * stripes),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_contents_and_shape_come_back(
    contents_kind, kv_heads, tokens, head_dim, block_tokens, kind, seed
):
    patterns = contents(contents_kind, (kv_heads, tokens, head_dim), np.random.default_rng(seed))
    packed = fixed4.encode(patterns, None, block_tokens, kind)
    assert_same_bits(patterns, fixed4.decode(packed))
    assert packed.tail.shape == (kv_heads, tokens % block_tokens, head_dim)

    # Which pages are raw, and how many exceptions the others list, from the rule alone.
    full = patterns[:, : tokens - tokens % block_tokens].astype(int)
    blocks = full.reshape(kv_heads, -1, block_tokens, head_dim)
    exponent = blocks >> 7 & 0xFF
    base = np.maximum(np.where(exponent < 255, exponent, 0).max(axis=2, keepdims=True, initial=0) - 15, 0)
    coded = (blocks & 0x7FFF == 0) | ((exponent > base) & (exponent < 255))
    listed = (~coded).sum(axis=(2, 3))  # [kv_heads, pages]
    fits = (listed <= fixed4.exception_capacity(head_dim)).all(axis=0)
    sizes = np.where(
        fits,
        fixed4.coded_page_bytes(kv_heads, block_tokens, head_dim),
        2 * kv_heads * block_tokens * head_dim,
    )
    assert np.array_equal(packed.page_bytes, sizes)
    assert fixed4.mode_counts(packed)["listed"] == listed[:, fits].sum()
    assert fixed4.count_exceptions(patterns, packed) == listed[:, fits].sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contents_kind", CONTENTS)
def test_the_plain_decoder_reads_the_same_bytes(contents_kind, kind):
    patterns = contents(contents_kind, (2, 70, 24), np.random.default_rng(11))
    patterns[0, 3, 5] = 0x0001
    for block_tokens in (16, 64):
        assert_same_bits(patterns, decode_fixed4(fixed4.encode(patterns, None, block_tokens, kind)))


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("head_dim", [128, 136])
def test_a_list_that_is_full_stays_coded_and_one_more_makes_the_page_raw(head_dim, extra):
    capacity = fixed4.exception_capacity(head_dim)
    assert capacity == (16 if head_dim == 128 else 32)
    patterns = np.full((2, 128, head_dim), pattern(130, 5), np.uint16)
    patterns[1, 3, : capacity + extra] = pattern(2, 0x81)
    packed = fixed4.encode(patterns, None, 64)
    assert (packed.page_bytes == 2 * packed.page_elements).tolist() == [bool(extra), False]
    assert_same_bits(patterns, fixed4.decode(packed))


def test_all_exceptions_and_dead_channels():
    """A block of infinities is all exceptions, so raw; dead channels cost nothing."""
    patterns = np.full((1, 128, 16), 0xFF80, np.uint16)
    patterns[:, 64:] = 0x8000
    packed = fixed4.encode(patterns, None, 64)
    assert fixed4.mode_counts(packed) == {"4-bit": 1024, "listed": 0, "raw": 1024}
    assert_same_bits(patterns, fixed4.decode(packed))


def test_the_bytes_of_a_page_written_out():
    """One head, 16 tokens, 8 channels, everything +1.0 but for a few elements; every byte by hand."""
    patterns = np.full((1, 16, 8), pattern(127), np.uint16)  # base 112, offset 15: code 0x0780
    patterns[0, 0, 0] = pattern(113, 0xFF)  # offset 1, sign and mantissa full: code 0x80FF
    patterns[0, 9, 1] = pattern(127, 0x0F)  # code 0x078F
    patterns[0, 2, 7] = 0x8000  # a zero: code 0x8000
    patterns[0, 10, 6] = 0x7F81  # a NaN: listed
    patterns[0, 1, 2] = pattern(112)  # below: listed
    one = 0x0780
    codes = np.full((16, 8), one)
    codes[0, 0], codes[9, 1], codes[2, 7], codes[10, 6], codes[1, 2] = 0x80FF, 0x078F, 0x8000, 0, 0

    def rotl(word, bits):
        return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF

    def six(p):
        byte = [p[2 * i] & 0x07F807F8 | rotl(p[2 * i + 1] & 0x07F807F8, 24) for i in range(4)]
        nibble = [
            p[4 * i] & 0x80078007
            | rotl(p[4 * i + 1] & 0x80078007, 4)
            | rotl(p[4 * i + 2] & 0x80078007, 8)
            | rotl(p[4 * i + 3] & 0x80078007, 12)
            for i in range(2)
        ]
        return byte[:2], byte[2:], nibble

    k_words = np.empty((2, 3, 4, 2), "<u4")  # [unit, plane, pair of channels, word]
    for unit in range(2):
        for c in range(4):
            pairs = [int(codes[8 * unit + j, 2 * c] | codes[8 * unit + j, 2 * c + 1] << 16) for j in range(8)]
            k_words[unit, :, c] = six(pairs)
    v_words = np.empty((3, 8, 2), "<u4")  # [plane, channel, word]: one pair of units
    for d in range(8):
        v_words[:, d] = six([int(codes[j, d] | codes[8 + j, d] << 16) for j in range(8)])
    entries = np.zeros(16, "<u4")
    entries[:2] = 1 << 24 | 2 << 16 | pattern(112), 10 << 24 | 6 << 16 | 0x7F81
    rest = entries.tobytes() + bytes([112] * 8) + (2).to_bytes(4, "little") + bytes(4)
    assert fixed4.encode(patterns, None, 16, "k").pages.tobytes() == k_words.tobytes() + rest
    assert fixed4.encode(patterns, None, 16, "v").pages.tobytes() == v_words.tobytes() + rest
    assert k_words[0, 0, 0, 0] == 0x0780_00F8 & 0x07F807F8 | rotl(0x0780_0780, 24)


def test_a_code_scaled_by_its_base_is_the_value():
    """What lets a kernel skip the addition: the code read as BF16, times 2**base, is the element."""
    patterns = contents("normal", (1, 256, 64), np.random.default_rng(3))
    exponent = (patterns >> 7 & 0xFF).astype(int)
    base = np.maximum(exponent.max(axis=1, keepdims=True) - 15, 0)
    offset = exponent - base
    coded = (offset > 0) | (patterns & 0x7FFF == 0)
    codes = np.where(offset > 0, patterns & 0x807F | offset << 7, patterns & 0x8000).astype(np.uint32)
    values = (codes << 16).view(np.float32) * np.exp2(base.astype(np.float64))
    expected = (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert np.array_equal(values[coded], expected[coded])


@pytest.mark.parametrize(
    ("shape", "block_tokens", "kind", "message"),
    [
        ((2, 64, 12), 64, "k", "head_dim must be a multiple of 8, got 12"),
        ((2, 64, 264), 64, "k", "head_dim must be at most 256, got 264"),
        ((2, 64, 16), 72, "k", "block_tokens must be a multiple of 16 up to 256, got 72"),
        ((2, 64, 16), 272, "v", "block_tokens must be a multiple of 16 up to 256, got 272"),
        ((2, 64, 16), 0, "k", "block_tokens must be at least 1, got 0"),
        ((2, 64), 64, "k", r"got uint16 \[2, 64\]"),
        ((2, 64, 16), 64, "q", "kind must be 'k' or 'v', got 'q'"),
    ],
)
def test_encode_refuses(shape, block_tokens, kind, message):
    with pytest.raises(ValueError, match=message):
        fixed4.encode(np.zeros(shape, np.uint16), None, block_tokens, kind)


def sample(kind="k"):
    """Two pages of one head, three exceptions in the first; the second is raw."""
    patterns = contents("normal", (1, 32, 16), np.random.default_rng(5))
    patterns[0, 2, 3], patterns[0, 2, 9], patterns[0, 7, 0] = 0x7F81, 0x0001, 0xFF80
    patterns[0, 16:] = contents("uniform", (1, 16, 16), np.random.default_rng(6))[0]
    return fixed4.encode(patterns, None, 16, kind)


WORDS_END, BASES, COUNT = 16 * 16 * 3 // 2, 16 * 16 * 3 // 2 + 64, 16 * 16 * 3 // 2 + 64 + 16


def edit_list(pages, entries, count):
    pages[WORDS_END:BASES] = np.pad(np.array(entries, "<u4"), (0, 16 - len(entries))).view(np.uint8)
    pages[COUNT : COUNT + 4] = np.array([count], "<u4").view(np.uint8)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pages, entries: edit_list(pages, entries[::-1], 3),
        lambda pages, entries: edit_list(pages, [entries[0], entries[0], entries[2]], 3),
        lambda pages, entries: edit_list(pages, entries, 2),
        lambda pages, entries: edit_list(pages, entries, 17),
        lambda pages, entries: edit_list(pages, entries, 0xFFFFFFFF),
        lambda pages, entries: edit_list(pages, [*entries, 0], 4),
        lambda pages, entries: edit_list(pages, [*entries, 16 << 24 | 1], 4),
        lambda pages, entries: edit_list(pages, [*entries, 15 << 24 | 16 << 16 | 1], 4),
        lambda pages, entries: edit_list(pages, [*entries, 15 << 24 | 1], 4),
        lambda pages, entries: pages.__setitem__(BASES, 240),
        lambda pages, entries: pages.__setitem__(COUNT + 4, 1),
    ],
    ids=[
        *("descending", "one twice", "count too low", "count over capacity", "count of all ones"),
        *("an entry at the place before", "token outside", "channel outside", "its code is not zero"),
        *("a base above 239", "padding"),
    ],
)
def test_what_no_encoder_wrote_is_corrupt(damage):
    packed = sample()
    pages = packed.pages.copy()
    entries = pages[WORDS_END:BASES].view("<u4")[:3].tolist()
    damage(pages, entries)
    with pytest.raises(CorruptDataError, match="page 0: bases must be at most 239, exceptions at most 16"):
        fixed4.decode(replace(packed, pages=pages))


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_pages_are_corrupt_at_every_length(kind):
    packed = sample(kind)
    for kept in range(len(packed.pages)):
        with pytest.raises(CorruptDataError):
            fixed4.decode(replace(packed, pages=packed.pages[:kept]))
        starts = np.array([0, packed.page_starts[1], kept])
        if kept >= packed.page_starts[1]:
            with pytest.raises(CorruptDataError):
                fixed4.decode(replace(packed, pages=packed.pages[:kept], page_starts=starts))


def test_random_bytes_decode_or_are_refused():
    packed = sample()
    rng = np.random.default_rng(8)
    for _ in range(300):
        pages = rng.integers(0, 256, len(packed.pages), dtype=np.uint8)
        with pytest.raises(CorruptDataError):
            fixed4.decode(replace(packed, pages=pages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["prose_L00", "prose_L01", "prose_L14", "code_pos6144_L14"])
def test_ratio_and_exceptions_of_real_tensors(shared_data, text, kind):
    patterns = np.load(shared_data / "kv" / f"smollm2_135m_{text}_{kind}.npy")
    packed = fixed4.encode(patterns, None, 256, kind)
    assert_same_bits(patterns, fixed4.decode(packed))
    assert 16 * patterns.size / (8 * len(packed.pages)) >= 1.32
    assert fixed4.mode_counts(packed)["raw"] == 0
    heads = 3 * packed.page_count
    # CODEC: 0.04 to 0.25 exceptions per head and block in K, 1.5 to 3.0 in V.
    assert fixed4.count_exceptions(patterns, packed) / heads < (0.25 if kind == "k" else 3.1)
