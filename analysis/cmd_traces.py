"""`kvfold traces`: look into a request trace, or make one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvfold.traces.table import Trace

app = typer.Typer(help="Look into a request trace, or make one.", no_args_is_help=True, rich_markup_mode=None)
synth_app = typer.Typer(help="Make a synthetic trace.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(synth_app, name="synth")

_Json = Annotated[bool, typer.Option("--json", help="Print one strict JSON object.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same bytes.")]
_Out = Annotated[Path, typer.Option("--out", help="File to write: .jsonl, .csv or .parquet.", dir_okay=False)]


@app.command("inspect")
def inspect_(
    file: Annotated[Path, typer.Argument(help="A trace file, a folder of them, or a .tar, .gz or .xz.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="azure, mooncake, weka or canonical; found from the content if left out."
        ),
    ] = None,
    json: _Json = False,
) -> None:
    """Say what a trace holds: unit, block size, what was dropped and assumed, and its statistics."""
    from kvfold.traces.load import load
    from kvfold.traces.sniff import FORMATS

    if format not in (None, *FORMATS):
        raise typer.BadParameter(f"must be one of {', '.join(FORMATS)}, got {format}", param_hint="--format")
    _print(load(file, format), json)


@synth_app.command("poisson")
def poisson(
    out: _Out,
    requests: Annotated[int, typer.Option("--requests", min=1)] = 10_000,
    rate: Annotated[float, typer.Option("--rate", help="Requests per second.")] = 8.0,
    input_tokens: Annotated[
        int, typer.Option("--input-tokens", min=1, help="Prompt tokens of each.")
    ] = 1_000,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", min=1, help="Output tokens of each.")
    ] = 200,
    seed: _Seed = 42,
    json: _Json = False,
) -> None:
    """Single-shot requests of one size with exponential gaps between arrivals."""
    from kvfold.traces.synth import poisson as make

    if not 0 < rate < float("inf"):
        raise typer.BadParameter(
            f"must be a positive number of requests per second, got {rate}", param_hint="--rate"
        )
    _write(make(requests, rate, input_tokens, output_tokens, seed), out, json)


@synth_app.command("sample")
def sample(out: _Out, seed: _Seed = 42, json: _Json = False) -> None:
    """Chat and agent sessions with tool and human waits and shared prompts, like the bundled sample."""
    from kvfold.traces.synth import sample as make

    _write(make(seed), out, json)


def _write(trace: Trace, out: Path, json: bool) -> None:
    from kvfold.analysis.out import note
    from kvfold.traces.canonical import write

    if not out.parent.is_dir():
        raise typer.BadParameter(f"the folder {out.parent} must exist", param_hint="--out")
    try:
        write(trace, out)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    note(f"wrote {out}: {len(trace):,} calls, {out.stat().st_size:,} bytes")
    _print(trace, json)


def _print(trace: Trace, json: bool) -> None:
    from kvfold.analysis.out import emit_json, print_table
    from kvfold.traces.stats import inspect

    summary = inspect(trace)
    if json:
        emit_json(summary)
        return
    print_table("Trace", ("", "value"), _facts(summary))
    names = ("p50", "p90", "p99", "max", "mean", "n")
    quantities = ("input_tokens", "output_tokens", "calls_per_session", "tool_wait_s", "human_wait_s")
    rows = [
        (name, *(_number(summary[name][key]) for key in names)) for name in quantities if summary[name]["n"]
    ]
    print_table("Per call", ("", *names), rows)
    _warn(summary["warnings"])


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    drops = ", ".join(f"{count:,} {reason}" for reason, count in summary["drops"].items())
    clock = {"common": "one for all sessions", "session": "each session has its own"}[summary["clock"]]
    zone = f", {summary['time_zone']}" if summary["time_zone"] else ""
    block = summary["block_size_tokens"]
    scope = {"global": "equal over the whole trace", "session": "equal inside a session only"}
    facts = [
        ("format", summary["format"]),
        ("sha256", summary["sha256"][:16] or "not read from a file"),
        ("rows read", f"{summary['rows_read']:,}"),
        ("rows kept", f"{summary['rows_kept']:,}"),
        ("rows dropped", drops or "none"),
        ("unit of time in the source", summary["time_unit"] + zone),
        ("clock", clock),
        ("prompt tokens", {"whole": "the whole prompt of each call"}[summary["prompt_semantics"]]),
        ("span_s", _number(summary["span_s"])),
        ("rate_per_s", _number(summary["rate_per_s"])),
        ("interarrival_cv", _number(summary["interarrival_cv"])),
        ("sessions", f"{summary['sessions']:,}"),
        (
            "block_size_tokens",
            f"{block:,}, last partial block {summary['partial_last']}" if block else "no hashes",
        ),
        ("block ids", scope.get(summary["hash_scope"], "none")),
        (
            "prefix_hit_token_share",
            _number(summary["prefix_hit_token_share"]) + (" (unlimited cache)" if block else ""),
        ),
        ("bytes_per_row", _number(summary["bytes_per_row"])),
    ]
    return facts


def _number(value: float | int) -> str:
    """Four significant digits or all of an integer; a dash where the figure is undefined."""
    if value != value:
        return "-"
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    )


def _warn(warnings: list[str]) -> None:
    import textwrap

    for warning in warnings:
        print(textwrap.fill(warning, 80, initial_indent="! ", subsequent_indent="  "))
