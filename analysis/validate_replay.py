"""Replays a recorded run on its own arrivals, from the layer times of its GPU, and compares what users saw."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold.analysis.deployment import format_sizes
from kvfold.analysis.latency import latency
from kvfold.analysis.validate import Check, compared
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu, require
from kvfold.sim.gpu import preset_names as gpu_names
from kvfold.sim.memory import ENGINE_VERSION, kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.model import preset_names as model_names
from kvfold.sim.profile import Profile, load_profile
from kvfold.sim.profile_cost import Link, ProfileCost
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.step import COLLECTIVE_LATENCY_S
from kvfold.sim.work import NO_OVERHEAD, Overhead
from kvfold.traces.columns import assemble
from kvfold.traces.prefix import Chains
from kvfold.traces.table import Meta, Trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvfold.analysis.validate_run import EngineRun
    from kvfold.sim.gpu import GpuSpec
    from kvfold.sim.memory import MemoryBudget
    from kvfold.sim.model import ModelSpec
    from kvfold.sim.run import Run
    from kvfold.traces.table import Floats, Ints

METRICS = ("TTFT", "TPOT", "latency")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
#: Largest |error| by run: its metrics and statistics that must meet it; the others are printed.
_ALL = {(metric, statistic) for metric in METRICS for statistic in ("mean", "p50", "p90", "p99")}
_TAILS = {(metric, statistic) for metric in ("TPOT", "latency") for statistic in ("p50", "p90", "p99")}
_MEANS = {(metric, "mean") for metric in METRICS}
GATES = {"RTX4090_Llama-3.1-8B": (0.02, _ALL), "RTXPRO6000_Llama-3.1-8B": (0.04, _TAILS | _MEANS)}
PREFIXES_CSV = "data/shared_prefixes.csv"


@dataclass(frozen=True, slots=True)
class Replay:
    """What the engine did and what the simulator did on the same arrivals; a value per request in order."""

    run: EngineRun
    simulated: Run
    budget: MemoryBudget
    real: dict[str, Floats]
    ours: dict[str, Floats]
    extrapolated_share: float  # of the time of steps with decoding
    shared_prefixes: int  # prompts known to start with an earlier one
    notes: tuple[str, ...]


def replay(
    run_: EngineRun,
    profiles: Path,
    overhead: Overhead = NO_OVERHEAD,
    strict: bool = False,
    uneven: bool | None = None,
    shared: Mapping[int, tuple[int, int]] | None = None,
) -> Replay:
    """`uneven` as in load_profile; `shared`: request -> (earlier request, tokens that it starts with), None: as in
    the table of known workloads. Raises ConfigError where the run's model, GPU or profile is not known."""
    model, gpu = _model(run_.model), _gpu(run_.hardware)
    profile, notes = _profile(profiles, run_, uneven), []
    if model.moe_layers and profile.moe is None:
        raise ConfigError(
            f"{profile.source}: {model.name} has experts, and the profile has no moe.csv; profile it too"
        )
    if profile.uneven is None:
        notes.append("uneven contexts not corrected: the profile says that its skew sweep was off")
    sizes = format_sizes("bf16")
    cost = ProfileCost(
        profile,
        model,
        gpu,
        sizes,
        link=_link(run_, gpu),
        data_parallel=run_.data_parallel if run_.expert_parallel else 1,
        graph_sizes=run_.graph_sizes,
        overhead=overhead,
        strict=strict,
    )
    budget = _budget(run_, model, gpu)
    if run_.num_gpu_blocks is None:
        notes.append(f"KV pool not recorded; {budget.kv_budget_origin}: {budget.num_units:,} blocks")
    together = run_.data_parallel > 1 and run_.expert_parallel and run_.async_scheduling
    if together:
        notes.append(
            "data-parallel ranks step together: the longest rank holds up all, experts see all tokens"
        )
    elif run_.data_parallel > 1:
        notes.append("data-parallel ranks run apart")
    if shared is None:
        shared = _shared_prefixes(run_.dataset_hash)
    trace = trace_of(run_, shared)
    notes.append(
        f"{len(shared)} prompts start with an earlier one (from the workload's token ids and the hits of a prefix "
        "cache that LLMServingSim logged: docs/validation.md)"
        if shared
        else "shared prefixes unknown: the data has no token ids"
    )
    simulated = run(
        Scenario(
            trace=trace,
            cost=cost,
            budget=budget,
            max_context_tokens=run_.max_model_len or model.max_context_tokens,
            limits=Limits(run_.max_num_seqs, run_.max_num_batched_tokens),
            prefix_caching=run_.prefix_caching,
            replicas=run_.data_parallel,
            router="fewest-calls",
            stepwise=True,
            async_scheduling=run_.async_scheduling,
            lockstep_fs=cost.shared_fs if together else None,
        )
    )
    origins = simulated.attention_origin_s
    calls = simulated.calls
    return Replay(
        run=run_,
        simulated=simulated,
        budget=budget,
        real=_metrics(run_.arrival_s, run_.first_token_s, run_.last_token_s, run_.output_tokens),
        ours=_metrics(calls.arrival_s, calls.first_token_s, calls.last_token_s, run_.output_tokens),
        extrapolated_share=origins.get("extrapolated", 0.0) / max(sum(origins.values()), 1e-12),
        shared_prefixes=len(shared),
        notes=tuple(notes),
    )


