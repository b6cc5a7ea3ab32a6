"""The plan as one self-contained HTML page: no script, no network, the same bytes for the same plan.

Numbers become text here, the template only arranges them; every text of the plan is escaped by Jinja2 or Markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvfold.analysis import figures, headline, origins
from kvfold.analysis.headline import STUDIES
from kvfold.analysis.out import plain
from kvfold.analysis.words import UNDEFINED, clean, digits, effect, interval, pair, percent, quantity, text

_DATA = Path(__file__).resolve().parent / "data"
#: Units by the ends of names, the first that fits.
_UNITS = {"_per_s": "1/s", "_share": "share", "_s": "s"}
#: Longer lists end in "… and so many more".
_MOST_ITEMS = 40


def render(plan: Mapping[str, Any]) -> str:
    """The report as HTML text. Sections whose key is missing, empty or None in ``plan`` are left out."""
    plan = clean(plain(plan))
    environment = Environment(
        loader=FileSystemLoader(_DATA),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"quantity": quantity, "percent": percent, "interval": interval, "words": text}
    config = plan.get("config") or {}
    studies = {name: _study(plan.get(name), config) for name in STUDIES}
    return environment.get_template("report.html.j2").render(
        css=Markup((_DATA / "report.css").read_text(encoding="utf-8")),
        title=f"KV capacity plan: {text(config.get('model'))} on {text(config.get('gpu'))}",
        config=config,
        verdict=plan.get("verdict"),
        tiles=headline.tiles(plan),
        unhelpful=headline.unhelpful(plan),
        rejected=headline.rejected(plan.get("rejected")),
        studies=studies,
        trace=_trace(plan.get("trace")),
        memory=_memory(plan.get("memory"), config),
        step=_step(plan.get("step")),
        amdahl=figures.amdahl(plan.get("step"), config),
        heatmaps=figures.heatmaps(plan.get("heatmap")),
        break_even=_break_even(plan.get("break_even")),
        curves=[(STUDIES[name], charts) for name, charts in figures.curves(plan.get("curves"), config)],
        load_curve=figures.load_curve(plan, config),
        timeline=figures.timeline(plan.get("timeline"), config),
        sessions=plan.get("sessions"),
        session_rows=_session_rows(plan.get("sessions") or {}),
        session_bars=figures.session_bars(plan.get("sessions")),
        energy=plan.get("energy"),
        energy_note=plan.get("energy_note"),
        legend=figures.legend(config),
        session_parts=figures.SESSION_PARTS,
        origins=origins.counted(plan),
        replay_origins=sorted({name for study in STUDIES for name in origins.walk(plan.get(study))}),
        notes=_some(plan.get("notes")),
        limits=_some(plan.get("limits")),
        ci_method=plan.get("ci_method"),
    )


def _study(study: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rows of one comparison as text, one table per format."""
    if not study:
        return None
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in study["rows"]:
        baseline, value, unit = pair(row["baseline"], row["value"], row["unit"])
        tables.setdefault(row["format"], []).append(
            {
                "metric": row["metric"],
                "unit": unit,
                "baseline": baseline,
                "value": value,
                "change": percent(row["change"]),
                "ci95": interval(row.get("ci95")),
                "effect": effect(row),
                "n": digits(row["n"]),
                "origin": row["origin"],
            }
        )
    return {"study": study, "tables": tables, "baseline": config.get("baseline") or "baseline"}


