"""Even shares of a batch's blocks: each block in one, lengths differ by one, parts have one writer each."""

import random
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from kvfold.kernels import bf16
from kvfold.kernels.inputs import Case, make
from kvfold.kernels.shares import block_counts, most_parts, program_of, share_start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _shares_kernel(starts_ptr, owners_ptr, programs, total, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(starts_ptr + index, share_start(index, programs, total), mask=index <= programs)
    tl.store(owners_ptr + index, program_of(index, programs, total), mask=index < total)


@triton.jit
def _counts_kernel(counts_ptr, packed_ptr, tokens_ptr, batch, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(counts_ptr + index, block_counts(index, batch, packed_ptr, tokens_ptr, 256))


def shares(programs, total):
    starts, owners = (torch.full((1024,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    _shares_kernel[(1,)](starts, owners, programs, total, SIZE=1024)
    return starts.tolist()[: programs + 1], owners.tolist()[:total]


@pytest.mark.parametrize("seed", range(8))
def test_every_block_has_one_owner_and_every_part_one_writer(seed):
    rng = random.Random(seed)
    kv_heads, counts = rng.choice((1, 3, 8)), [rng.choice((0, 1, 2, 5, 30)) for _ in range(rng.randint(1, 4))]
    counts.append(1)
    total = kv_heads * sum(counts)
    programs = min(total, rng.choice((1, 7, 132, 264)))
    starts, owners = shares(programs, total)
    assert starts[0] == 0
    assert starts[-1] == total
    lengths = [end - start for start, end in pairwise(starts)]
    assert max(lengths) - min(lengths) <= 1
    assert owners == [program for program, length in enumerate(lengths) for _ in range(length)]
    heads = [
        b * kv_heads + head
        for b, count in enumerate(counts)
        for head in range(kv_heads)
        for _ in range(count)
    ]
    writers = set(zip(owners, heads, strict=True))
    assert len({owner + head for owner, head in writers}) == len(writers)
    for head in set(heads):
        of_head = sorted({owner for owner, other in writers if other == head})
        assert of_head == list(range(of_head[0], of_head[-1] + 1))
        assert len(of_head) <= most_parts(programs, kv_heads)


def test_positions_past_what_31_bits_multiply():
    starts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    owners = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    total, programs = 2**30, 528
    _past_kernel[(1,)](starts, owners, programs, total)
    assert starts.tolist() == [527 * total // 528, total]
    assert owners.tolist() == [527, 526]


@triton.jit
def _past_kernel(starts_ptr, owners_ptr, programs, total):
    index = tl.arange(0, 2)
    start = share_start(programs - 1 + index, programs, total)
    tl.store(starts_ptr + index, start)
    first = tl.min(start, 0)
    tl.store(owners_ptr + index, program_of(first - index, programs, total))


def test_blocks_are_packed_pages_and_what_is_left_of_raw_tokens():
    packed = torch.tensor([3, 0, 2], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([0, 257, 256], dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    _counts_kernel[(1,)](counts, packed, tokens, 3, SIZE=4)
    assert counts.tolist() == [3, 2, 3, 0]


@pytest.mark.parametrize(("programs", "splits"), [(2, 1), (8, 2)])
def test_shares_that_are_splits_give_their_bits(programs, splits):
    """Four heads of two tiles each: two programs take two whole heads each, eight half a head each."""
    q, _, raw = make(Case((128, 65), 2, 2, 64, 64, 16, seed=9), DEVICE)
    expected = bf16.attend(q, raw, 0.125, splits, tile_tokens=64)
    assert torch.equal(bf16.attend(q, raw, 0.125, 1, tile_tokens=64, programs=programs), expected)


@pytest.mark.parametrize(("splits", "programs"), [(0, None), (1, 0)])
def test_less_than_one_is_refused(splits, programs):
    q, _, raw = make(Case((65,), 1, 2, 64, 64, 16), DEVICE)
    with pytest.raises(ValueError, match=f"must be at least 1, got {splits} and {programs}"):
        bf16.attend(q, raw, 0.125, splits, programs=programs)