def checks_of(found: Replay) -> list[Check]:
    """Mean and percentiles of TTFT, TPOT and latency, gated where the run has a gate."""
    limit, gated = GATES.get(found.run.name, (None, set()))
    origin = "interpolated" if found.extrapolated_share == 0 else "extrapolated"
    checks = []
    for metric in METRICS:
        for statistic in STATISTICS:
            published = found.run.published.get((metric.replace("latency", "Latency"), _upstream(statistic)))
            checks.append(
                compared(
                    "engine",
                    f"{found.run.name} {metric} {statistic}",
                    f"vLLM {found.run.vllm_version}, recorded by LLMServingSim",
                    statistic_of(found.real[metric], statistic),
                    statistic_of(found.ours[metric], statistic),
                    limit if (metric, statistic) in gated else None,
                    unit="s",
                    origin=origin,
                    note="" if published is None else f"LLMServingSim {100 * published:+.1f} %",
                )
            )
    return checks


def checks_without_prefixes(alone: Replay) -> list[Check]:
    """The statistic farthest off of each metric where no prompt is taken to start with an earlier one."""
    checks = []
    for metric in METRICS:
        real, ours = alone.real[metric], alone.ours[metric]
        errors = {name: statistic_of(ours, name) / statistic_of(real, name) - 1 for name in STATISTICS}
        worst = max(errors, key=lambda name: abs(errors[name]))
        checks.append(
            compared(
                "engine",
                f"{alone.run.name} {metric} without shared prefixes: worst ({worst})",
                f"vLLM {alone.run.vllm_version}, recorded by LLMServingSim",
                statistic_of(real, worst),
                statistic_of(ours, worst),
                unit="s",
                origin="interpolated" if alone.extrapolated_share == 0 else "extrapolated",
            )
        )
    return checks


def statistic_of(values: Floats, name: str) -> float:
    """Mean or percentile (NumPy's linear method) of the defined values."""
    defined = values[~np.isnan(values)]
    return float(defined.mean() if name == "mean" else np.percentile(defined, int(name[1:])))


