"""`fixed3` packed on the device has the codec's bytes, unpacked the values; wrong packers do not pass."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold.codec import fixed3 as codec
from kvfold.codec.cases import contents
from kvfold.kernels import inputs
from kvfold.kernels.fixed3_pack import BASES, Slots, empty_slots, pack
from kvfold.kernels.fixed3_pages import differing_bytes
from kvfold.kernels.fixed3_unpack import unpack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xA5
LIST_BYTES = 1024
WRONG = runpy.run_path(str(Path(__file__).parent / "wrong" / "fixed3_pack.py"))
# Both zeros, subnormals, the smallest normal number, infinities, quiet and signalling NaN, a small value.
SPECIAL = (0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0x1234)


def real_like(kind, shape, seed=0):
    """Patterns ``[kv_head, token, head_dim]`` as in real tensors, with every special one at random places."""
    generator = torch.Generator().manual_seed(seed)
    fill = inputs.keys if kind == "k" else inputs.values
    patterns = fill(shape, generator).view(torch.int16).numpy().view(np.uint16).copy()
    rng = np.random.default_rng(seed)
    for special in SPECIAL:
        patterns.reshape(-1)[rng.integers(0, patterns.size, 2)] = special
    return patterns


class Packed:
    """Patterns in raw pages in reverse order, and slots full of poison, which the blocks fill from the last on."""

    def __init__(self, patterns, block_tokens, page_tokens, list_bytes=LIST_BYTES):
        heads, tokens, head_dim = patterns.shape
        pages = patterns.reshape(heads, tokens // page_tokens, page_tokens, head_dim).transpose(1, 0, 2, 3)
        pool = torch.from_numpy(pages[::-1].copy().view(np.int16)).view(torch.bfloat16)
        self.pool = pool.to(DEVICE)
        blocks = tokens // block_tokens
        order = torch.arange(len(pages) - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        self.listed = order.view(blocks, -1).contiguous()
        self.places = torch.arange(blocks, 0, -1, dtype=torch.int32, device=DEVICE) - 1
        self.memory = empty_slots(blocks + 1, heads, block_tokens, head_dim, list_bytes, self.pool.device)
        self.memory.mains.fill_(POISON)
        self.memory.lists.fill_(POISON)
        self.slots = Slots(self.memory.mains[:-1], self.memory.lists[:-1], self.memory.entries[:-1])
        self.block_tokens = block_tokens

    def pack(self, kind, packer=pack):
        return packer(self.pool, self.listed, self.slots, self.places, kind, self.block_tokens)


def check_packer(packer, kind, patterns, block_tokens, page_tokens):
    packed = Packed(patterns, block_tokens, page_tokens)
    counts = packed.pack(kind, packer)
    expected = codec.encode(patterns, None, block_tokens, kind)
    assert codec.mode_counts(expected)["raw"] == 0, "a page is raw: not a case for this check"
    different = differing_bytes(packed.slots, packed.places, expected)
    assert different == 0, f"{different} bytes differ"
    assert int(counts.sum()) == codec.mode_counts(expected)["listed"]
    assert bool((packed.memory.mains[-1] == POISON).all()), "wrote past the end"
    units = (packed.slots.entries & 0xFF)[..., None]
    behind = torch.arange(LIST_BYTES, device=DEVICE) >= 16 * units
    assert bool((packed.slots.lists[behind] == POISON).all()), "wrote past the end of a list"


def check_unpacker(unpacker, kind, patterns, block_tokens, page_tokens):
    packed = Packed(patterns, block_tokens, page_tokens)
    packed.pack(kind)
    out = torch.full(packed.pool.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
    unpacker(packed.slots, packed.places, out, packed.listed, kind, block_tokens)
    different = int((out.view(torch.int16) != packed.pool.view(torch.int16)).sum())
    assert different == 0, f"{different} values differ"


# block_tokens, page_tokens, head_dim, kv_heads
SHAPES = [(256, 64, 128, 1), (64, 16, 64, 2), (128, 128, 64, 1), (64, 32, 128, 1)]


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_the_codecs_and_values_come_back(kind, shape):
    block_tokens, page_tokens, head_dim, heads = shape
    patterns = real_like(kind, (heads, heads * block_tokens, head_dim))
    check_packer(pack, kind, patterns, block_tokens, page_tokens)
    check_unpacker(unpack, kind, patterns, block_tokens, page_tokens)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_exceptions_in_every_place_of_a_list(kind):
    """One at each 61st element, in all rows and at all positions, first and last included."""
    patterns = real_like(kind, (1, 64, 64))
    flat = patterns.reshape(-1)
    flat[::61] = np.arange(len(flat[::61])) * 7 & 0x0FFF
    flat[-1] = 0x7FC0
    check_packer(pack, kind, patterns, 64, 16)
    check_unpacker(unpack, kind, patterns, 64, 16)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_the_lower_window_where_it_takes_more(kind):
    """Channels with one large exponent and many seven below the next: a tie keeps the upper window."""
    patterns = np.full((1, 64, 64), 120 << 7, np.uint16)
    patterns[0, 0] = 127 << 7
    patterns[0, 1:3] = 119 << 7
    patterns[0, 1, ::2] = 126 << 7
    check_packer(pack, kind, patterns, 64, 16)


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize("content", ["uniform", "special", "outlier"])
def test_what_the_codec_leaves_raw_is_reported(kind, content):
    patterns = contents(content, (2, 64, 64), np.random.default_rng(0))
    patterns[1] = real_like(kind, (1, 64, 64))[0]
    expected = codec.encode(patterns, None, 64, kind)
    assert codec.mode_counts(expected)["raw"] == patterns.size
    packed = Packed(patterns, 64, 16)
    counts = packed.pack(kind)[0].tolist()
    assert counts[0] > LIST_BYTES // 2 >= counts[1]
    assert bool((packed.memory.lists[0, 0] == POISON).all())
    assert bool((packed.memory.mains[-1] == POISON).all())


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize(("more", "stays_raw"), [(0, False), (1, True)])
def test_more_than_255_exceptions_among_32_rows_stay_raw(kind, more, stays_raw):
    """However long the list may be; in all there are more."""
    patterns = np.full((1, 256, 64), 127 << 7, np.uint16)
    patterns[0, :100, 5:7] = 0
    patterns[0, : 55 + more, 30] = 0
    patterns[0, 128:, 40] = 0
    packed = Packed(patterns, 256, 64, list_bytes=2032)
    counts = packed.pack(kind)
    expected = codec.encode(patterns, None, 256, kind)
    assert (codec.mode_counts(expected)["raw"] > 0) == stays_raw
    assert (int(counts) > 1016) == stays_raw
    if not stays_raw:
        assert differing_bytes(packed.slots, packed.places, expected) == 0


def test_the_lowest_window_starts_at_one():
    """Channels of tiny values and zeros: no window takes zeros, nor starts below the smallest normal number."""
    patterns = real_like("k", (1, 64, 64))
    for channel, top in ((4, 3), (5, 7), (9, 8), (10, 9)):
        patterns[0, :, channel] = np.arange(64) % top + 1 << 7
        patterns[0, ::3, channel] = 0
    check_packer(pack, "k", patterns, 64, 16)
    check_unpacker(unpack, "k", patterns, 64, 16)


def test_lists_longer_than_their_slot_are_counted_and_not_written():
    patterns = real_like("k", (1, 64, 64))
    packed = Packed(patterns, 64, 16, list_bytes=64)
    count = int(packed.pack("k"))
    assert count == codec.mode_counts(codec.encode(patterns, None, 64, "k"))["listed"]
    assert count > 32
    assert bool((packed.memory.lists == POISON).all())


@pytest.mark.parametrize(
    ("kind", "base"), [("k", 191), ("k", 192), ("v", 64), ("v", 65), ("v", 191), ("v", 192)]
)
def test_blocks_that_no_query_or_sum_can_be_scaled_for_stay_raw(kind, base):
    patterns = np.full((1, 64, 64), 127 << 7, np.uint16)
    patterns[0, :, 3] = base + 7 << 7
    packed = Packed(patterns, 64, 16)
    lowest, highest = BASES[kind]
    assert (int(packed.pack(kind)) > LIST_BYTES // 2) == (not lowest <= base <= highest)
    # A query's scale, 2 ** (base - 64), and what a sum of V is rescaled by are finite in BF16 and in float32.
    assert BASES["k"][1] - 64 <= 127
    assert BASES["v"][1] - BASES["v"][0] <= 127


@pytest.mark.parametrize("wrong", WRONG["PACKERS"], ids=lambda wrong: wrong.__name__)
def test_wrong_packers_are_rejected(wrong):
    patterns = real_like("k", (2, 64, 64))
    with pytest.raises(AssertionError, match=r"differ|past the end"):
        check_packer(wrong, "k", patterns, 64, 16)


@pytest.mark.parametrize("wrong", WRONG["UNPACKERS"], ids=lambda wrong: wrong.__name__)
def test_wrong_unpackers_are_rejected(wrong):
    with pytest.raises(AssertionError, match="differ"):
        check_unpacker(wrong, "v", real_like("v", (1, 64, 64)), 64, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mains": torch.zeros(1, 1, 9, dtype=torch.uint8)},
            r"mains must be \[1, 1, 5760\], got \[1, 1, 9\]",
        ),
        ({"lists": torch.zeros(1, 2, 64, dtype=torch.uint8)}, r"lists must be \[1, 1, 64\]"),
        ({"lists": torch.zeros(1, 1, 72, dtype=torch.uint8)}, "multiple of 16 bytes up to 4,080, got 72"),
        ({"entries": torch.zeros(1, 1)}, "entries must be contiguous torch.int32"),
    ],
)
def test_slots_that_do_not_fit_are_refused(changes, message):
    slots = empty_slots(1, 1, 64, 64, 64, torch.device("cpu"))
    raw = torch.zeros(4, 1, 16, 64, dtype=torch.bfloat16)
    listed, places = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        pack(raw, listed, replace(slots, **changes), places, "k", 64)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128"):
        pack(raw.view(4, 1, 32, 32).repeat(1, 1, 1, 1), listed, slots, places, "k", 64)
