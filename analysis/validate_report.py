"""The checks as one self-contained HTML page: the table, and per engine run what users saw, real and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvfold.analysis.charts import Axis, Line, lines
from kvfold.analysis.out import plain
from kvfold.analysis.validate_words import by_source, row_of
from kvfold.analysis.words import clean, digits, quantity

_DATA = Path(__file__).resolve().parent / "data"
_STYLES = {"engine": 0, "simulated": 1}
_LINES = (
    ("running", "Sequences decoding", "sequences", ""),
    ("waiting", "Calls waiting", "calls", ""),
    ("kv_share", "KV pool in use", "of the pool", "share"),
)
_MARKED = (0.5, 0.9, 0.99)


def render(found: Mapping[str, Any]) -> str:
    """The page; the same bytes for the same result."""
    found = clean(plain(found))
    environment = Environment(
        loader=FileSystemLoader(_DATA),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    families = {
        family: [
            (source, [_row(check) for check in of_source])
            for source, of_source in by_source(
                [check for check in found["checks"] if check["family"] == family]
            ).items()
        ]
        for family in dict.fromkeys(check["family"] for check in found["checks"])
    }
    return environment.get_template("validate.html.j2").render(
        css=Markup((_DATA / "report.css").read_text(encoding="utf-8")),
        counts=found["counts"],
        missed=found["missed"],
        skipped=found["skipped"],
        families=families,
        fit=found.get("fit"),
        runs=[_run(each) for each in found["runs"]],
        styles=[(style, name) for name, style in _STYLES.items()],
    )


def _row(check: Mapping[str, Any]) -> dict[str, str]:
    columns = ("name", "reference", "ours", "error", "gate", "verdict", "origin")
    return dict(zip(columns, row_of(check), strict=True)) | {"note": check["note"]}


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": run["name"],
        "facts": [
            ("requests", digits(run["requests"])),
            ("preemptions, simulated", digits(run["preemptions"])),
            ("KV pool", f"{digits(run['num_blocks'])} blocks; {run['kv_pool']}"),
            ("time of decode steps outside the measured grid", quantity(run["extrapolated_share"], "share")),
        ],
        "notes": run["notes"],
        "charts": [*_curves(run["cdf"]), *_over_time(run["timeline"])],
    }


def _curves(curves: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    charts = []
    for metric, sides in curves.items():
        series = [
            Line(
                _STYLES[side],
                curve["v"],
                curve["q"],
                [
                    (v, q, f"{side}: {metric} P{q * 100:g} = {quantity(v, 's')}")
                    for q, v in zip(curve["q"], curve["v"], strict=True)
                    if q in _MARKED and v > 0
                ],
            )
            for side, curve in sides.items()
        ]
        x, y = Axis(metric, "s", log=True), Axis("share of requests", "share", high=1.0)
        charts.append((metric, lines(f"Distribution of {metric}", series, x, y)))
    return [(name, chart) for name, chart in charts if chart]


def _over_time(timeline: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    sides = {"engine": timeline["engine"], "simulated": timeline["ours"]}
    longest = max((t for side in sides.values() for t in side.get("t_s", ())), default=None)
    charts = []
    for key, name, label, unit in _LINES:
        series = [
            Line(_STYLES[side], values["t_s"], values[key], step=True, kind="thin")
            for side, values in sides.items()
            if key in values
        ]
        axis = Axis("time", "s", high=longest)
        caption = name if key in sides["engine"] else f"{name}, simulated (the engine did not log it)"
        charts.append((caption, lines(f"{name} over time", series, axis, Axis(label, unit))))
    return [(name, chart) for name, chart in charts if chart]
