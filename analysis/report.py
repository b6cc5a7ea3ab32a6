"""The plan as one self-contained HTML page: no script, no network, the same bytes for the same plan.

Numbers become text here, the template only arranges them; every text of the plan is escaped by Jinja2 or Markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvfold.analysis import figures
from kvfold.analysis.words import UNDEFINED, clean, digits, effect, interval, pair, percent, quantity

_DATA = Path(__file__).resolve().parent / "data"
#: Longer lists end in "… and so many more".
_MOST_ITEMS = 40
_STUDIES = {
    "recorded_load": "Recorded load",
    "fixed_concurrency": "Fixed concurrency",
    "fixed_budget": "Fixed KV budget",
}
ORIGINS = {
    "measured": "timed or counted on the hardware or data named",
    "interpolated": "between measured points",
    "extrapolated": "outside the measured points",
    "modelled": "computed from datasheet figures or byte counts",
    "published": "taken from somebody's published figures",
    "given": "set by the person who asked",
}


def render(plan: Mapping[str, Any]) -> str:
    """The report as HTML text. Sections whose key is missing, empty or None in ``plan`` are left out."""
    plan = clean(plan)
    environment = Environment(
        loader=FileSystemLoader(_DATA),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"quantity": quantity, "percent": percent, "interval": interval, "words": words}
    config = plan.get("config") or {}
    studies = {name: _study(plan.get(name), config) for name in _STUDIES}
    return environment.get_template("report.html.j2").render(
        css=Markup((_DATA / "report.css").read_text(encoding="utf-8")),
        title=f"KV capacity plan: {words(config.get('model'))} on {words(config.get('gpu'))}",
        config=config,
        verdict=plan.get("verdict"),
        tiles=_tiles(plan),
        unhelpful=_unhelpful(plan),
        rejected=_rejected(plan.get("rejected")),
        studies=studies,
        trace=_trace(plan.get("trace")),
        memory=_memory(plan.get("memory"), config),
        step=_step(plan.get("step")),
        amdahl=figures.amdahl(plan.get("step"), config),
        heatmaps=figures.heatmaps(plan.get("heatmap")),
        break_even=_break_even(plan.get("break_even")),
        curves=[(_STUDIES[name], charts) for name, charts in figures.curves(plan.get("curves"), config)],
        load_curve=figures.load_curve(plan, config),
        timeline=figures.timeline(plan.get("timeline"), config),
        sessions=plan.get("sessions"),
        session_rows=_session_rows(plan.get("sessions") or {}),
        session_bars=figures.session_bars(plan.get("sessions")),
        energy=plan.get("energy"),
        legend=figures.legend(config),
        session_parts=figures.SESSION_PARTS,
        origins=_origins(plan),
        notes=_some(plan.get("notes")),
        limits=_some(plan.get("limits")),
        ci_method=plan.get("ci_method"),
    )


def words(value: Any) -> str:
    """Any value of a configuration as text: lists joined, numbers with separators, none as UNDEFINED."""
    if value is None or value == "":
        return UNDEFINED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return digits(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {words(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(words(item) for item in value) or "none"
    return str(value)


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


def _tiles(plan: Mapping[str, Any]) -> list[dict[str, str]]:
    """The figures of the first screen: name, value, what it says, and good, bad or plain."""
    verdict, config = plan.get("verdict"), plan.get("config") or {}
    if not verdict:
        return []
    recorded = bool((plan.get("recorded_load") or {}).get("rows"))
    concurrency = (plan.get("fixed_concurrency") or {}).get("concurrency")
    place = "the recorded load" if recorded else f"{words(concurrency)} live sessions"
    met = verdict["slo_met"]
    tiles = [
        _tile("SLO", "met" if met else "missed", f"{_slo(config)}, at {place}", "good" if met else "bad")
    ]
    budget, equal = _rows_of(plan, "fixed_budget"), _rows_of(plan, "fixed_concurrency")
    highest = next((row for row in budget if row["metric"].startswith("highest load")), None)
    text = percent(verdict.get("capacity_change"))
    tiles.append(_tile("Highest load, same KV budget", text, _detail(highest, config), _tone(highest)))
    output = next((row for row in equal if row["metric"].startswith("output tokens")), None)
    text = percent(output["change"] if output else None)
    tiles.append(_tile("Output tokens, same users", text, _detail(output, config), _tone(output)))
    step = plan.get("step") or {"formats": []}
    shares = [line["attention_share"] for line in step["formats"] if line["format"] == verdict["format"]]
    share = f"attention was {quantity(shares[0], 'share')} of it; modelled" if shares else ""
    tiles.append(
        _tile("One decode step, speed-up", quantity(verdict.get("step_speedup"), "ratio"), share, "")
    )
    limit = verdict.get("binding_at_highest_load")
    tiles.append(
        _tile("What limits you", verdict["binding"], f"at the highest load: {limit}" if limit else "", "")
    )
    return tiles


def _tile(name: str, value: str, detail: str, tone: str) -> dict[str, str]:
    return {"name": name, "value": value, "detail": detail, "tone": tone}


def _tone(row: Mapping[str, Any] | None) -> str:
    return {"better": "good", "worse": "bad"}.get(effect(row) if row else "", "")


def _detail(row: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str:
    if row is None:
        return "not in this plan"
    before, after, unit = pair(row["baseline"], row["value"], row["unit"])
    parts = [f"{config.get('baseline') or 'baseline'} {before}, {row['format']} {after} {unit}"]
    if row.get("ci95"):
        parts.append(f"95 % CI {interval(row['ci95'])} %")
    return "; ".join([*parts, row["origin"]])


def _slo(config: Mapping[str, Any]) -> str:
    return words(config.get("slo_text") or config.get("slo"))


def _rows_of(plan: Mapping[str, Any], study: str) -> list[Mapping[str, Any]]:
    """Rows of the format that the verdict speaks of."""
    wanted = (plan.get("verdict") or {}).get("format")
    return [row for row in (plan.get(study) or {}).get("rows", []) if row["format"] == wanted]


def _unhelpful(plan: Mapping[str, Any]) -> list[str]:
    """Where the verdict's format does not help, from the rows and the break-even."""
    lines = []
    for effects, said in ((("worse",), "worse"), (("unclear", "no change"), "no clear change")):
        for study in ("fixed_concurrency", "fixed_budget"):
            found = [row["metric"] for row in _rows_of(plan, study) if effect(row) in effects]
            if found:
                lines.append(f"{_STUDIES[study]}, {said}: {'; '.join(found)}.")
    wanted = (plan.get("verdict") or {}).get("format")
    starts = [line for line in plan.get("break_even") or [] if line["format"] == wanted]
    never = [digits(line["batch"]) for line in starts if line["context_tokens"] is None]
    late = [
        f"{digits(line['context_tokens'])} at batch {digits(line['batch'])}"
        for line in starts
        if line["context_tokens"]
    ]
    if never:
        lines.append(f"A decode step gains at no context shown with batch {', '.join(never)}.")
    if late:
        lines.append(f"A decode step gains only from so many tokens of context on: {', '.join(late)}.")
    return lines


