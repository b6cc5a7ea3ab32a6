"""`kvfold plan`: model, GPU, trace and SLO to a verdict, both comparisons and an HTML report."""

from __future__ import annotations

from typing import Annotated

import typer

from kvfold.analysis import options
from kvfold.analysis.trace_input import LogFormat, read


def plan(
    model: options.Model,
    gpu: options.Gpu,
    trace: Annotated[str, typer.Option("--trace", help="Trace file, folder or archive.")],
    slo: options.SloText = "chat",
    formats: Annotated[str, typer.Option("--formats", help="KV formats, comma-separated.")] = "bf16,gaac",
    baseline: Annotated[str, typer.Option("--baseline", help="Format to compare with.")] = "bf16",
    weights: options.Weights = "bf16",
    tp: options.Tp = 1,
    kv_budget: options.KvBudget = None,
    num_gpu_blocks: options.NumGpuBlocks = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    max_context: options.MaxContext = None,
    concurrency: options.Concurrency = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    retention: options.Retention = "lru",
    no_prefix_caching: options.NoPrefixCaching = False,
    trace_format: LogFormat = None,
    keep_ticks: options.KeepTicks = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="Searches for the highest load, each with other sessions meeting.")
    ] = 1,
    seed: options.Seed = 0,
    costs: options.Costs = None,
    strict_costs: options.StrictCosts = False,
    report: options.Report = None,
    as_json: options.Json = False,
) -> None:
    """Capacity plan: a KV format at equal users and at equal memory.

    Exits 3 when no listed format meets the SLO at the recorded load.
    """
    from kvfold.analysis.deployment import deploy, format_sizes
    from kvfold.analysis.out import emit_json, note, written_whole
    from kvfold.analysis.plan import make_plan
    from kvfold.analysis.report import render
    from kvfold.analysis.slo import parse_slo
    from kvfold.analysis.study import Question
    from kvfold.analysis.terminal import print_plan
    from kvfold.sim.retention import parse_retention
    from kvfold.sim.scheduler import Limits
    from kvfold.traces.stats import inspect
    from kvfold.traces.transform import has_coarse_clock, spread_ticks

    deployment = deploy(
        model,
        gpu,
        weights=weights,
        tp=tp,
        max_context_tokens=max_context,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_budget_bytes=kv_budget,
        num_gpu_blocks=num_gpu_blocks,
        max_num_seqs=max_num_seqs,
        costs=costs,
        strict_costs=strict_costs,
    )
    names = list(dict.fromkeys([baseline, *(name.strip() for name in formats.split(","))]))
    sizes = tuple(format_sizes(name) for name in names)
    for each in sizes:
        deployment.budget(each)  # does not fit: say so before a long trace is read
    objective = parse_slo(slo)
    source = read(trace, trace_format)
    changes = []
    if not keep_ticks and has_coarse_clock(source):
        source, change = spread_ticks(source, seed)
        changes.append(change)
    question = Question(
        deployment=deployment,
        trace=source,
        slo=objective,
        formats=sizes,
        limits=Limits(max_num_seqs, max_num_batched_tokens),
        concurrency=concurrency,
        retention=parse_retention(retention),
        prefix_caching=not no_prefix_caching,
        seed=seed,
        seeds=seeds,
    )
    config = {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "weights": weights,
        "tp": tp,
        "slo": objective.name,
        "seed": seed,
        "seeds": seeds,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_context_tokens": deployment.max_context_tokens,
        "retention": retention,
        "cost_source": deployment.cost_source,
        "trace": trace,
        "version": _version(),
        "command": _command(),
    }
    found = make_plan(question, inspect(source), config, note)
    found["notes"] = [*changes, *found["notes"]]
    if report is not None:
        with written_whole(report) as file:
            file.write(render(found))
    if as_json:
        emit_json(found)
    else:
        print_plan(found)
    if not found["verdict"]["slo_met"]:
        raise typer.Exit(3)


def _version() -> str:
    from importlib.metadata import version

    return version("kvfold")


def _command() -> str:
    import shlex
    import sys

    return shlex.join(["kvfold", *sys.argv[1:]])
