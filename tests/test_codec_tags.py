"""`tag8` and `tag32`: the bytes by hand, every patch in every lane, sizes from the rule, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import tags
from kvfold.codec.cases import CONTENTS, contents
from kvfold.codec.errors import CorruptDataError
from kvfold.codec.verify import find_mismatches
from kvfold.codec.windows import Windows, calibrate

GROUPS = (8, 32)


def windows_at(base: int, shape: tuple[int, int]) -> Windows:
    return Windows(np.full(shape, base, np.uint8), np.full(shape, 100, np.uint8))


def named(q: np.ndarray, group: int) -> np.ndarray:
    """Whether a patch byte can name q (0..31), by the text of the layout."""
    return (q != 0) if group == 8 else (q == 1) | (q >= 32 - 7)


def test_the_bytes_of_a_tag8_page_written_out():
    """One head, one token, 16 channels: a group with a patch and an extra, and one without."""
    exponents = [120, 127, 119, 121, 120, 128, 120, 0] + [123] * 8
    patterns = np.array([[exponents]], np.uint16) << np.uint16(7)
    patterns[0, 0, 3] |= 0x8055
    packed = tags.encode(patterns, windows_at(120, (1, 16)), 1, 8)
    codes = [0, 7, 7, 1, 0, 0, 0, 0] + [3] * 8  # 119 = 120 - 8 + 7, 128 = 120 + 8, 0 = 120 - 15 * 8
    sign_mantissa = [0, 0, 0, 0xD5] + [0] * 12
    assert packed.pages.tobytes() == (
        (32).to_bytes(4, "little")
        + (2).to_bytes(4, "little")
        + bytes(sign_mantissa)
        + sum(code << 3 * lane for lane, code in enumerate(codes)).to_bytes(6, "little")
        + bytes([1])
        + bytes(1)
        + bytes([0 << 3 | 2])  # q = -1 is p = 0, in lane 2
        + bytes([5, 0, 7, 0])
        + bytes([128, 0])
        + bytes(9)
    )
    assert tags.mode_counts(packed, 8) == {"3-bit": 13, "patched": 1, "extra": 2}


def test_the_patch_of_a_tag32_group_is_the_first_that_can_be_named():
    exponents = np.full(64, 120)
    exponents[3], exponents[30], exponents[31] = 0, 135, 63  # q = -15 and -8 have no name, 1 is p = 7
    exponents[40] = 64  # q = -7 is p = 6
    patterns = (exponents.astype(np.uint16) << np.uint16(7)).reshape(1, 1, 64)
    packed = tags.encode(patterns, windows_at(120, (1, 64)), 1, 32)
    lists = packed.pages[tags.main_bytes(1, 1, 64, 32) :].tobytes()
    assert lists == bytes([7 << 5 | 30, 6 << 5 | 8, 3, 0, 31, 0, 0, 63]) + bytes(8)
    assert not find_mismatches(patterns, tags.decode(packed, 32))


@pytest.mark.parametrize("group", GROUPS)
def test_every_pattern_as_the_only_outlier_of_a_group_in_every_lane(group):
    values = np.arange(1 << 16, dtype=np.uint16)
    for base in (0, 120, 248):
        for lane in range(group):
            patterns = np.full((1 << 16, group), base << 7, np.uint16)
            patterns[:, lane] = values
            patterns = patterns.reshape(1, -1, 256)
            packed = tags.encode(patterns, windows_at(base, (1, 256)), 64, group)
            assert not find_mismatches(patterns, tags.decode(packed, group))
            assert group == 32 or tags.mode_counts(packed, group)["extra"] == 0


@pytest.mark.parametrize("group", GROUPS)
@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    kind=st.sampled_from(CONTENTS),
    kv_heads=st.integers(1, 3),
    pages=st.integers(0, 3),
    block_tokens=st.integers(1, 20).map(lambda fours: 4 * fours),
    seed=st.integers(0, 2**32 - 1),
)
def test_pages_take_the_bytes_that_the_rule_gives(group, kind, kv_heads, pages, block_tokens, seed):
    rng = np.random.default_rng(seed)
    patterns = contents(kind, (kv_heads, pages * block_tokens, 24), rng)
    windows = calibrate([contents("normal", (kv_heads, 64, 24), rng)])
    packed = tags.encode(patterns, windows, block_tokens, group)
    base = np.tile(windows.narrow_base.astype(int), (1, block_tokens))[:, None]
    exponent = (patterns >> 7 & 0xFF).astype(int).reshape(kv_heads, pages, block_tokens * 24)
    q = ((exponent - base) % 256 // 8).reshape(kv_heads, pages, block_tokens * 24 // group, group)
    tagged = named(q, group).any(axis=-1)
    patched, outside = tagged.sum(axis=2), (q != 0).sum(axis=(2, 3))  # [kv_heads, pages]
    lists = (patched + 3 * (outside - patched)).sum(axis=0)
    main = tags.main_bytes(kv_heads, block_tokens, 24, group)
    assert main == -(-kv_heads * (8 + block_tokens * 33 + -(-block_tokens * 24 // group // 8)) // 16) * 16
    assert np.array_equal(packed.page_bytes, main + -(-lists // 16) * 16)
    counts = {"3-bit": patterns.size - outside.sum(), "patched": patched.sum()}
    assert tags.mode_counts(packed, group) == counts | {"extra": (outside - patched).sum()}
    assert not find_mismatches(patterns, tags.decode(packed, group))


@pytest.mark.parametrize("group", GROUPS)
def test_tags_and_tables_that_ask_for_other_lists_are_corrupt(group):
    patterns = contents("normal", (2, 32, 64), np.random.default_rng(2))
    packed = tags.encode(patterns, calibrate([patterns]), 16, group)
    first_tag = 2 * (8 + 1024 + 1024 * 3 // 8)
    for place, value in ((first_tag, 0xFF), (0, 1), (4, 255), (7, 255), (8, 3)):
        pages = packed.pages.copy()
        pages[place] = value
        with pytest.raises(CorruptDataError, match="page 0: the patches that the tags ask for"):
            tags.decode(replace(packed, pages=pages), group)


def test_extras_out_of_order_or_outside_are_corrupt():
    patterns = np.full((1, 1, 64), 120 << 7, np.uint16)
    patterns[0, 0, [3, 9]] = 0
    packed = tags.encode(patterns, windows_at(120, (1, 64)), 1, 32)
    main = tags.main_bytes(1, 1, 64, 32)
    assert packed.pages[main : main + 6].tolist() == [3, 0, 9, 0, 0, 0]
    for positions in ([9, 0, 3, 0], [3, 0, 3, 0], [3, 0, 64, 0], [3, 0, 0, 255]):
        pages = packed.pages.copy()
        pages[main : main + 4] = positions
        with pytest.raises(CorruptDataError, match="positions ascending"):
            tags.decode(replace(packed, pages=pages), 32)


@pytest.mark.parametrize(
    ("shape", "block_tokens", "message"),
    [
        ((1, 64, 12), 64, "head_dim must be a multiple of 8, got 12"),
        ((1, 64, 8), 1, "block_tokens x head_dim must be a multiple of 32 up to 65536, got 8"),
        ((1, 64, 256), 512, "must be a multiple of 32 up to 65536, got 131072"),
    ],
)
def test_encode_refuses(shape, block_tokens, message):
    with pytest.raises(ValueError, match=message):
        tags.encode(np.zeros(shape, np.uint16), windows_at(0, (1, shape[2])), block_tokens, 32)


@pytest.mark.parametrize(("group", "ratio"), [(8, 1.424), (32, 1.434)])
def test_ratio_of_real_tensors_calibrated_on_another_text(shared_data, group, ratio):
    """CODEC's figures are means over 30 layers and four texts; this pair may lie up to 1.5 % lower."""
    from kvfold.codec.windows import rotate_keys

    bits = []
    for kind in "kv":
        prose = np.load(shared_data / "kv" / f"smollm2_135m_prose_L14_{kind}.npy")
        code = np.load(shared_data / "kv" / f"smollm2_135m_code_pos6144_L14_{kind}.npy")
        copies = [prose]
        if kind == "k":
            copies += [rotate_keys(prose, tokens, 1e5) for tokens in (2048, 4096, 6144)]
        packed = tags.encode(code, calibrate(copies), 64, group)
        assert not find_mismatches(code, tags.decode(packed, group))
        bits.append(8 * len(packed.pages) / code.size)
    assert 16 / np.mean(bits) >= ratio * 0.985
