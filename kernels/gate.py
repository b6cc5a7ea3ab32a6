"""What must hold before a kernel is timed: equal bits, equal sums, errors no larger than BF16's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvfold.codec import fixed3 as fixed3_codec
from kvfold.codec import fixed4 as fixed4_codec
from kvfold.codec.fp8 import E4M3, E5M2
from kvfold.kernels import bf16, fixed3_portable, fixed4_portable, fp8, gaac_attend, reference
from kvfold.kernels.fixed3_pack import Slots
from kvfold.kernels.fixed3_pages import differing_bytes, pack_fixed3
from kvfold.kernels.fused import FIXED3, FIXED4, FUSED
from kvfold.kernels.gaac import decode_pages
from kvfold.kernels.inputs import (
    POISON,
    cast_drawn,
    draw,
    encode_fixed4,
    gaac_slots,
    pack_fixed4,
    pack_gaac,
    patterns_of,
    raw_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvfold.codec.fp8 import Fp8
    from kvfold.codec.packed import Packed
    from kvfold.kernels.fused import Fused
    from kvfold.kernels.inputs import Case, Drawn
    from kvfold.kernels.pages import BlockTable, PagedKv

# A fused result may be this much further from float64 than the raw pages' own: of 32,768 values in a block and
# head at most 16 are added out of order, so only rounding noise of float32 separates the two.
ERROR_SLACK = 1.02
# BF16 weights (2^-9 each) and float32 sums: the relative error of a weighted mean of independent values.
BF16_TOLERANCE = 2.0**-8
# FP16 weights have three more bits; one of them is left for sums.
FP8_TOLERANCE = 2.0**-10
GUARD_ROWS = 8
# Packed by the codec: the packer, another kernel per shape, is checked on its own.
FIXED4_CODED = replace(FIXED4, name="fixed4-coded", pack_drawn=partial(pack_fixed4, packer=encode_fixed4))


@dataclass(slots=True)
class Gate:
    """One case, what attention over it is, what was checked, and the rules that were broken."""

    drawn: Drawn
    splits: int
    programs: int | None  # where given, kernels that can divide the work evenly do (`kvfold.kernels.shares`)
    has_skips: bool  # fused kernels are compiled for windows, which the case need not have
    copies: int | None  # that fused kernels keep on their way; None: what suits the number of programs
    exact: torch.Tensor  # float64 [batch, q_heads, head_dim]
    checked: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def run(
        self, attend: Callable[..., torch.Tensor], kv: PagedKv, label: str, **options: Any
    ) -> torch.Tensor:
        """The kernel's result, written over poison between guards."""
        q = self.drawn.q
        guarded = torch.full((len(q) + 2 * GUARD_ROWS, *q.shape[1:]), float("nan"), device=q.device)
        out = guarded[GUARD_ROWS:-GUARD_ROWS]
        attend(q, kv, q.shape[2] ** -0.5, self.splits, out, **options)
        if not bool(guarded[:GUARD_ROWS].isnan().all() & guarded[-GUARD_ROWS:].isnan().all()):
            self.faults.append(f"{label}: wrote before the start or past the end")
        if bool(out.isnan().any()):
            self.faults.append(f"{label}: NaN, or not written")
        return out.clone()

    def expect_equal(self, first: torch.Tensor, second: torch.Tensor, label: str) -> None:
        if not torch.equal(first, second):
            self.faults.append(f"{label}: {_worst(first, second)}")

    def expect_close(self, result: torch.Tensor, exact: torch.Tensor, bound: float, label: str) -> None:
        error = _error(result, exact)
        if not error <= bound:
            self.faults.append(f"{label}: the error against float64 is {error:.3e}, above {bound:.3e}")


def check_case(
    case: Case,
    device: str,
    checks: Sequence[str],
    splits: int = 3,
    programs: int | None = None,
    has_skips: bool | None = None,
    copies: int | None = None,
) -> Gate:
    """Kernels on one case; checks are names of ``CHECKS``.

    Without ``has_skips`` what the case has, without ``copies`` what suits the number of programs.
    """
    drawn = draw(case, device)
    raw = raw_pages(drawn)
    sides = [reference.raw_tokens(raw, b) for b in range(raw.batch)]
    exact = reference.attend(drawn.q, [k for k, _ in sides], [v for _, v in sides], case.head_dim**-0.5)
    has_skips = case.window is not None if has_skips is None else has_skips
    gate = Gate(drawn, splits, programs, has_skips, copies, exact)
    for name in checks:
        gate.checked.append(name)
        CHECKS[name](gate)
    return gate