def _trace(trace: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Scalars as facts; distributions as one table."""
    if not trace:
        return None
    spreads = {name: value for name, value in trace.items() if isinstance(value, dict) and "p50" in value}
    columns = list(dict.fromkeys(key for spread in spreads.values() for key in spread))
    facts = [_named(name, trace[name]) for name in trace if name not in spreads and name != "warnings"]
    table = {
        name.removesuffix("_s").replace("_", " "): [
            text(spread.get(key)) if key == "n" else _named(name, spread.get(key))[1] for key in columns
        ]
        for name, spread in spreads.items()
    }
    return {
        "facts": facts,
        "columns": columns,
        "table": table,
        "sha256": trace.get("sha256"),
        "warnings": _some(trace.get("warnings")),
    }


def _named(name: str, value: Any) -> tuple[str, str]:
    """A value with the unit that its name ends in: ``span_s`` 3600.0 is (``span``, ``3,600 s``).

    After a number ``_s`` belongs to it: ``dispersion_60_s`` is a ratio over windows of 60 s.
    """
    if window := re.fullmatch(r"(.+)_(\d+)_s", name):
        return f"{window[1].replace('_', ' ')} over {window[2]} s", text(value)
    written = text(value)
    if isinstance(value, int | float):
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        written = quantity(value, unit)
    return name.removesuffix("_per_s").removesuffix("_s").replace("_", " "), written


def _memory(memory: Mapping[str, Any] | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Sizes with the tokens that fit, and the waterfalls."""
    if not memory:
        return None
    formats = [line | {"tokens": line["num_blocks"] * line["unit_tokens"]} for line in memory["formats"]]
    base = next((line["tokens"] for line in formats if line["format"] == config.get("baseline")), 0)
    for line in formats:
        line["more"] = line["tokens"] / base - 1 if base else None
    waterfalls, charts = figures.waterfalls(formats), figures.memory(formats)
    return {"memory": memory, "formats": formats, "waterfalls": waterfalls, "charts": charts}


def _step(step: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not step:
        return None
    tables = []
    for line in step["formats"]:
        rows = [
            row
            | {
                "baseline_us": digits(row["baseline_s"] * 1e6),
                "us": digits(row["s"] * 1e6),
                "difference_us": _signed((row["s"] - row["baseline_s"]) * 1e6),
                "light": quantity(row["speed_of_light_s"] / row["s"], "share")
                if _has_light(row)
                else UNDEFINED,
                "share": row["s"] / line["step_s"] if line["step_s"] else 0.0,
            }
            for row in line["rows"]
        ]
        total = {
            "baseline_us": digits(line["baseline_step_s"] * 1e6),
            "us": digits(line["step_s"] * 1e6),
            "difference_us": _signed((line["step_s"] - line["baseline_step_s"]) * 1e6),
        }
        tables.append({"line": line, "rows": rows, "total": total})
    return {"batch": step["batch"], "context_tokens": step["context_tokens"], "tables": tables}


def _has_light(row: Mapping[str, Any]) -> bool:
    return bool(row.get("speed_of_light_s") and row["s"])


def _signed(value: float) -> str:
    return "0" if value == 0 else f"+{digits(value)}" if value > 0 else digits(value)


def _break_even(lines: Sequence[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """One row per format, one column per batch."""
    if not lines:
        return None
    batches = sorted({line["batch"] for line in lines})
    table: dict[str, dict[int, str]] = {}
    for line in lines:
        stretches = ", ".join(f"{digits(first)} to {digits(last)}" for first, last in line["stretches"])
        table.setdefault(line["format"], {})[line["batch"]] = stretches or (
            "never" if line["tried_tokens"] else UNDEFINED
        )
    rows = {name: [cells.get(batch, UNDEFINED) for batch in batches] for name, cells in table.items()}
    return {"batches": batches, "rows": rows, "origins": sorted({line["origin"] for line in lines})}


def _session_rows(sessions: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """One row per figure, one cell per format."""
    rows = [
        ("completed", [f"{digits(one['completed'])} of {digits(one['count'])}" for one in sessions.values()])
    ]
    for key in ("p50", "p95", "p99"):
        cells = [quantity(one["task_completion_s"][key], "s") for one in sessions.values()]
        rows.append((f"task completion, {key.upper()}", cells))
    for name, key in (
        ("in the model, total", "llm_s"),
        ("of it in the queue", "queue_s"),
        ("of it prefill", "prefill_s"),
        ("of it decode", "decode_s"),
        ("tools, total", "tool_wait_s"),
        ("people, total", "human_wait_s"),
        ("other waits, total", "other_wait_s"),
    ):
        rows.append((name, [quantity(one[key], "s") for one in sessions.values()]))
    return rows


def _some(lines: Sequence[str] | None) -> list[str]:
    lines = [text(line) for line in lines or []]
    rest = len(lines) - _MOST_ITEMS
    return lines if rest <= 0 else [*lines[:_MOST_ITEMS], f"… and {rest:,} more in the JSON output"]