def trace_of(run_: EngineRun, shared: Mapping[int, tuple[int, int]]) -> Trace:
    """The run's requests as a trace.

    Every prompt has blocks of its own but for what it shares, so that a preempted request finds what is left.
    """
    block = run_.block_size
    chains, next_id = Chains(), 0
    known: list[list[int]] = []
    for row, tokens in enumerate(run_.input_tokens.tolist()):
        parent, common = shared.get(row, (row, 0))
        chain = known[parent][: common // block] if parent < row else []
        new = tokens // block - len(chain)
        chain = [*chain, *range(next_id, next_id + new)]
        next_id += new
        known.append(chain)
        chains.add(chain, f"request {row}")
    rows = len(known)
    meta = Meta(
        "engine-run",
        run_.name,
        "",
        "s",
        rows_read=rows,
        rows_kept=rows,
        block_size_tokens=block,
        hash_scope="global",
    )
    columns = {
        "arrival_time_s": run_.arrival_s,
        "input_tokens": run_.input_tokens,
        "output_tokens": run_.output_tokens,
    }
    return assemble(meta, columns | chains.columns())


def timeline(found: Replay) -> dict[str, Any]:
    """Sequences, waiting calls and KV occupancy over time, ours and the engine's log."""
    steps = found.simulated.stretches
    order = np.argsort(steps.start_s, kind="stable")
    capacity = found.budget.num_units * found.budget.unit_bytes * found.run.data_parallel
    ours = {"t_s": steps.start_s[order]}
    for name, values in (
        ("running", steps.decode_seqs),
        ("waiting", steps.waiting),
        ("kv_share", steps.used_bytes / capacity),
    ):
        ours[name] = _summed(values.astype(float), steps.replica, order)
    log = found.run.log
    real = {"t_s": log["t"], "running": log["running"], "waiting": log["waiting"]} if log else {}
    if log and log.get("kv_cache_pct", np.zeros(1)).any():
        real["kv_share"] = log["kv_cache_pct"] / 100
    return {"ours": ours, "engine": real}


def _summed(values: Floats, replica: Ints, order: Ints) -> Floats:
    """The sum over replicas of each one's latest value, at every step of any of them."""
    latest = np.zeros(int(replica.max()) + 1 if len(replica) else 1)
    result = np.empty(len(order))
    for place, index in enumerate(order):
        latest[replica[index]] = values[index]
        result[place] = latest.sum()
    return result


def _metrics(arrival_s: Floats, first_s: Floats, last_s: Floats, tokens: Any) -> dict[str, Floats]:
    found = latency(arrival_s, arrival_s, first_s, last_s, tokens)
    return {"TTFT": found.ttft_s, "TPOT": found.tpot_s, "latency": found.e2e_s}


def _upstream(statistic: str) -> str:
    return {"mean": "Mean", "p50": "Median"}.get(statistic, statistic.upper())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _model(name: str) -> ModelSpec:
    """The preset whose name the model's starts with (`Qwen/Qwen3-30B-A3B-Instruct-2507` is `qwen3-30b-a3b`)."""
    short = _plain(name.rsplit("/", 1)[-1])
    fitting = [preset for preset in model_names() if short.startswith(_plain(preset))]
    if not fitting:
        raise ConfigError(f"model {name!r} of the run has no preset; kvfold list models shows them")
    return load_model(max(fitting, key=len))


def _gpu(hardware: str) -> GpuSpec:
    for preset in gpu_names():
        if _plain(preset) == _plain(hardware):
            return load_gpu(preset)
    raise ConfigError(f"hardware {hardware!r} of the run has no GPU preset; kvfold list gpus shows them")


def _profile(folder: Path, run_: EngineRun, uneven: bool | None) -> Profile:
    """The profile of the run's model, hardware and tensor-parallel size below a folder."""
    wanted = _plain(run_.model.rsplit("/", 1)[-1])
    candidates = sorted(path.parent for path in folder.rglob("attention.csv"))
    for path in candidates:
        name = _plain(str(path.relative_to(folder)))
        if _plain(run_.hardware) in name and wanted in name:
            profile = load_profile(path, uneven)
            if profile.tp == run_.tp:
                return profile
    raise ConfigError(
        f"no profile of {run_.model} on {run_.hardware} with tp {run_.tp} below {folder}; "
        f"folders with an attention.csv: {', '.join(path.name for path in candidates) or 'none'}"
    )


def _link(run_: EngineRun, gpu: GpuSpec) -> Link | None:
    if run_.tp == 1 and run_.data_parallel == 1:
        return None
    if run_.link_bytes_per_s is not None and run_.link_latency_s is not None:
        return Link(run_.link_bytes_per_s, run_.link_latency_s, "given: cluster_config.json")
    return Link(require(gpu, "link_bytes_per_s"), COLLECTIVE_LATENCY_S, gpu.source("link_bytes_per_s"))


def _budget(run_: EngineRun, model: ModelSpec, gpu: GpuSpec) -> MemoryBudget:
    """Of one rank: from the engine's own block count, one of which is its null block; else from the waterfall."""
    of_rank = partial(
        kv_budget,
        model,
        gpu,
        format_sizes("bf16"),
        tp=run_.tp,
        page_tokens=run_.block_size,
        expert_ranks=run_.data_parallel if run_.expert_parallel else 1,
    )
    if run_.num_gpu_blocks is not None:
        blocks = run_.num_gpu_blocks // run_.data_parallel
        return replace(
            of_rank(kv_budget_bytes=(blocks - 1) * run_.block_size * model.kv_bytes_per_token(tp=run_.tp)),
            kv_budget_origin=f"published: the engine's {blocks:,} blocks, one of them its null block",
        )
    return of_rank(
        gpu_memory_utilization=run_.gpu_memory_utilization,
        max_num_seqs=run_.max_num_seqs,
        engine_version=".".join(re.findall(r"\d+", run_.vllm_version)[:2]) or ENGINE_VERSION,
    )


def _shared_prefixes(dataset_hash: str) -> dict[int, tuple[int, int]]:
    """Request -> (earlier request whose prompt it starts with, tokens), for workloads in the table."""
    text = resources.files("kvfold.analysis").joinpath(PREFIXES_CSV).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {
        int(row["request"]): (int(row["starts_with"]), int(row["tokens"]))
        for row in csv.DictReader(lines)
        if row["dataset_hash"] == dataset_hash
    }