def check_bf16(gate: Gate) -> None:
    """Raw pages against float64, and one launch against another."""
    raw = raw_pages(gate.drawn)
    plain = gate.run(bf16.attend, raw, "bf16", programs=gate.programs)
    gate.expect_close(plain, gate.exact, BF16_TOLERANCE, "bf16")
    again = gate.run(bf16.attend, raw, "bf16", programs=gate.programs)
    gate.expect_equal(plain, again, "bf16: two launches differ")


def check_fused(gate: Gate, fused: Fused) -> None:
    """Sums over packed pages: in the tile those of raw pages; fast so without an exception, else no less exact."""
    name = fused.name
    kv, raw, exceptions = fused.pack_drawn(gate.drawn)
    options: dict[str, Any] = {"has_skips": gate.has_skips, "copies": gate.copies}
    if gate.programs is not None:
        options["programs"] = gate.programs
    plain = gate.run(bf16.attend, raw_pages(gate.drawn), "bf16", programs=gate.programs)
    raw_sums = gate.run(fused.attend, raw, f"{name} on raw pages", **options)
    fast = gate.run(fused.attend, kv, name, **options)
    gate.expect_equal(fast, gate.run(fused.attend, kv, name, **options), f"{name}: two launches differ")
    in_tile = gate.run(fused.attend, kv, f"{name} in tile", in_tile=True, **options)
    gate.expect_equal(raw_sums, in_tile, f"{name} in tile: sums differ from raw pages'")
    gate.checked.append(f"{name} in tile")
    if exceptions == 0:
        gate.expect_equal(raw_sums, fast, f"{name}: sums differ from raw pages' without an exception")
        gate.checked.append(f"{name} without an exception")
    bound = ERROR_SLACK * max(_error(raw_sums, gate.exact), _error(plain, gate.exact))
    gate.expect_close(fast, gate.exact, bound, name)


def check_fixed4_pages(gate: Gate) -> None:
    """Records against the codec's bytes, and unpacked pages against the values."""
    case = gate.drawn.case
    kv, _, _ = pack_fixed4(gate.drawn)
    size = fixed4_codec.head_record_bytes(case.block_tokens, case.head_dim)

    def differing(records: torch.Tensor, places: torch.Tensor, packed: Packed) -> int:
        got = records[places.long()]
        different = np.count_nonzero(got[..., :size].reshape(-1).cpu().numpy() != packed.pages)
        return int(different) + int(got[..., size:].count_nonzero())

    _check_pages(gate, FIXED4, kv.table, {"k": kv.packed_k, "v": kv.packed_v}, fixed4_codec.encode, differing)


def check_fixed3_pages(gate: Gate) -> None:
    """Main parts and lists against the codec's bytes, and unpacked pages against the values."""
    kv, _, _ = pack_fixed3(gate.drawn)
    sides: dict[fixed4_codec.Kind, Slots] = {
        "k": Slots(kv.pages.packed_k, kv.k_lists, kv.k_entries),
        "v": Slots(kv.pages.packed_v, kv.v_lists, kv.v_entries),
    }
    _check_pages(gate, FIXED3, kv.pages.table, sides, fixed3_codec.encode, differing_bytes)


def _check_pages(
    gate: Gate,
    fused: Fused,
    table: BlockTable,
    sides: Mapping[fixed4_codec.Kind, Any],
    encode: Callable[..., Packed],
    differing: Callable[[Any, torch.Tensor, Packed], int],
) -> None:
    """Packed pages of the sequence with most of them."""
    case, drawn = gate.drawn.case, gate.drawn
    sequence = int(table.packed_counts.argmax())
    places = table.packed_pages[sequence, : int(table.packed_counts[sequence])].contiguous()
    if len(places) == 0:
        return
    listed = drawn.listed()[places.long()]
    order = torch.arange(listed.numel(), dtype=torch.int32, device=listed.device).view(listed.shape)
    for kind, packed in sides.items():
        pool = drawn.raw_k if kind == "k" else drawn.raw_v
        values = pool[listed.long().flatten()]  # [page, kv_heads, page_token, head_dim]
        different = differing(packed, places, encode(patterns_of(values), None, case.block_tokens, kind))
        if different:
            gate.faults.append(f"{fused.name}: {different} bytes of packed {kind} differ from the codec's")
        back = torch.full((len(values) + 2, *values.shape[1:]), float("nan"), device=pool.device).to(
            pool.dtype
        )
        fused.unpack(packed, places, back[1:-1], order, kind, case.block_tokens)
        if not bool(back[0].isnan().all() & back[-1].isnan().all()):
            gate.faults.append(f"{fused.name}: unpacking {kind} wrote before the start or past the end")
        if not torch.equal(back[1:-1].view(torch.int16), values.view(torch.int16)):
            gate.faults.append(f"{fused.name}: unpacked {kind} differs from the values")


