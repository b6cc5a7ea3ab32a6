"""`kvfold step`: the time table of one decode step, and what a KV format changes in it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvfold.analysis import options


def step(
    model: options.Model,
    gpu: options.Gpu,
    format_name: options.Format = "gaac",
    baseline: Annotated[str, typer.Option("--baseline", help="KV format to compare with.")] = "bf16",
    batch: Annotated[int, typer.Option("--batch", help="Sequences that decode together, from 1 up.")] = 1,
    context: options.Context = None,
    weights: options.Weights = "bf16",
    tp: options.Tp = 1,
    kv_budget: options.KvBudget = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    num_gpu_blocks: options.NumGpuBlocks = None,
    max_context: options.MaxContext = None,
    costs: options.Costs = None,
    strict_costs: options.StrictCosts = False,
    as_json: options.Json = False,
) -> None:
    """Time table of one decode step.

    Each term with its speed of light and origin; Amdahl; break-even.

    With --kv-budget (or --num-gpu-blocks) also the step with as many sequences as the same bytes hold.
    """
    from kvfold.analysis.deployment import deploy, format_sizes
    from kvfold.analysis.out import emit_json
    from kvfold.analysis.steptable import break_even, compare, fixed_budget
    from kvfold.sim.errors import ConfigError

    if batch < 1:
        raise ConfigError(f"--batch must be at least 1, got {batch}")
    deployment = deploy(
        model,
        gpu,
        weights=weights,
        tp=tp,
        max_context_tokens=max_context,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_budget_bytes=kv_budget,
        num_gpu_blocks=num_gpu_blocks,
        costs=costs,
        strict_costs=strict_costs,
    )
    tokens = context or deployment.model.native_context_tokens
    if tokens > deployment.max_context_tokens:
        raise ConfigError(
            f"--context must be at most {deployment.max_context_tokens} for {deployment.model.name}, "
            f"got {tokens}; --max-context overrides"
        )
    sizes, base = format_sizes(format_name), format_sizes(baseline)
    cost, base_cost = deployment.cost(sizes), deployment.cost(base)
    found = compare(cost, base_cost, batch, tokens)
    found |= {"model": deployment.model.name, "gpu": deployment.gpu.name, "weights": weights, "tp": tp}
    found["cost_source"] = deployment.cost_source
    table = deployment.costs
    if table and any(row["name"] == "linear layers" and row["origin"] != "modelled" for row in found["rows"]):
        found["linear_kernels"] = list(table.linear_kernels.get(weights, ()))
    found["break_even"] = break_even(cost, base_cost, deployment.max_context_tokens)
    found["decode_int_ops_per_element"] = sizes.decode_int_ops_per_element
    found["gpu_int_ops_per_bf16_element"] = deployment.gpu.int_ops_per_bf16_element
    if kv_budget is not None or num_gpu_blocks is not None:
        found["fixed_budget"] = fixed_budget(deployment, [base, sizes], tokens)
    if as_json:
        emit_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from kvfold.analysis.out import print_table, say

    where = f"{found['model']} ({found['weights']}) on {found['tp']} x {found['gpu']}"
    base, name = found["baseline"], found["format"]
    sequences = f"{found['batch']:,} sequence" + ("s" if found["batch"] > 1 else "")
    print_table(
        f"One decode step: {where}, {sequences} of {found['context_tokens']:,} tokens, times in us",
        ("term", base, name, "change", "light", "origin"),
        [
            (
                row["name"],
                _us(row["baseline_s"]),
                _us(row["s"]),
                _signed_us(row["s"] - row["baseline_s"]),
                f"{100 * row['speed_of_light_s'] / row['s']:.0f} %" if row["s"] else "",
                row["origin"],
            )
            for row in found["rows"]
        ]
        + [
            (
                "step",
                _us(found["baseline_step_s"]),
                _us(found["step_s"]),
                _signed_us(found["step_s"] - found["baseline_step_s"]),
                "",
                "",
            )
        ],
    )
    if found["cost_source"]:
        say(f"measured: {found['cost_source']}")
    say("light: time at full datasheet bandwidth or FLOP/s, as a share of ours")
    if found.get("linear_kernels") and found["weights"] != "bf16":  # BF16 is the library's, in engines too
        say(
            f"linear layers: times in {found['weights']} are those of the fastest of these kernels at each "
            f"point: {'; '.join(found['linear_kernels'])} (kvfold: this project's Triton kernels); an engine's "
            "own, such as vLLM's Marlin, is another kernel and takes another time"
        )
    say(
        f"Amdahl: attention is {100 * found['attention_share']:.1f} % of the step and runs "
        f"{found['attention_speedup']:.3f}x as fast, so the step "
        f"{found['amdahl_speedup']:.3f}x; all terms {found['speedup']:.3f}x"
    )
    budget_ops = found["gpu_int_ops_per_bf16_element"]
    if found["decode_int_ops_per_element"] and budget_ops:
        say(
            f"decode work: {name} takes about {found['decode_int_ops_per_element']:g} integer operations an "
            f"element; this GPU has {budget_ops:.0f} in the time of reading one BF16 element (estimates)"
        )
    _print_break_even(found)
    if "fixed_budget" in found:
        _print_fixed_budget(found)


def _print_break_even(found: dict[str, Any]) -> None:
    from kvfold.analysis.out import say
    from kvfold.analysis.steptable import break_even_text, merged_origins, origins_text

    if found["format"] != found["baseline"]:
        lines = found["break_even"]
        say(
            f"break-even: a step with {found['format']} is shorter {break_even_text(lines)} "
            f"({origins_text(merged_origins(lines))})"
        )


def _print_fixed_budget(found: dict[str, Any]) -> None:
    from kvfold.analysis.out import human_bytes, print_table, say
    from kvfold.analysis.steptable import origins_text

    rows = found["fixed_budget"]
    origin = origins_text({row["format"]: [row["origin"]] for row in rows if row["sequences"]})
    budget = human_bytes(rows[0]["kv_budget_bytes"])
    print_table(
        f"Fixed KV budget: {budget}, contexts of {found['context_tokens']:,} tokens",
        ("format", "seqs", "tokens left", "tok/s", "each", "published tok/s", "ours"),
        [_fixed_row(row) for row in rows],
        caption=f"tokens left: output by which each sequence can still grow; tok/s {origin}",
    )
    before, after = rows[0], rows[-1]
    if before["sequences"] and after["sequences"] and len(rows) > 1:
        gain = after["output_tok_s"] / before["output_tok_s"] - 1
        bytes_gain = after["bytes_only_output_tok_s"] / before["bytes_only_output_tok_s"] - 1
        say(f"gain: {100 * gain:+.0f} % {origin}; {100 * bytes_gain:+.0f} % from bytes and bandwidth alone")
        if before["published"] and after["published"]:
            published = after["published"]["tok_s"] / before["published"]["tok_s"] - 1
            say(f"      {100 * published:+.0f} % published ({after['published']['source']})")
            say(
                "not in the model: how much decode work hides behind reading at this batch, work of "
                "blocks that stayed raw, and launches of a real engine; decode work is an estimate"
            )


def _fixed_row(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["sequences"]:
        return (row["format"], "0", "", "", "", "", "")
    published = row["published"]
    figure = difference = ""
    if published:
        figure = f"{published['tok_s']:.1f} with {published['sequences']}"
        difference = f"{100 * (row['output_tok_s'] / published['tok_s'] - 1):+.1f} %"
    return (
        row["format"],
        f"{row['sequences']:,}",
        f"{row['output_tokens_left']:,}",
        f"{row['output_tok_s']:.1f}",
        f"{row['output_tok_s_per_sequence']:.1f}",
        figure,
        difference,
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.{_decimals(seconds)}f}"


def _signed_us(seconds: float) -> str:
    return f"{seconds * 1e6:+,.{_decimals(seconds)}f}" if seconds else ""


def _decimals(seconds: float) -> int:
    return 1 if abs(seconds) < 1e-3 else 0
