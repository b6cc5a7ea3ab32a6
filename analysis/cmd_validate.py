"""`kvfold validate`: our figures against real engines, public tables, published claims and theory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvfold.analysis import options


def validate(
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="NAME", help="Families, comma-separated: engine, tables, gaac, ..."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder of recorded runs, profiles and public tables."),
    ] = None,
    vllm_result: Annotated[
        Path | None,
        typer.Option(
            "--vllm-result", metavar="FILE", help="Replay a `vllm bench serve --save-detailed` result."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            "--fit", metavar="FILE", help="Fit overhead terms on half of such a result, test the rest."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Of --vllm-result and --fit.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Of --vllm-result and --fit.")] = None,
    weights: options.Weights = "bf16",
    tp: options.Tp = 1,
    num_gpu_blocks: options.NumGpuBlocks = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    costs: options.Costs = None,
    strict_costs: options.StrictCosts = False,
    report: options.Report = None,
    as_json: options.Json = False,
) -> None:
    """How far our figures are from measured, published and exact ones.

    Checks that need nobody's data always run; --data DIR adds those for which it has files (docs/validation.md).
    Exits 3 when a gate is missed.
    """
    from kvfold.analysis.out import emit_json, note, written_whole
    from kvfold.analysis.validate_all import result
    from kvfold.analysis.validate_all import validate as run_all
    from kvfold.sim.errors import ConfigError

    file = vllm_result or fit
    if vllm_result is not None and fit is not None:
        raise ConfigError("give one of --vllm-result and --fit")
    if file is None and costs is not None:
        raise ConfigError("--costs goes with --vllm-result or --fit: the other checks name their own tables")
    if file is None:
        names = [name.strip() for name in only.split(",")] if only else []
        found = run_all(data, names, note, strict_costs)
    else:
        if model is None or gpu is None:
            raise ConfigError("--vllm-result and --fit need --model and --gpu")
        from kvfold.analysis.deployment import deploy
        from kvfold.analysis.validate_user import against, load_truth
        from kvfold.analysis.validate_user import fit as fit_terms
        from kvfold.sim.scheduler import Limits

        deployment = deploy(
            model,
            gpu,
            weights=weights,
            tp=tp,
            gpu_memory_utilization=gpu_memory_utilization,
            num_gpu_blocks=num_gpu_blocks,
            max_num_seqs=max_num_seqs,
            costs=costs,
            strict_costs=strict_costs,
        )
        truth, limits = load_truth(file), Limits(max_num_seqs, max_num_batched_tokens)
        if vllm_result is not None:
            found = result(against(truth, deployment, limits, file.name), [])
        else:
            fitted = fit_terms(truth, deployment, limits, file.name)
            found = result(fitted.checks, [])
            found["fit"] = {
                "step_s": fitted.overhead.step_s,
                "token_s": fitted.overhead.token_s,
                "sequence_s": fitted.overhead.sequence_s,
                "fitted_requests": fitted.requests,
                "tested_requests": len(truth.trace) - fitted.requests,
            }
    if report is not None:
        from kvfold.analysis.validate_report import render

        with written_whole(report) as out:
            out.write(render(found))
    if as_json:
        emit_json({key: value for key, value in found.items() if key != "runs"} | {"runs": _brief(found)})
    else:
        _print(found)
    if found["missed"]:
        raise typer.Exit(3)


def _brief(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs without what is drawn of them."""
    return [
        {key: value for key, value in run.items() if key not in ("cdf", "timeline")} for run in found["runs"]
    ]


def _print(found: dict[str, Any]) -> None:
    from kvfold.analysis.out import print_table, say
    from kvfold.analysis.validate_words import by_source, notes_of, row_of

    runs = [run["name"] for run in found["runs"]]
    for family in dict.fromkeys(check["family"] for check in found["checks"]):
        checks = [check for check in found["checks"] if check["family"] == family]
        tables: dict[str, list[tuple[str, ...]]] = {}
        for check in checks:
            run = next((name for name in runs if check["name"].startswith(f"{name} ")), None)
            name, reference, ours, error, gate, verdict, origin = row_of(check)
            others = (reference, ours, error, f"{gate}: {verdict}" if gate else "", origin)
            title = family if run is None else f"{family}: {run}"
            tables.setdefault(title, []).append((name if run is None else name[len(run) + 1 :], *others))
        for title, rows in tables.items():
            print_table(title, ("check", "reference", "ours", "error", "gate", "origin"), rows)
        for source, of_source in by_source(checks).items():
            notes = notes_of(of_source)
            said = "; ".join(notes)
            say(f"source: {source}" + (f" ({said})" if len(said) < 300 and said else ""))
            if len(said) >= 300 and family != "engine":  # a run's notes are those of its rows in the report
                for note, names in notes.items():
                    say(f"  {'; '.join(names)} \N{EN DASH} {note}")
    for run in found["runs"]:
        say(f"{run['name']}: {'; '.join(run['notes'])}; KV pool {run['kv_pool']}")
    if "fit" in found:
        fit = found["fit"]
        say(
            f"fitted on {fit['fitted_requests']:,} requests: {1e6 * fit['step_s']:,.0f} µs a step, "
            f"{1e6 * fit['token_s']:.3f} µs a token, {1e6 * fit['sequence_s']:.2f} µs a sequence; "
            f"tested on the other {fit['tested_requests']:,}"
        )
    for reason in found["skipped"]:
        say(f"skipped: {reason}")
    counts = found["counts"]
    say(
        f"{counts['checks']} checks, {counts['gated']} with a gate, {counts['missed']} missed, "
        f"{counts['skipped']} skipped"
    )
    for name in found["missed"]:
        say(f"missed: {name}")
