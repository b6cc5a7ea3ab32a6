"""The summary of a trace that every `kvfold traces` command ends with."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kvfold.traces.table import Trace


def write_trace(trace: Trace, out: Path, json: bool, more: dict[str, Any] | None = None) -> None:
    """Write ``trace`` to ``out`` and print its summary; ``more`` are keys that only the JSON object has."""
    from kvfold.analysis.out import note
    from kvfold.traces.canonical import write
    from kvfold.traces.stats import inspect

    if not out.parent.is_dir():
        raise typer.BadParameter(f"the folder {out.parent} must exist", param_hint="--out")
    try:
        write(trace, out)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    note(f"wrote {out}: {len(trace):,} calls, {out.stat().st_size:,} bytes")
    print_summary(inspect(trace) | (more or {}), json)


def print_summary(summary: dict[str, Any], json: bool) -> None:
    """The dictionary of ``traces.stats.inspect`` as one JSON object or as tables."""
    from kvfold.analysis.out import emit_json, print_table

    if json:
        emit_json(summary)
        return
    print_table("Trace", ("", "value"), _facts(summary))
    names = ("p50", "p90", "p99", "max", "mean", "n")
    quantities = ("input_tokens", "output_tokens", "calls_per_session", "tool_wait_s", "human_wait_s")
    rows = [
        (name, *(number(summary[name][key]) for key in names)) for name in quantities if summary[name]["n"]
    ]
    print_table("Per call", ("", *names), rows)
    if (held := summary["kv_occupancy"]) and held["over_service"]:
        _print_occupancy(held)
    _warn(summary["warnings"])


def _print_occupancy(held: dict[str, Any]) -> None:
    from kvfold.analysis.out import print_table, say

    limits = list(next(iter(held["over_service"].values())))
    if all(isnan(each) for ratios in held["over_service"].values() for each in ratios.values()):
        say(f"KV held in waits: not measured, {held['calls_without_service']:,} calls of unknown service")
        return
    rows = [
        (kind, *(number(each) for each in ratios.values())) for kind, ratios in held["over_service"].items()
    ]
    print_table(
        "KV held in waits, over KV held in service (token-seconds), by retention limit",
        ("", *limits),
        rows,
        f"left out: {held['calls_without_service']:,} calls of unknown service,"
        f" {held['waits_unknown']:,} unknown waits",
    )


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
        ("span_s", number(summary["span_s"])),
        ("rate_per_s", number(summary["rate_per_s"])),
        ("interarrival_cv", number(summary["interarrival_cv"])),
        ("dispersion_1_s", number(summary["dispersion_1_s"])),
        ("dispersion_60_s", number(summary["dispersion_60_s"])),
        ("peak_over_mean_60_s", number(summary["peak_over_mean_60_s"])),
        ("sessions", f"{summary['sessions']:,}"),
        (
            "block_size_tokens",
            f"{block:,}, last partial block {summary['partial_last']}" if block else "no hashes",
        ),
        ("block ids", scope.get(summary["hash_scope"], "none")),
        (
            "prefix_hit_token_share",
            number(summary["prefix_hit_token_share"]) + (" (unlimited cache)" if block else ""),
        ),
        ("bytes_per_row", number(summary["bytes_per_row"])),
    ]
    return facts


def number(value: float | int) -> str:
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
