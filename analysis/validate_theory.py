"""Checks that need nobody's data: queueing theory, memory arithmetic of engines' logs, codec ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvfold.analysis.deployment import format_sizes
from kvfold.analysis.validate import Check, Family, compared, holds
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import GIB, kv_budget, kv_pool_bytes
from kvfold.sim.model import load_model
from kvfold.sim.run import FS_PER_S
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.work import Work
from kvfold.traces.columns import assemble
from kvfold.traces.table import Floats, Ints, Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfold.codec.sizes import FormatSizes
    from kvfold.sim.decode_set import DecodeSet
    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.model import ModelSpec
    from kvfold.sim.work import Chunk

PLANNER = "vLLM logs on an H100, collected by llm-d-planner"
ENGINE_CALLS, RECURSION_CALLS = 5_000, 4_000_000
#: Service of the queues' calls in engine steps, on average.
MEAN_STEPS = 1000
STEP_FS = 4 * 10**6


@dataclass(frozen=True, slots=True)
class FlatCost:
    """Every step lasts as long, whatever is in it: the engine as a queue with one slot."""

    model: ModelSpec
    gpu: GpuSpec
    sizes: FormatSizes
    tp: int = 1

    def work(self, _: DecodeSet, __: Sequence[Chunk]) -> Work:
        return Work(STEP_FS, 0, None, "modelled")

    def decode_fs(self, _: int, __: int, ___: int) -> int:
        return STEP_FS

    def base_fs(self, sequences: int, prompt_tokens: int, ending_prompts: int) -> int:
        return STEP_FS

    def chunk_fs(self, chunk: Chunk) -> int:
        return 0


def queueing(_: Path | None) -> Family:
    """The engine equals Lindley's recursion call by call, the recursion Pollaczek and Khinchine's formula."""
    checks: list[Check] = []
    for name, rho in (("M/M/1", 0.6), ("M/M/1", 0.8), ("M/D/1", 0.8), ("M/G/1", 0.6)):
        rng = np.random.default_rng(1)
        gaps, services = _samples(rng, name, rho, ENGINE_CALLS)
        steps = np.maximum(1, np.rint(services * MEAN_STEPS).astype(np.int64))
        arrival_fs = np.cumsum(np.rint(gaps * MEAN_STEPS * STEP_FS).astype(np.int64))
        expected = _starts(arrival_fs, steps * STEP_FS)
        found = np.rint(_engine_starts_s(arrival_fs, steps) * FS_PER_S).astype(np.int64)
        differing = int((found != expected).sum())
        checks.append(
            holds(
                "queueing",
                f"{name} at {rho}: engine = recursion",
                "Lindley 1952",
                f"0 of {ENGINE_CALLS:,} calls differ",
                f"{differing:,} differ",
                differing == 0,
            )
        )
        gaps, services = _samples(np.random.default_rng(2), name, rho, RECURSION_CALLS)
        cut = RECURSION_CALLS // 10
        waits = _waits(gaps, services)[cut:]
        second = {"M/M/1": 2.0, "M/D/1": 1.0, "M/G/1": 4.0}[name]  # E[S^2] / E[S]^2
        formula = rho * second / (2 * (1 - rho))
        source = "Pollaczek 1930, Khinchine 1932"
        note = f"{RECURSION_CALLS:,} calls, one seed; docs/theory.md has the long runs"
        name = f"{name} at {rho}: mean wait, in mean services"
        checks.append(compared("queueing", name, source, formula, float(waits.mean()), 0.02, note=note))
    return Family(tuple(checks))


def _samples(rng: np.random.Generator, name: str, rho: float, calls: int) -> tuple[Floats, Floats]:
    """Gaps and services in mean services; G is hyperexponential, one in five with mean 3, the others 1/2."""
    gaps = rng.exponential(1 / rho, calls)
    if name == "M/D/1":
        return gaps, np.ones(calls)
    services = rng.exponential(1.0, calls)
    if name == "M/G/1":
        services *= np.where(rng.random(calls) < 0.2, 3.0, 0.5)
    return gaps, services


def _waits(gaps: Floats, services: Floats) -> Floats:
    """W(n+1) = max(0, W(n) + S(n) - A(n+1)), as sums less their running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    return walk - np.minimum.accumulate(walk)


def _starts(arrival_fs: Ints, service_fs: Ints) -> Ints:
    """When each call starts: at once, or when the one before has ended."""
    ends_before = np.cumsum(service_fs) - service_fs
    return ends_before + np.maximum.accumulate(arrival_fs - ends_before)