def check_portable(gate: Gate, fused: Fused, attend: Callable[..., torch.Tensor]) -> None:
    """A format's kernel in plain Triton against float64."""
    kv, _, _ = fused.pack_drawn(gate.drawn)
    result = gate.run(attend, kv, f"{fused.name} portable")
    gate.expect_close(result, gate.exact, BF16_TOLERANCE, f"{fused.name} portable")


def check_gaac(gate: Gate) -> None:
    """Sums over packed pages equal those over raw pages, and decoded pages the values."""
    kv, raw = pack_gaac(gate.drawn)
    raw_sums = gate.run(gaac_attend.attend, raw, "gaac on raw pages")
    result = gate.run(gaac_attend.attend, kv, "gaac")
    gate.expect_equal(raw_sums, result, "gaac: sums differ from raw pages'")
    gate.expect_close(result, gate.exact, BF16_TOLERANCE, "gaac")


def check_gaac_decode(gate: Gate) -> None:
    """Pages of `gaac` decoded on the device against the values."""
    case = gate.drawn.case
    for patterns in gate.drawn.patterns():
        if patterns.shape[1] == 0:
            continue
        slots, windows = gaac_slots(patterns, case.block_tokens, str(gate.drawn.q.device))
        starts = torch.arange(len(slots) + 1, device=slots.device) * slots.shape[1]
        memory = torch.full((patterns.size * 2 + 512,), POISON, dtype=torch.uint8, device=slots.device)
        out = memory[256:-256].view(torch.int16).view(patterns.shape)
        decode_pages(slots.reshape(-1), starts, windows[0], windows[1], out, case.block_tokens)
        if not bool((memory[:256] == POISON).all() and (memory[-256:] == POISON).all()):
            gate.faults.append("gaac decode: wrote before the start or past the end")
        different = np.count_nonzero(out.cpu().numpy().view(np.uint16) != patterns)
        if different:
            gate.faults.append(f"gaac decode: {different} values differ")


def check_fp8(gate: Gate, kind: Fp8) -> None:
    """FP8 pages against float64 attention over the cast values."""
    kv, (k_scale, v_scale) = cast_drawn(gate.drawn, kind)
    name, q = kind.name, gate.drawn.q
    plain = replace(
        kv, raw_k=kv.raw_k.double() * k_scale, raw_v=kv.raw_v.double().transpose(2, 3).contiguous() * v_scale
    )
    sides = [reference.raw_tokens(plain, b) for b in range(plain.batch)]
    exact = reference.attend(q, [k for k, _ in sides], [v for _, v in sides], q.shape[2] ** -0.5)
    attend = partial(fp8.attend, k_scale=k_scale, v_scale=v_scale)
    result = gate.run(attend, kv, name)
    gate.expect_close(result, exact, FP8_TOLERANCE, name)
    gate.expect_equal(result, gate.run(attend, kv, name), f"{name}: two launches differ")


CHECKS: dict[str, Callable[[Gate], None]] = {
    "bf16": check_bf16,
    **{fused.name: partial(check_fused, fused=fused) for fused in (*FUSED, FIXED4_CODED)},
    "fixed4-pages": check_fixed4_pages,
    "fixed3-pages": check_fixed3_pages,
    "fixed4-portable": partial(check_portable, fused=FIXED4, attend=fixed4_portable.attend),
    "fixed3-portable": partial(check_portable, fused=FIXED3, attend=fixed3_portable.attend),
    "gaac": check_gaac,
    "gaac-decode": check_gaac_decode,
    E4M3.name: partial(check_fp8, kind=E4M3),
    E5M2.name: partial(check_fp8, kind=E5M2),
}


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error; 0 where both are nothing but zeros, as for a batch of empty sequences."""
    difference, size = (result.double() - exact).norm(), exact.norm()
    return 0.0 if difference == 0 else (difference / size).item()


def _worst(first: torch.Tensor, second: torch.Tensor) -> str:
    """How many values differ, and the first five with both values in hex."""
    different = (first != second).nonzero().tolist()
    shown = [
        f"{i}: {float(first[tuple(i)]).hex()} and {float(second[tuple(i)]).hex()}" for i in different[:5]
    ]
    return f"{len(different)} values differ, " + "; ".join(shown)
