"""Public kernel times against our measured H200 table and against the datasheet model of H200, H100 and A100."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from kvfold.analysis.deployment import cost_table
from kvfold.analysis.validate import Check, Family, compared
from kvfold.analysis.validate_perfdb import SYSTEMS, perfdb_costs
from kvfold.sim.gpu import load_gpu, require

if TYPE_CHECKING:
    from kvfold.sim.costs import AttendTable, CostTable, LinearTable, PrefillTable
    from kvfold.sim.gpu import GpuSpec

SOURCE = "AIConfigurator 0.12.0, vLLM, FlashAttention 3 (A100: FlashAttention 2)"
FAMILY = "vllm fa3"  # in our table, the kernel of the public Hopper ones
REPLAYS = "bf16:timed=replays"  # the same kernel timed as there
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
#: Decode attention below this much KV is bound by launches, which the datasheet model knows nothing of.
LEAST_BYTES, LEAST_TOKENS = 64 * 2**20, 1024
#: (out, in) of a decoder layer of Llama-3.1-8B and of its LM head.
LLAMA = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}


class Point(NamedTuple):
    """A measured point: what it is, the public time and ours, in us."""

    name: str
    public: float
    ours: float


def tables(folder: Path | None) -> Family:
    """Median signed difference per table, the worst point named."""
    checks: list[Check] = []
    skipped: list[str] = []
    for system, gpu in SYSTEMS.items():
        public = perfdb_costs(folder, system, Q_HEADS, KV_HEADS, HEAD_DIM) if folder else None
        if public is None:
            skipped.append(f"the tables of {gpu} ({system}_*.csv): give --data DIR")
            continue
        own = cost_table(gpu)
        if own is not None:
            checks += _against_own(gpu, public, own)
        checks += _against_model(load_gpu(gpu), public)
    return Family(tuple(checks), tuple(skipped))


def _against_own(gpu: str, public: CostTable, own: CostTable) -> list[Check]:
    """Our measured points against the public table, which is interpolated in KV tokens at the same batch."""
    checks: list[Check] = []
    family = cost_table(gpu, FAMILY)
    readings = [
        (family, "bf16", "same kernel", 0.10, f"{FAMILY}, single launches as all of our table"),
        (family, REPLAYS, "same kernel, timed as there", None, "back to back, the cache left as it is"),
        (own, "bf16", "fastest kernel", None, "what speed-ups and plans use"),
    ]
    for table, name, reading, gate, note in readings:
        if table is not None and name in table.attend:
            decode = list(_decode_points(public.attend["bf16"], table.attend[name]))
            checks += _summary(f"{gpu} decode attention, our table, {reading}", decode, gate, note)
    products = list(_product_points(public.linear["bf16"], own.linear["bf16"]))
    note = f"same weight bytes and tokens, from {LEAST_BYTES >> 20} MiB on: smaller ones fit a cache that we flush"
    checks += _summary(f"{gpu} BF16 products, our table", products, None, note)
    if public.prefill is not None and own.prefill is not None:
        prefill = list(_prefill_points(public.prefill, own.prefill))
        checks += _summary(f"{gpu} causal prefill attention, our table", prefill, None, "one prompt")
    return checks


def _against_model(gpu: GpuSpec, public: CostTable) -> list[Check]:
    """Bytes over bandwidth and operations over FLOP/s at the one stated efficiency."""
    bandwidth = gpu.bandwidth_bytes_per_s * gpu.bandwidth_efficiency / 1e6
    flops = require(gpu, "bf16_flops_per_s") * gpu.compute_efficiency / 1e6
    checks = []
    for name, table in sorted(public.attend.items()):
        width = 2 if name == "bf16" else 1
        points = []
        for batch, contexts, times in zip(table.batches, table.contexts, table.times_us, strict=True):
            for context, time_us in zip(contexts, times, strict=True):
                count_bytes = 2 * KV_HEADS * HEAD_DIM * width * batch * context
                if count_bytes >= LEAST_BYTES and context >= LEAST_TOKENS:
                    points.append(Point(f"{batch} x {context:,}", time_us, count_bytes / bandwidth))
        note = f"from {LEAST_BYTES >> 20} MiB of KV and {LEAST_TOKENS:,} tokens a sequence on"
        checks += _summary(f"{gpu.name} decode attention {name}, modelled", points, None, note)
    if public.prefill is not None:
        pair_us = 4 * Q_HEADS * HEAD_DIM / flops
        points = [
            Point(f"{tokens:,} tokens", rate / 1e9 * _pairs(tokens), pair_us * _pairs(tokens))
            for tokens, rate in zip(*public.prefill.causal, strict=True)
            if tokens >= LEAST_TOKENS
        ]
        checks += _summary(
            f"{gpu.name} causal prefill attention, modelled", points, None, f"from {LEAST_TOKENS:,} tokens on"
        )
    checks += _layer_of_llama(gpu, public.linear["bf16"], bandwidth, flops)
    return checks


def _layer_of_llama(gpu: GpuSpec, table: LinearTable, bandwidth: float, flops: float) -> list[Check]:
    """The products of one layer of Llama-3.1-8B; shapes that the table lacks are interpolated in bytes."""
    checks = []
    for tokens in (8, 128, 2048):
        public = ours = 0.0
        for out_features, in_features in LLAMA.values():
            params = out_features * in_features
            public += table.time_us(tokens, 2 * params)[0]
            ours += max(2 * params / bandwidth, 2 * params * tokens / flops)
        checks.append(
            compared(
                "tables",
                f"{gpu.name} products of a Llama-3.1-8B layer, {tokens:,} tokens, modelled",
                SOURCE,
                public,
                ours,
                unit="us",
                note="reference interpolated in bytes for n 28,672 and k 14,336",
            )
        )
    return checks


def _decode_points(public: AttendTable, own: AttendTable) -> Iterable[Point]:
    for batch, contexts, times in zip(own.batches, own.contexts, own.times_us, strict=True):
        if batch not in public.batches:
            continue
        known = public.contexts[public.batches.index(batch)]
        _, segments = public.segments(batch, 1.0, True)
        for context, time_us in zip(contexts, times, strict=True):
            if known[0] <= context <= known[-1]:
                inside = [
                    each
                    for each in segments
                    if each.until_tokens is None or batch * context <= each.until_tokens
                ]
                reference = (inside[0].base_fs + inside[0].token_fs * batch * context) / 1e9
                yield Point(f"{batch} x {context:,}", reference, time_us)


def _product_points(public: LinearTable, own: LinearTable) -> Iterable[Point]:
    for tokens, sizes, times in zip(own.tokens, own.weight_bytes, own.times_us, strict=True):
        if tokens not in public.tokens:
            continue
        known = public.weight_bytes[public.tokens.index(tokens)]
        for size, time_us in zip(sizes, times, strict=True):
            if size in known and size >= LEAST_BYTES:
                yield Point(
                    f"{tokens} tokens, {size / 2**20:,.0f} MiB", public.time_us(tokens, size)[0], time_us
                )


def _prefill_points(public: PrefillTable, own: PrefillTable) -> Iterable[Point]:
    for tokens, rate in zip(*own.causal, strict=True):
        if tokens in public.causal[0]:
            pairs = _pairs(tokens)
            yield Point(
                f"{tokens:,} tokens", public.pair_fs(tokens, False)[0] / 1e9 * pairs, rate / 1e9 * pairs
            )


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _summary(name: str, points: list[Point], gate: float | None, note: str) -> list[Check]:
    """The median of ours / public, and the point that is farthest off."""
    if not points:
        return []
    ratios = [point.ours / point.public for point in points]
    worst = max(points, key=lambda point: abs(point.ours / point.public - 1))
    origin = "modelled" if name.endswith("modelled") else "measured"
    middle = compared(
        "tables",
        f"{name}: median",
        SOURCE,
        1.0,
        median(ratios),
        gate,
        unit="x",
        origin=origin,
        note=f"{len(points)} points; {note}",
    )
    farthest = compared(
        "tables",
        f"{name}: worst",
        SOURCE,
        worst.public,
        worst.ours,
        unit="us",
        origin=origin,
        note=worst.name,
    )
    return [middle, farthest]
