"""Which chart shows which part of a plan: from the plan's objects to the drawings of kvfold.analysis.charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kvfold.analysis.charts import Axis, Line, heatmap, lines, stacked, waterfall
from kvfold.analysis.slo import Slo, parse_slo
from kvfold.analysis.words import digits, exact, quantity
from kvfold.sim.errors import ConfigError

Plan = Mapping[str, Any]
Figures = list[tuple[str, Markup]]

#: (key, name) of the parts of a session's time that are drawn; waits for people would dwarf them all.
SESSION_PARTS = (
    ("queue_s", "queue"),
    ("prefill_s", "prefill"),
    ("decode_s", "decode"),
    ("tool_wait_s", "tool wait"),
)
_LATENCIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"))
_MARKED = (0.5, 0.95, 0.99)


def legend(config: Plan) -> list[tuple[int, str]]:
    """(style, name) of each format, the baseline first."""
    baseline = config.get("baseline")
    names = list(dict.fromkeys([*([baseline] if baseline else []), *(config.get("formats") or [])]))
    return list(enumerate(names))


def waterfalls(formats: Sequence[Plan]) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """(formats, [(part, bytes, origin), ...]): formats whose memory is split alike share one waterfall."""
    alike: dict[tuple[tuple[str, float, str], ...], list[str]] = {}
    for line in formats:
        parts = tuple((row["name"], row["bytes"], row["origin"]) for row in line["waterfall"])
        alike.setdefault(parts, []).append(line["format"])
    return [(", ".join(names), list(parts)) for parts, names in alike.items()]


def memory(formats: Sequence[Plan]) -> Figures:
    """Waterfalls, one for all formats whose memory is split alike, and the tokens that each format's pool holds.

    The first row is the whole, each further row takes its bytes from what is left.
    """
    charts = []
    for names, parts in waterfalls(formats):
        rows, left = [], 0.0
        for index, (name, size, origin) in enumerate(parts):
            start, end = (0.0, float(size)) if index == 0 else (left, left - size)
            kind = "total" if index == 0 else "rest" if name.startswith("KV") else "part"
            rows.append((name, start, end, kind, origin))
            left = end
        title = f"Device memory: {names}"
        charts.append((title, waterfall(title, rows, "bytes")))
    held = [(line["format"], [("tokens", line["num_blocks"] * line["unit_tokens"])]) for line in formats]
    charts.append(("Tokens that the KV pool holds", stacked("Tokens that the KV pool holds", held, "")))
    return [(name, chart) for name, chart in charts if chart]


def amdahl(step: Plan | None, config: Plan) -> Markup:
    """Step speed-up over attention speed-up, one curve per share of attention, a dot per format."""
    if not step or not step["formats"]:
        return Markup("")
    styles = _styles(config)
    reach = max(5.0, *(2 * line["attention_speedup"] for line in step["formats"]))
    xs = [0.5 * (reach / 0.5) ** (i / 80) for i in range(81)]
    series, limits = [], []
    for share in dict.fromkeys(round(line["attention_share"], 3) for line in step["formats"]):
        series.append(Line(0, xs, [1 / (1 - share + share / x) for x in xs], kind="plain"))
        if share < 1:
            limits.append((1 / (1 - share), f"limit {1 / (1 - share):.2f}x at {share:.0%} attention"))
    for line in step["formats"]:
        at, predicted = line["attention_speedup"], line["amdahl_speedup"]
        tip = f"{line['format']}: attention {at:.2f}x, step {predicted:.2f}x by Amdahl's law"
        series.append(Line(styles.get(line["format"], 1), [], [], [(at, predicted, tip)]))
    highest = max(y for line in series for y in line.y if y is not None)
    shown = [limit for limit in limits if limit[0] <= 2 * highest][:2]
    x = Axis("attention speed-up", "ratio", log=True)
    y = Axis("step speed-up", "ratio")
    return lines("Step speed-up over attention speed-up", series, x, y, horizontals=shown)


def heatmaps(maps: Sequence[Plan] | None) -> Figures:
    """Speed-up of a decode step over batch and context, one map per format."""
    return [
        (name, heatmap(f"Step speed-up of {name}", one["contexts"], one["batches"], one["speedup"]))
        for one in maps or []
        for name in [one["format"]]
    ]


def curves(studies: Plan | None, config: Plan) -> list[tuple[str, Figures]]:
    """Distributions of the latencies, three charts per study; a line marks the SLO's limit."""
    result = []
    for study in ("recorded_load", "fixed_concurrency", "fixed_budget"):
        formats = (studies or {}).get(study)
        charts = [(name, _cdf(name, key, formats, config)) for key, name in _LATENCIES] if formats else []
        charts = [(name, chart) for name, chart in charts if chart]
        if charts:
            result.append((study, charts))
    return result


