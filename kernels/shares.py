"""Work divided evenly among programs, across sequences and heads.

All blocks of a batch stand in one row: sequence by sequence, within it KV head by KV head. Program p of P takes
the p-th of P shares, whose lengths differ by one block at most, so it may end one head and begin the next. A head
that several programs share has one part per program. Part number ``p + b * kv_heads + head`` belongs to program p
and to that head alone: from one pair to the next along the row, one of the two grows by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def block_counts(index, batch, packed_counts_ptr, raw_tokens_ptr, BLOCK_TOKENS: tl.constexpr):
    """Blocks of the sequences ``index``, 0 past the batch; packed counts may be None."""
    counts = (tl.load(raw_tokens_ptr + index, mask=index < batch, other=0) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    if packed_counts_ptr is not None:
        counts += tl.load(packed_counts_ptr + index, mask=index < batch, other=0)
    return counts


@triton.jit
def share_start(program, programs, total):
    """First position of a program's share of ``total`` blocks; with no more programs than blocks none is empty."""
    return (program.to(tl.int64) * total // programs).to(tl.int32)


@triton.jit
def program_of(position, programs, total):
    """The program in whose share a position is; ``total`` is at least 1."""
    return (((position + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)


def most_parts(programs: int, kv_heads: int) -> int:
    """Bound of the parts of one head, which has at most one in ``kv_heads`` of all blocks."""
    return programs // kv_heads + 2


def batch_tile(batch: int) -> int:
    """A power of two that holds the batch; not the least, since kernels are compiled for each."""
    return max(32, triton.next_power_of_2(batch))


def copies_at_once(programs: int, device: torch.device) -> int:
    """How many copies each of so many programs keeps on its way: those of K and V where there is a multiprocessor
    for each program, else one of them.

    Only the number of programs is looked at, also where shared memory has room for one at a time. With four copies
    on their way to each of an H200's multiprocessors, 24 of 132 get a larger part of the memory's bandwidth and
    finish a quarter early, and the launch waits for the others (docs/kernels.md).
    """
    return 2 if programs <= torch.cuda.get_device_properties(device).multi_processor_count else 1


def schedule(batch: int, splits: int, programs: int | None) -> dict[str, int | bool]:
    """The constants that an attention kernel is compiled for: shares where ``programs`` is given, else splits.

    Raises ValueError for less than one of them.
    """
    if splits < 1 or (programs is not None and programs < 1):
        raise ValueError(f"splits and programs must be at least 1, got {splits} and {programs}")
    return {
        "IS_WHOLE": programs is None and splits == 1,
        "EVEN": programs is not None,
        "BATCH_TILE": 1 if programs is None else batch_tile(batch),
    }
