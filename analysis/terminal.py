"""What `kvfold plan` prints for people: at most 80 columns wide unless the terminal is wider, verdict last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfold.analysis.out import plain
from kvfold.analysis.steptable import break_even_text, merged_origins, origins_text
from kvfold.analysis.words import UNDEFINED, clean, digits, effect, interval, pair, percent, quantity

_TITLES = {
    "fixed_concurrency": "Fixed concurrency",
    "fixed_budget": "Fixed KV budget",
    "recorded_load": "Recorded load",
}
_STYLES = {"better": "green", "worse": "red"}
#: Long origins, short enough for the last column of 80.
_SHORT = {"interpolated": "interpol.", "extrapolated": "extrapol."}


def print_plan(plan: Mapping[str, Any]) -> None:
    """Print a plan on stdout; parts whose key is missing, empty or None are left out.

    Colour only on a terminal, and not where NO_COLOR is set. The verdict's text is the last line, unbroken.
    """
    plan = clean(plain(plan))
    console = Console(highlight=False)
    with console.capture() as capture:
        _print_all(console, plan)
    # rich fills folded lines and titles up with blanks
    print("\n".join(line.rstrip() for line in capture.get().removesuffix("\n").split("\n")))


def _print_all(console: Console, plan: Mapping[str, Any]) -> None:
    for line in (_trace(plan.get("trace")), _memory(plan.get("memory"), plan.get("fixed_budget"))):
        if line:
            console.print(Text(line))
    if plan.get("step"):
        console.print()
        console.print(_step_table(plan["step"]))
    for line in _break_even(plan.get("break_even")):
        console.print(Text(line))
    baseline = str((plan.get("config") or {}).get("baseline") or "baseline")
    for key, title in _TITLES.items():
        if plan.get(key):
            _print_study(console, f"{title}{_setting(key, plan[key])}", plan[key], baseline)
    console.print()
    if plan.get("ci_method"):
        console.print(Text(f"Intervals: {plan['ci_method']}.", style="dim"))
    energy = [plan["energy_note"]] if plan.get("energy_note") else []
    for note in [*(plan.get("notes") or []), *(plan.get("limits") or []), *energy]:
        console.print(Text(f"Note: {note}", style="dim"))
    if plan.get("verdict"):
        console.print()
        console.print(Text(plan["verdict"]["text"], style="bold"), soft_wrap=True)


def _trace(trace: Mapping[str, Any] | None) -> str:
    if not trace:
        return ""
    parts = [f"Trace: {trace.get('source') or trace.get('format')}, {digits(trace['rows_kept'])} calls"]
    if trace.get("sessions"):
        parts.append(f"{digits(trace['sessions'])} sessions")
    if trace.get("span_s"):
        parts.append(f"over {quantity(trace['span_s'], 's')}")
    for key, name in (("input_tokens", "prompt"), ("output_tokens", "output")):
        spread = trace.get(key) or {}
        if spread.get("p50") is not None:
            parts.append(f"{name} P50 {digits(spread['p50'])}, P99 {digits(spread['p99'])} tokens")
    dropped = sum((trace.get("drops") or {}).values())
    if dropped:
        parts.append(f"{digits(dropped)} rows dropped")
    return "; ".join(parts)


def _memory(memory: Mapping[str, Any] | None, budget: Mapping[str, Any] | None) -> str:
    if not memory:
        return ""
    parts = []
    if budget:
        parts.append(
            f"KV budget {quantity(budget['kv_budget_bytes'], 'bytes')} ({budget['kv_budget_origin']})"
        )
    parts.append(f"{quantity(memory['kv_bytes_per_token'], 'bytes')} of KV per token in BF16")
    for line in memory["formats"]:
        tokens = digits(line["num_blocks"] * line["unit_tokens"])
        parts.append(f"{line['format']} holds {tokens} tokens ({line['origin']} sizes)")
    return "Memory: " + "; ".join(parts)


def _step_table(step: Mapping[str, Any]) -> Table:
    sequences = f"{digits(step['batch'])} sequence{'s' if step['batch'] > 1 else ''}"
    title = f"One decode step of {sequences}, {digits(step['context_tokens'])} tokens each"
    columns = ("format", "baseline", "step", "speed-up", "attention", "its speed-up", "origin")
    rows = [
        [
            line["format"],
            quantity(line["baseline_step_s"], "s"),
            quantity(line["step_s"], "s"),
            quantity(line["speedup"], "ratio"),
            quantity(line["attention_share"], "share"),
            quantity(line["attention_speedup"], "ratio"),
            "+".join(sorted({_SHORT.get(row["origin"], row["origin"]) for row in line["rows"]})),
        ]
        for line in step["formats"]
    ]
    return _table(title, columns, [[Text(cell) for cell in row] for row in rows])


def _break_even(lines: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """One line per format: the context from which a step is shorter, at each batch where there is one."""
    result = []
    for name in dict.fromkeys(line["format"] for line in lines or []):
        mine = [line for line in lines or [] if line["format"] == name]
        origins = origins_text(merged_origins(mine))
        result.append(f"A step with {name} is shorter {break_even_text(mine)} ({origins})")
    return result


def _setting(key: str, study: Mapping[str, Any]) -> str:
    if key == "fixed_concurrency":
        return f" (N = {digits(study['concurrency'])}; {study['concurrency_origin']})"
    if key == "fixed_budget":
        return f" ({quantity(study['kv_budget_bytes'], 'bytes')}; each at its highest load within the SLO)"
    return ""


def _print_study(console: Console, title: str, study: Mapping[str, Any], baseline: str) -> None:
    if study.get("note"):
        console.print()
        console.print(Text(f"{title}: {study['note']}"))
    tables: dict[str, list[list[Text]]] = {}
    for row in study["rows"]:
        before, after, unit = pair(row["baseline"], row["value"], row["unit"])
        tables.setdefault(row["format"], []).append(
            [
                Text(f"{row['metric']} ({unit})" if unit else row["metric"]),
                Text(before),
                Text(after),
                Text(percent(row["change"]), style=_STYLES.get(effect(row), "")),
                Text(interval(row.get("ci95")) or UNDEFINED),
                Text(digits(row["n"])),
                Text(_SHORT.get(row["origin"], row["origin"])),
            ]
        )
    for format_name, rows in tables.items():
        columns = ("metric", baseline, format_name, "change", "95 % CI", "n", "origin")
        console.print()
        console.print(_table(title, columns, rows))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """The first column folds, so that the others keep their numbers whole; narrower than out.print_table's."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        show_edge=False,
    )
    for index, column in enumerate(columns):
        if index == 0:
            table.add_column(Text(column), justify="left", overflow="fold", min_width=12)
        else:
            table.add_column(Text(column), justify="right", no_wrap=True, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