def _engine_starts_s(arrival_fs: Ints, steps: Ints) -> Floats:
    model, gpu, sizes = load_model("llama-3.1-8b"), load_gpu("h100"), format_sizes("bf16")
    calls = len(steps)
    columns = {
        "arrival_time_s": arrival_fs / FS_PER_S,
        "input_tokens": np.ones(calls, np.int64),
        "output_tokens": steps,
    }
    meta = Meta("made", "queueing theory", "", "s", rows_read=calls, rows_kept=calls)
    found = run(
        Scenario(
            trace=assemble(meta, columns),
            cost=FlatCost(model, gpu, sizes),
            budget=replace(kv_budget(model, gpu, sizes), kv_budget_bytes=2**60),
            max_context_tokens=2**60,
            limits=Limits(max_num_seqs=1),
        )
    )
    return found.calls.scheduled_s


def memory(_: Path | None) -> Family:
    """KV bytes of models and the waterfall of engines' logs."""
    checks = []
    memory_bytes = load_gpu("h100").memory_bytes
    for name, claims, kv_gib in (
        ("Qwen3-32B", (61.03, 5.64, 0.14), 4.45),
        ("gpt-oss-20b", (13.47, 7.38, 0.13), 50.28),
        ("Llama-3.3-70B FP8, two GPUs", (33.88, 4.84, 0.55), 32.00),
    ):
        ours = kv_pool_bytes(memory_bytes, 0.9, [round(gib * GIB) for gib in claims]) / GIB
        checks.append(compared("memory", f"KV pool, {name}", PLANNER, kv_gib, ours, 0.01, unit="GiB"))
    for name, per_token in (
        ("llama-3.1-8b", 131_072),
        ("qwen3-32b", 262_144),
        ("deepseek-v3", 70_272),
        ("qwen3.5-27b", 65_536),
    ):
        found = load_model(name).kv_bytes_per_token()
        title = f"KV bytes per token, {name}"
        source = "2 x layers x KV heads x head_dim x 2, or the latent, by hand"
        checks.append(compared("memory", title, source, per_token, found, 0.0, unit="bytes"))
    oss = load_model("gpt-oss-20b")
    for name, published, kept in zip(
        ("reserved", "windowed"), (12.00, 6.094), oss.kv_bytes_bounds(8192)[::-1], strict=True
    ):
        ours = 32 * kept / GIB
        title = f"gpt-oss-20b, 32 x 8,192 tokens, {name}"
        checks.append(compared("memory", title, "hf-mem#60, PR#70", published, ours, 0.001, unit="GiB"))
    qwen = load_model("qwen3-32b")
    ours = qwen.kv_bytes_per_token() / qwen.kv_bytes_per_token(tp=4)
    name = "tokens of a pool, Qwen3-32B on four GPUs"
    checks.append(compared("memory", name, "834,048 / 208,384 in vLLM's log", 4.002, ours, 0.001, unit="x"))
    return Family(tuple(checks))


def codec(_: Path | None) -> Family:
    """Encoded ratios: ours are measured on K and V of a small model, the published ones on those of large ones."""
    source = "GAAC preprint, 28 October 2026"
    why = "other tensors: SmolLM2-135M, a first, a middle and a last layer (codec/data/sizes.csv)"
    ratios = {name: 16 / format_sizes(name).encoded_bits for name in ("gaac", "gaac-2bit")}
    checks = [
        compared(
            "codec",
            "ratio, modes of 3, 4 and 8 bits",
            source,
            1.406,
            ratios["gaac"],
            origin="measured",
            note=why,
        ),
        compared(
            "codec", "ratio, 2 bits too", source, 1.439, ratios["gaac-2bit"], origin="measured", note=why
        ),
        holds(
            "codec",
            "a 2-bit mode packs closer",
            source,
            ">",
            f"{ratios['gaac-2bit']:.3f} > {ratios['gaac']:.3f}",
            ratios["gaac-2bit"] > ratios["gaac"],
        ),
    ]
    work = {name: format_sizes(name).decode_int_ops_per_element for name in ("gaac", "gaac-2bit")}
    checks.append(
        holds(
            "codec",
            "and takes longer to decode",
            f"{source}: 187.1 and 526.7 µs",
            ">",
            f"{work['gaac-2bit']:g} > {work['gaac']:g} operations an element",
            work["gaac-2bit"] > work["gaac"],
        )
    )
    return Family(tuple(checks))
