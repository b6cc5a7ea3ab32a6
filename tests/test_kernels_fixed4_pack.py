"""The packer writes the codec's bytes, the unpacker its values, and the check can tell wrong ones apart."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold.codec import fixed4 as codec
from kvfold.codec.cases import contents
from kvfold.kernels.fixed4_pack import MOST_K_BASE, MOST_V_BASE, pack, slot_bytes
from kvfold.kernels.fixed4_unpack import unpack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xA5
GUARD_BYTES = 256
WRONG = runpy.run_path(str(Path(__file__).parent / "wrong" / "pack.py"))

# kind, contents, block_tokens, page_tokens, head_dim, kv_heads
CASES = [
    *((kind, "tame", 256, 64, 128, 1) for kind in "kv"),
    *((kind, "tame", 64, 16, 64, 3) for kind in "kv"),
    *((kind, "tame", 128, 128, 64, 2) for kind in "kv"),
    *((kind, "tame", 64, 32, 256, 1) for kind in "kv"),
    *((kind, content, 64, 16, 64, 2) for kind in "kv" for content in ("constant", "dead", "normal")),
]


def patterns_of(content, shape, seed=0):
    """BF16 patterns ``[kv_head, token, head_dim]``; tame ones have few exceptions and both zeros."""
    rng = np.random.default_rng(seed)
    if content != "tame":
        return contents(content, shape, rng)
    values = rng.standard_normal(shape).astype(np.float32)
    values *= np.exp(rng.standard_normal((shape[0], 1, shape[2]))).astype(np.float32)
    values[np.abs(values) < 1e-3] = 0.5
    patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
    for head in range(shape[0]):
        for pattern in (0x0001, 0x0D80, 0x8000, 0x0000, 0x7FC1, 0xFF80):
            patterns[head, rng.integers(shape[1]), rng.integers(shape[2])] = pattern
    return patterns


def pages_of(patterns, page_tokens):
    """The pages of patterns in a pool in reverse order, and the pages of each block in it."""
    heads, tokens, head_dim = patterns.shape
    pages = patterns.reshape(heads, tokens // page_tokens, page_tokens, head_dim).transpose(1, 0, 2, 3)
    pool = torch.from_numpy(np.ascontiguousarray(pages[::-1]).view(np.int16)).view(torch.bfloat16)
    return pool.to(DEVICE), torch.arange(len(pages) - 1, -1, -1, dtype=torch.int32)


def check_packer(packer, kind, patterns, block_tokens, page_tokens):
    heads, tokens, head_dim = patterns.shape
    blocks = tokens // block_tokens
    pool, order = pages_of(patterns, page_tokens)
    slot = slot_bytes(block_tokens, head_dim)
    size = blocks * heads * slot
    memory = torch.full((size + GUARD_BYTES,), POISON, dtype=torch.uint8, device=DEVICE)
    records = memory[:size].view(blocks, heads, slot)
    places = torch.arange(blocks - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    packer(pool, order.view(blocks, -1).contiguous().to(DEVICE), records, places, kind, block_tokens)
    assert bool((memory[size:] == POISON).all()), "wrote past the end"
    record_bytes = codec.head_record_bytes(block_tokens, head_dim)
    got = records.flip(0).cpu().numpy()
    expected = codec.encode(patterns, None, block_tokens, kind)
    assert len(expected.pages) == blocks * heads * record_bytes, "a page is raw: not a case for this check"
    different = np.count_nonzero(got[..., :record_bytes].reshape(-1) != expected.pages)
    assert different == 0, f"{different} bytes differ"
    assert not got[..., record_bytes:].any(), "padding differs from zero"


def check_unpacker(unpacker, kind, patterns, block_tokens, page_tokens):
    heads, tokens, head_dim = patterns.shape
    blocks = tokens // block_tokens
    pool, order = pages_of(patterns, page_tokens)
    listed = order.view(blocks, -1).contiguous().to(DEVICE)
    records = torch.zeros(
        (blocks, heads, slot_bytes(block_tokens, head_dim)), dtype=torch.uint8, device=DEVICE
    )
    places = torch.arange(blocks, dtype=torch.int32, device=DEVICE)
    pack(pool, listed, records, places, kind, block_tokens)
    out = torch.full(pool.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
    unpacker(records, places, out, listed, kind, block_tokens)
    different = int((out.view(torch.int16) != pool.view(torch.int16)).sum())
    assert different == 0, f"{different} values differ"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bytes_are_the_codecs_and_values_come_back(case):
    kind, content, block_tokens, page_tokens, head_dim, heads = case
    patterns = patterns_of(content, (heads, 2 * block_tokens, head_dim))
    if content == "normal":
        patterns[(patterns & 0x7F80) == 0] = 0  # subnormals of small scales would overflow the lists
    if len(codec.encode(patterns, None, block_tokens, kind).pages) == 0:
        pytest.fail("no page")
    check_packer(pack, kind, patterns, block_tokens, page_tokens)
    check_unpacker(unpack, kind, patterns, block_tokens, page_tokens)


@pytest.mark.parametrize("wrong", WRONG["PACKERS"], ids=lambda wrong: wrong.__name__)
def test_wrong_packers_are_rejected(wrong):
    patterns = patterns_of("tame", (2, 128, 64))
    with pytest.raises(AssertionError, match=r"differ|past the end"):
        check_packer(wrong, "k", patterns, 64, 16)


@pytest.mark.parametrize("wrong", WRONG["UNPACKERS"], ids=lambda wrong: wrong.__name__)
def test_wrong_unpackers_are_rejected(wrong):
    patterns = patterns_of("tame", (2, 128, 64))
    with pytest.raises(AssertionError, match="differ"):
        check_unpacker(wrong, "v", patterns, 64, 16)


def test_exceptions_past_the_list_are_counted():
    patterns = patterns_of("tame", (1, 64, 64))
    patterns[0, :40, 3] = 0x0002
    pool, order = pages_of(patterns, 16)
    records = torch.zeros((1, 1, slot_bytes(64, 64)), dtype=torch.uint8, device=DEVICE)
    places = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    counts = pack(pool, order.view(1, -1).to(DEVICE), records, places, "k", 64)
    assert int(counts) >= 40 > codec.exception_capacity(64)


@pytest.mark.parametrize(("kind", "power"), [("k", 48), ("k", 49), ("v", 15), ("v", 16)])
def test_blocks_that_no_query_or_sum_can_be_scaled_for_stay_raw(kind, power):
    patterns = patterns_of("tame", (1, 64, 64))
    patterns[0, :, 3] = power + 127 << 7
    check_packer(pack, kind, patterns, 64, 16)
    pool, order = pages_of(patterns, 16)
    records = torch.zeros((1, 1, slot_bytes(64, 64)), dtype=torch.uint8, device=DEVICE)
    places = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    count = int(pack(pool, order.view(1, -1).to(DEVICE), records, places, kind, 64))
    assert (count > codec.exception_capacity(64)) == (power in (49, 16))
    # The scale of the last base that is packed times a large query is finite in BF16, whose end is 2 ** 128, and
    # so is the largest step from one base of V to another.
    assert 2.0 ** (MOST_K_BASE.value - 64) * 2.0**31 < 2.0**128
    assert 2.0**MOST_V_BASE.value < 2.0**128


def test_slots_start_on_cache_lines():
    assert slot_bytes(256, 128) == 49_408
    assert all(slot_bytes(b, d) % 128 == 0 for b in (64, 128, 256) for d in (64, 128, 256))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw": torch.zeros(4, 1, 16, 64)}, "raw must be contiguous torch.bfloat16"),
        ({"kind": "q"}, "kind must be 'k' or 'v', got 'q'"),
        ({"block_tokens": 96}, "block_tokens 64, 128 or 256, got 64 and 96"),
        ({"raw_pages": torch.zeros(1, 3, dtype=torch.int32)}, r"raw_pages must be \[1, 4\], got \[1, 3\]"),
        ({"records": torch.zeros(1, 1, 9, dtype=torch.uint8)}, r"records must be \[page, 1, 6400\]"),
        ({"raw": torch.zeros(8, 1, 8, 64, dtype=torch.bfloat16)}, "multiple of 16 tokens that divides"),
    ],
)
def test_pack_refuses(changes, message):
    arguments = {
        "raw": torch.zeros(4, 1, 16, 64, dtype=torch.bfloat16),
        "raw_pages": torch.zeros(1, 4, dtype=torch.int32),
        "records": torch.zeros(1, 1, slot_bytes(64, 64), dtype=torch.uint8),
        "places": torch.zeros(1, dtype=torch.int32),
        "kind": "k",
        "block_tokens": 64,
    }
    with pytest.raises(ValueError, match=message):
        pack(**(arguments | changes))