def _rejected(rejected: Mapping[str, Any] | None) -> str:
    if not rejected or not rejected["count"]:
        return ""
    counts = rejected["reasons"].items()
    reasons = ", ".join(f"{name.replace('_', ' ')} {digits(count)}" for name, count in counts)
    share = quantity(rejected["share"], "share")
    return f"{digits(rejected['count'])} requests ({share}) were rejected: {reasons}."


def _trace(trace: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Scalars as facts; distributions as one table."""
    if not trace:
        return None
    spreads = {name: value for name, value in trace.items() if isinstance(value, dict) and "p50" in value}
    columns = list(dict.fromkeys(key for spread in spreads.values() for key in spread))
    facts = [_named(name, trace[name]) for name in trace if name not in spreads and name != "warnings"]
    table = {
        name.removesuffix("_s").replace("_", " "): [_named(name, spread.get(key))[1] for key in columns]
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
    """A value with the unit that its name ends in: ``span_s`` 3600.0 is (``span``, ``3,600 s``)."""
    text = words(value)
    if isinstance(value, int | float):
        unit = next(
            (
                unit
                for end, unit in (("_per_s", "1/s"), ("_share", "share"), ("_s", "s"))
                if name.endswith(end)
            ),
            "",
        )
        text = quantity(value, unit)
    return name.removesuffix("_per_s").removesuffix("_s").replace("_", " "), text


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
        tokens = line["context_tokens"]
        table.setdefault(line["format"], {})[line["batch"]] = "never" if tokens is None else digits(tokens)
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


def _origins(plan: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Each origin that the plan's numbers carry, how often, and what it means."""
    counts = Counter(_walk_origins(plan))
    order = {name: place for place, name in enumerate(ORIGINS)}
    return [
        (name, counts[name], ORIGINS.get(name, "as the row says"))
        for name in sorted(counts, key=lambda name: (order.get(name, len(order)), name))
    ]


def _walk_origins(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("origin"), str):
            yield value["origin"]
        for item in value.values():
            yield from _walk_origins(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk_origins(item)


def _some(lines: Sequence[str] | None) -> list[str]:
    lines = [words(line) for line in lines or []]
    rest = len(lines) - _MOST_ITEMS
    return lines if rest <= 0 else [*lines[:_MOST_ITEMS], f"… and {rest:,} more in the JSON output"]
