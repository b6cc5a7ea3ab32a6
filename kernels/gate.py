"""What must hold before a kernel is timed: equal bits, equal sums, errors no larger than BF16's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvfold.codec import fixed4 as codec
from kvfold.kernels import bf16, fixed4, reference
from kvfold.kernels.fixed4_unpack import unpack
from kvfold.kernels.inputs import make

if TYPE_CHECKING:
    from kvfold.kernels.inputs import Case
    from kvfold.kernels.pages import BlockTable, PagedKv

# A fused result may be this much further from float64 than the raw pages' own: of 32,768 values in a block and
# head at most 16 are added out of order, so only rounding noise of float32 separates the two.
ERROR_SLACK = 1.02
GUARD_ROWS = 8


def find_faults(case: Case, device: str, splits: int = 3) -> list[str]:
    """What is wrong with the `fixed4` kernels on one case: nothing, or one line per broken rule."""
    q, kv, raw = make(case, device)
    scale = case.head_dim**-0.5
    has_skips = case.window is not None
    faults = [*_pack_faults(case, kv, raw)]
    dense = [reference.dense(raw, b) for b in range(len(case.lengths))]
    exact = reference.attend(q, [k.to(device) for k, _ in dense], [v.to(device) for _, v in dense], scale)

    def run(kernel, pages: PagedKv, **options: bool) -> torch.Tensor:
        guarded = torch.full((len(q) + GUARD_ROWS, *q.shape[1:]), float("nan"), device=device)
        kernel(q, pages, scale, splits, guarded[: len(q)], **options)
        if not bool(guarded[len(q) :].isnan().all()):
            faults.append(f"{kernel.__module__} {options}: wrote past the end")
        if bool(guarded[: len(q)].isnan().any()):
            faults.append(f"{kernel.__module__} {options}: NaN, or not written")
        return guarded[: len(q)].clone()

    plain = run(bf16.attend, raw)
    raw_sums = run(fixed4.attend, raw, has_skips=has_skips)
    in_tile = run(fixed4.attend, kv, has_skips=has_skips, in_tile=True)
    fast = run(fixed4.attend, kv, has_skips=has_skips)
    again = run(fixed4.attend, kv, has_skips=has_skips)
    if not torch.equal(raw_sums, in_tile):
        faults.append(f"in-tile sums differ from raw pages': {_worst(raw_sums, in_tile)}")
    if not _has_exceptions(kv) and not torch.equal(raw_sums, fast):
        faults.append(f"sums differ from raw pages' without an exception: {_worst(raw_sums, fast)}")
    if not torch.equal(fast, again):
        faults.append(f"two launches differ: {_worst(fast, again)}")
    bound = ERROR_SLACK * max(_error(raw_sums, exact), _error(plain, exact))
    if not _error(fast, exact) <= bound:
        faults.append(f"error against float64 is {_error(fast, exact):.3e}, raw pages' {bound:.3e}")
    return faults


def _pack_faults(case: Case, kv: PagedKv, raw: PagedKv) -> list[str]:
    """Records against the codec's bytes, and unpacked pages against the values, of the first sequence."""
    count = int(kv.table.packed_counts[0])
    if count == 0:
        return []
    places = kv.table.packed_pages[0, :count].contiguous()
    tokens = count * case.block_tokens
    per_block = case.block_tokens // case.raw_page_tokens
    listed = torch.arange(count * per_block, dtype=torch.int32, device=places.device).view(count, per_block)
    faults = []
    record_bytes = codec.head_record_bytes(case.block_tokens, case.head_dim)
    unskipped = raw.with_table(_without_skips(raw))
    kinds: tuple[codec.Kind, ...] = ("k", "v")
    for kind, records, values in zip(
        kinds, (kv.packed_k, kv.packed_v), reference.dense(unskipped, 0), strict=True
    ):
        patterns = values[:, :tokens].contiguous().view(torch.int16).numpy().view(np.uint16)
        expected = codec.encode(patterns, None, case.block_tokens, kind).pages
        got = records[places.long()][..., :record_bytes].reshape(-1).cpu().numpy()
        if not np.array_equal(expected, got):
            faults.append(
                f"{np.count_nonzero(expected != got)} bytes of packed {kind} differ from the codec's"
            )
        pages = torch.full((count * per_block, *raw.raw_k.shape[1:]), float("nan"), dtype=torch.bfloat16)
        pages = pages.to(places.device)
        unpack(records, places, pages, listed, kind, case.block_tokens)
        back = pages.transpose(0, 1).reshape(values.shape[0], tokens, -1).view(torch.int16).cpu()
        if not torch.equal(back, values[:, :tokens].view(torch.int16)):
            faults.append(f"unpacked {kind} differs from the values")
    return faults


def _without_skips(kv: PagedKv) -> BlockTable:
    return replace(kv.table, raw_skips=torch.zeros_like(kv.table.raw_skips))


def _has_exceptions(kv: PagedKv) -> bool:
    place = kv.block_tokens * kv.head_dim * 3 // 2 + 4 * codec.exception_capacity(kv.head_dim) + kv.head_dim
    used = [kv.table.packed_pages[b, : int(kv.table.packed_counts[b])].long() for b in range(kv.batch)]
    pages = torch.cat(used)
    return any(bool(records[pages][..., place].any()) for records in (kv.packed_k, kv.packed_v))


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


def _worst(first: torch.Tensor, second: torch.Tensor) -> str:
    """How many values differ, and the first five with both values in hex."""
    different = (first != second).nonzero().tolist()
    shown = [
        f"{i}: {float(first[tuple(i)]).hex()} and {float(second[tuple(i)]).hex()}" for i in different[:5]
    ]
    return f"{len(different)} values, " + "; ".join(shown)
