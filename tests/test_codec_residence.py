"""Pages in a pool of chunks: whatever fits or does not, no value is lost and no chunk is counted twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec.cases import contents
from kvfold.codec.formats import FORMATS
from kvfold.codec.ratio import calibrate_format, measure, total
from kvfold.codec.residence import (
    CHUNK_BYTES,
    ChunkPool,
    PoolFullError,
    load_pages,
    pooled_bytes,
    release_pages,
    slotted_bytes,
    store_pages,
)
from kvfold.codec.verify import find_mismatches
from kvfold.codec.windows import calibrate

# `fixed3` has words of 32 tokens, so that blocks of 16 are smaller raw; test_codec_fixed3.py stores its pages.
LISTED = [name for name, kv_format in FORMATS.items() if kv_format.main_bytes and name != "fixed3"]


def array_of(name: str, kind: str, tokens: int, seed: int):
    """Patterns [2, tokens, 16], their pages in blocks of 16 tokens, and the bytes of a main plane."""
    patterns = contents(kind, (2, tokens, 16), np.random.default_rng(seed))
    windows = calibrate([patterns if tokens else np.zeros((2, 1, 16), np.uint16)])
    kv_format = FORMATS[name]
    assert kv_format.main_bytes is not None
    main = kv_format.main_bytes(2, 16, 16)
    return patterns, FORMATS[name].encode(patterns, windows, 16), main


@pytest.mark.parametrize("name", LISTED)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    chunks=st.integers(0, 60),
    arrays=st.lists(
        st.tuples(
            st.sampled_from(["normal", "outlier", "uniform", "dead"]), st.integers(0, 100), st.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_value_is_lost_whatever_the_pool_holds(name, chunks, arrays, seed):
    """The law: arrays come and go, the pool is often full, and all that are there read back bit for bit."""
    pool = ChunkPool(chunks)
    there = []
    for number, (kind, tokens, first_leaves) in enumerate(arrays):
        if first_leaves and there:
            release_pages(there.pop(0)[1], pool)
        patterns, packed, main = array_of(name, kind, tokens, seed + number)
        resident = store_pages(patterns, packed, main, pool)
        there.append((patterns, resident))
        assert sorted([*resident.raw, *resident.mains]) == list(range(packed.page_count))
        taken = sum(-(-size // CHUNK_BYTES) for _, kept in there for _, size in kept.lists.values())
        assert pool.taken.sum() == taken <= chunks
        for expected, kept in there:
            assert not find_mismatches(expected, load_pages(kept, pool, FORMATS[name].decode))
    for _, kept in there:
        release_pages(kept, pool)
    assert not pool.taken.any()


def test_exactly_full_and_one_over():
    pool = ChunkPool(3)
    first = pool.store(np.arange(64, dtype=np.uint8))
    second = pool.store(np.arange(128, dtype=np.uint8))
    assert (first, second) == (0, 1)
    assert pool.store(np.zeros(1, np.uint8)) is None
    pool.release(0, 64)
    assert pool.store(np.zeros(65, np.uint8)) is None
    assert pool.store(np.ones(64, np.uint8)) == 0
    assert np.array_equal(pool.load(1, 128), np.arange(128))


def test_a_gap_that_is_too_small_is_not_used():
    pool = ChunkPool(4)
    for _ in range(4):
        pool.store(np.zeros(64, np.uint8))
    for chunk in (0, 2, 3):
        pool.release(chunk, 64)
    assert pool.store(np.ones(100, np.uint8)) == 2
    assert pool.store(np.empty(0, np.uint8)) == 0
    assert pool.taken.tolist() == [False, True, True, True]


@pytest.mark.parametrize("name", LISTED)
def test_a_full_pool_is_told_to_a_caller_who_asks(name):
    patterns, packed, main = array_of(name, "normal", 160, 3)
    need = int((-(-(packed.page_bytes - main) // CHUNK_BYTES)).sum())
    pool = ChunkPool(need - 1)
    with pytest.raises(PoolFullError, match=r"page \d: its lists need \d+ chunks side by side"):
        store_pages(patterns, packed, main, pool, raw_when_full=False)
    assert not pool.taken.any()
    assert len(store_pages(patterns, packed, main, pool).raw) == 1
    assert not store_pages(patterns, packed, main, ChunkPool(need), raw_when_full=False).raw


def test_a_pool_has_no_negative_size():
    with pytest.raises(ValueError, match="chunks must be at least 0, got -1"):
        ChunkPool(-1)


@pytest.mark.parametrize("name", LISTED)
def test_measured_sizes_are_those_of_stored_pages(name):
    """What `measure` reports as pooled is what a pool with room for all takes, and slots beside it."""
    patterns, packed, main = array_of(name, "normal", 330, 5)
    patterns[:, 32:48] = contents("uniform", (2, 16, 16), np.random.default_rng(1))
    packed = FORMATS[name].encode(patterns, packed.windows, 16)
    pool = ChunkPool(1000)
    resident = store_pages(patterns, packed, main, pool)
    assert list(resident.raw) == [2]
    in_memory = CHUNK_BYTES * int(pool.taken.sum())
    in_memory += sum(part.nbytes for part in (*resident.mains.values(), *resident.raw.values()))
    assert in_memory == pooled_bytes(packed, main).sum()
    slot = int(np.sort(packed.page_bytes)[-2])
    measured = measure(patterns, packed, packed.windows, FORMATS[name], slot)
    assert measured.pooled_saving == 1 - (in_memory + 8 * 20) / (2 * 2 * 320 * 16)
    assert measured.resident_bytes == 19 * slot + 1024 + 8 * 20 == slotted_bytes(packed, slot).sum() + 8 * 20
    both = total([measured, measured])
    assert both.pooled_saving == measured.pooled_saving


def test_formats_without_lists_have_no_pooled_size():
    patterns = contents("normal", (2, 64, 16), np.random.default_rng(1))
    windows, slot = calibrate_format([patterns], FORMATS["gaac"], 16)
    packed = FORMATS["gaac"].encode(patterns, windows, 16)
    measured = measure(patterns, packed, windows, FORMATS["gaac"], slot)
    assert measured.pooled_saving is None
    assert total([measured, measured]).pooled_saving is None