def load_curve(plan: Plan, config: Plan) -> Figures:
    """Attainment, goodput and TTFT over the offered load, a dot per replay; dashed where the SLO asks 99 %."""
    points: Sequence[Plan] = plan.get("load_curve") or []
    unit = (plan.get("fixed_budget") or {}).get("load_unit") or "load"
    x = Axis(f"offered load, {unit}")
    charts: Figures = [
        (
            "Requests that meet the SLO",
            lines(
                "Share of requests that meet the SLO, over load",
                _over_load(points, config, unit, "share", lambda point: point["attainment"]),
                x,
                Axis("meet the SLO", "share", high=1.0),
                horizontals=[(0.99, "99 %")],
            ),
        )
    ]
    goodput = _over_load(points, config, unit, "requests/s", lambda point: point.get("goodput_rps"))
    charts.append(("Goodput", lines("Goodput over load", goodput, x, Axis("goodput, requests/s"))))
    tails = _over_load(points, config, unit, "s", lambda point: point.get("ttft_p99_s"))
    limit_s = _slo(config).ttft_s
    chart = lines(
        "P99 of TTFT over load",
        tails,
        x,
        Axis("TTFT P99", "s", log=True),
        horizontals=[(limit_s, f"SLO {exact(limit_s, 's')}")] if limit_s else [],
    )
    charts.append(("TTFT, P99", chart))
    return [(name, chart) for name, chart in charts if chart]


def timeline(formats: Plan | None, config: Plan) -> Figures:
    """Decoding sequences, waiting calls and KV bytes over time."""
    if not formats:
        return []
    styles = _styles(config)
    time = Axis("time", "s", high=max((t for one in formats.values() for t in one["t_s"]), default=None))
    charts: Figures = []
    for key, name, axis, unit in (
        ("running", "Sequences decoding", "sequences", ""),
        ("waiting", "Calls waiting", "calls", ""),
        ("used_bytes", "KV held by live sequences", "KV", "bytes"),
    ):
        series = [
            Line(styles.get(format_name, 1), one["t_s"], one[key], step=True, kind="thin")
            for format_name, one in formats.items()
        ]
        chart = lines(f"{name} over time", series, time, Axis(axis, unit))
        charts.append((name, chart))
    return [(name, chart) for name, chart in charts if chart]


def session_bars(sessions: Plan | None) -> Markup:
    """Where the sessions' time went, one stacked bar per format; a part's style is its place in SESSION_PARTS."""
    if not sessions:
        return Markup("")
    rows = [(name, [(part, one[key]) for key, part in SESSION_PARTS]) for name, one in sessions.items()]
    return stacked("Where the time of the sessions went", rows, "s")


def _cdf(name: str, key: str, formats: Plan, config: Plan) -> Markup:
    styles = _styles(config)
    series = []
    for format_name, latencies in formats.items():
        curve = latencies.get(key) or {"q": [], "v": []}
        dots = [
            (v, q, f"{format_name}: {name} P{q * 100:g} = {quantity(v, 's')}")
            for q, v in zip(curve["q"], curve["v"], strict=True)
            if q in _MARKED and v > 0
        ]
        series.append(Line(styles.get(format_name, 1), curve["v"], curve["q"], dots))
    limit_s = {"ttft_s": _slo(config).ttft_s, "tpot_s": _slo(config).tpot_s}.get(key)
    marks = [(limit_s, f"SLO {exact(limit_s, 's')}")] if limit_s else []
    y = Axis("share of gaps" if key == "itl_s" else "share of requests", "share", high=1.0)
    return lines(f"Distribution of {name}", series, Axis(name, "s", log=True), y, verticals=marks)


def _over_load(points: Sequence[Plan], config: Plan, load_unit: str, unit: str, value: Any) -> list[Line]:
    styles = _styles(config)
    result = []
    for format_name in dict.fromkeys(point["format"] for point in points):
        mine = sorted((p for p in points if p["format"] == format_name), key=lambda point: point["load"])
        known = [(p["load"], value(p)) for p in mine if value(p) is not None]
        dots = [(x, y, f"{format_name}: {quantity(y, unit)} at {digits(x)} {load_unit}") for x, y in known]
        xs, ys = [x for x, _ in known], [y for _, y in known]
        result.append(Line(styles.get(format_name, 1), xs, ys, dots))
    return result


def _styles(config: Plan) -> dict[str, int]:
    return {name: style for style, name in legend(config)}


def _slo(config: Plan) -> Slo:
    """The limits to mark; none when the configuration does not name them in a form that is known."""
    try:
        return parse_slo(str(config.get("slo")))
    except ConfigError:
        return Slo("unknown", None, None, None)
