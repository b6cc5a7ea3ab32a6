"""`kvfold replay`: one trace through one configuration, to metrics and records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.analysis import options
from kvfold.analysis.trace_input import LogFormat, read

if TYPE_CHECKING:
    from kvfold.sim.run import Run


def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Trace file, folder or archive.")],
    model: options.Model,
    gpu: options.Gpu,
    format_name: options.Format = "bf16",
    weights: options.Weights = "bf16",
    tp: options.Tp = 1,
    kv_budget: options.KvBudget = None,
    num_gpu_blocks: options.NumGpuBlocks = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    max_context: options.MaxContext = None,
    concurrency: options.Concurrency = None,
    rate_scale: Annotated[float, typer.Option(help="Arrivals so many times as fast (waits stay).")] = 1.0,
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="Later calls of a session arrive as recorded.")
    ] = False,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    scheduler: options.Scheduler = "fcfs",
    preemption: options.Preemption = "recompute",
    max_queue: Annotated[int | None, typer.Option(help="Refuse calls behind so many waiting ones.")] = None,
    queue_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Give up on calls that wait so long; else never.")
    ] = None,
    max_preemptions: Annotated[
        int | None, typer.Option(help="Give up on calls that are preempted more often; else never.")
    ] = None,
    worst_case_admission: Annotated[
        bool, typer.Option("--worst-case-admission", help="Admit calls only if they would fit uncompressed.")
    ] = False,
    retention: options.Retention = "lru",
    no_prefix_caching: options.NoPrefixCaching = False,
    replicas: Annotated[int, typer.Option(help="Equal replicas, each with its own KV pool.")] = 1,
    router: Annotated[
        str,
        typer.Option(help="round-robin, least-outstanding, fewest-calls, prefix-affinity or session-sticky."),
    ] = "round-robin",
    slo: options.SloText = "chat",
    stepwise: Annotated[
        bool, typer.Option("--stepwise", help="One event per engine step; the same records, slower.")
    ] = False,
    trace_format: LogFormat = None,
    keep_ticks: options.KeepTicks = False,
    seed: options.Seed = 0,
    costs: options.Costs = None,
    strict_costs: options.StrictCosts = False,
    out: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="Folder for records as CSV.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Replay a trace through one engine and print its metrics.

    Latency quantiles, throughput, goodput, KV pool, sessions, energy.

    Where most arrivals share their instant, the clock was coarse: they are spread over its ticks, by --seed.
    """
    from kvfold.analysis.deployment import deploy, format_sizes
    from kvfold.analysis.metrics import metrics, per_replica
    from kvfold.analysis.out import emit_json, made, plain
    from kvfold.analysis.scarce import scarcity
    from kvfold.analysis.slo import describe, parse_slo
    from kvfold.sim.retention import parse_retention
    from kvfold.sim.scenario import Scenario, run
    from kvfold.sim.scheduler import Limits
    from kvfold.sim.sessions import Load
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
    if out is not None:
        made(out)  # cannot be: say so before a long trace is read
    objective, sizes = parse_slo(slo), format_sizes(format_name)
    source = read(trace, trace_format)
    changes = []
    if not keep_ticks and has_coarse_clock(source):
        source, change = spread_ticks(source, seed)
        changes.append(change)
    scenario = Scenario(
        trace=source,
        cost=deployment.cost(sizes),
        budget=deployment.budget(sizes),
        max_context_tokens=deployment.max_context_tokens,
        load=Load(live_sessions=concurrency, rate_scale=rate_scale, open_loop=open_loop),
        limits=Limits(
            max_num_seqs,
            max_num_batched_tokens,
            scheduler,
            preemption,
            max_queue,
            queue_timeout,
            max_preemptions,
            worst_case_admission,
        ),
        retention=parse_retention(retention),
        prefix_caching=not no_prefix_caching,
        replicas=replicas,
        router=router,
        stepwise=stepwise,
        seed=seed,
        power=deployment.power(),
    )
    result = run(scenario)
    found: dict[str, Any] = metrics(result, objective)
    found["config"] = {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "format": sizes.name,
        "weights": weights,
        "tp": tp,
        "kv_budget_bytes": scenario.budget.kv_budget_bytes,
        "kv_budget_origin": scenario.budget.kv_budget_origin,
        "max_context_tokens": deployment.max_context_tokens,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "live_sessions": concurrency,
        "rate_scale": rate_scale,
        "open_loop": open_loop,
        "scheduler": scheduler,
        "preemption": preemption,
        "max_queue": max_queue,
        "queue_timeout_s": queue_timeout,
        "max_preemptions": max_preemptions,
        "worst_case_admission": worst_case_admission,
        "retention": retention,
        "prefix_caching": not no_prefix_caching,
        "replicas": replicas,
        "router": router,
        "slo": describe(objective),
        "seed": seed,
        "cost_source": deployment.cost_source,
        "trace_sha256": source.meta.sha256,
        "trace_drops": source.meta.drops,
    }
    found["fail_reasons"] = result.fail_reasons
    found["scarce"] = plain(scarcity(result, max_num_seqs, replicas, found["makespan_s"] or 0.0))
    found["replicas"] = per_replica(result)
    found["notes"] = [*changes, *source.meta.warnings, *result.notes]
    found["attention_origin_s"] = result.attention_origin_s
    found["modelled_terms"] = deployment.modelled_terms(sizes)
    if out is not None:
        _write_records(result, out)
    if as_json:
        emit_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from kvfold.analysis.out import human_bytes, print_table, say

    config, counts, kv = found["config"], found["counts"], found["kv"]
    say(
        f"{config['model']} ({config['weights']}) on {config['tp']} x {config['gpu']}, KV {config['format']}, "
        f"pool {human_bytes(config['kv_budget_bytes'])}"
    )
    mode = "recorded arrivals" if config["open_loop"] else "sessions in closed loop"
    if config["live_sessions"] is not None:
        mode = f"{config['live_sessions']:,} live sessions"
    say(f"{mode}, rate x {config['rate_scale']:g}; SLO {config['slo']}")
    say(_costs(found))
    say(", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()))
    for fate, reasons in (
        ("dropped on reading", config["trace_drops"]),
        ("rejected", found["reject_reasons"]),
        ("failed", found["fail_reasons"]),
    ):
        for reason, count in reasons.items():
            say(f"  {fate}, {reason.replace('_', ' ')}: {count:,}")
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E latency", "queue_s": "queue"}
    columns = ("mean", "p50", "p90", "p95", "p99")
    print_table(
        "Latency of completed requests, ms",
        ("", *columns, "n"),
        [
            (
                label,
                *(_ms(found["metrics"][key][column]) for column in columns),
                f"{found['metrics'][key]['n']:,}",
            )
            for key, label in names.items()
        ],
        caption="P99 needs 100 values; below 1,000 it is uncertain",
    )
    say(
        f"output {_number(found['output_tok_s'])} tok/s, total {_number(found['total_tok_s'])} tok/s over "
        f"{_number(found['makespan_s'])} s (first arrival to last completion, no warm-up cut)"
    )
    say(f"goodput {_number(found['goodput_rps'])} requests/s, SLO met by {_percent(found['slo_attainment'])}")
    say(
        f"KV peak {human_bytes(kv['peak_bytes'])} ({_percent(kv['peak_bytes'] / kv['capacity_bytes'])} of the "
        f"pool), prefix hits {_percent(kv['prefix_hit_token_share'])} of prompt tokens, "
        f"{found['preemptions']:,} preemptions"
    )
    if kv["forced_releases"]:
        say(f"KV held for waiting sessions was given up {kv['forced_releases']:,} times for lack of room")
    say(found["scarce"]["text"])
    sessions = found["sessions"]
    if sessions["count"]:
        task = sessions["task_completion_s"]
        say(
            f"sessions {sessions['completed']:,} of {sessions['count']:,} completed, "
            f"P50 {_number(task['p50'])} s; "
            f"in all {_number(sessions['llm_s'])} s in calls, {_number(sessions['tool_wait_s'])} s in tools, "
            f"{_number(sessions['human_wait_s'])} s at people"
        )
    energy = found["energy"]
    if found["energy_j_per_output_token"] is not None:
        per_task = "" if energy["j_per_task"] is None else f", {_number(energy['j_per_task'])} J per session"
        measured = f"attention {_percent(energy['attention_share'])} with measured watts, the rest "
        say(
            f"energy {found['energy_j_per_output_token']:.3g} J per output token{per_task}; idle "
            f"{_percent(energy['idle_share'])} of it; {measured if energy['attention_share'] else ''}"
            f"{energy['origin']}"
        )
    for note in found["notes"]:
        say(f"note: {note}")


def _costs(found: dict[str, Any]) -> str:
    """How much of the decoding time rests on measured attention, and what is modelled all the same."""
    from kvfold.analysis.origins import ORIGINS
    from kvfold.analysis.words import quantity

    source, by_origin = found["config"]["cost_source"], found["attention_origin_s"]
    if not source:
        return "costs: every step time is modelled; there is no cost table for this GPU"
    total_s = sum(by_origin.values())
    shares = [
        f"{quantity(by_origin[origin] / total_s, 'share')} {origin}"
        for origin in ORIGINS
        if origin in by_origin
    ]
    decoding = f"decoding time by its attention: {', '.join(shares)}; " if shares else ""
    return f"costs: {decoding}always modelled: {', '.join(found['modelled_terms'])}; measured: {source}"


def _write_records(run: Run, folder: Path) -> None:
    """`calls.csv`, one row per offered call; written whole or not at all."""
    import csv
    from dataclasses import fields

    from kvfold.analysis.out import written_whole

    columns = {column.name: getattr(run.calls, column.name).tolist() for column in fields(run.calls)}
    with written_whole(folder / "calls.csv") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(
            ["" if value != value else value for value in row] for row in zip(*columns.values(), strict=True)
        )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"
