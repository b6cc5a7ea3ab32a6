"""What the first screen of the report says: the figures that decide, and where the format does not help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfold.analysis.origins import walk
from kvfold.analysis.steptable import break_even_text
from kvfold.analysis.words import digits, effect, interval, pair, percent, quantity, text

STUDIES = {
    "recorded_load": "Recorded load",
    "fixed_concurrency": "Fixed concurrency",
    "fixed_budget": "Fixed KV budget",
}
_TONES = {"better": "good", "worse": "bad"}


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure; its tone is good, bad, or empty where neither can be said."""

    name: str
    value: str
    detail: str
    tone: str = ""


def tiles(plan: Mapping[str, Any]) -> list[Tile]:
    """SLO, capacity, throughput, step and what binds; none without a verdict."""
    verdict, config = plan.get("verdict"), plan.get("config") or {}
    if not verdict:
        return []
    capacity = verdict.get("capacity_change")
    unit = (plan.get("fixed_budget") or {}).get("load_unit")
    served = [
        row for row in _rows_of(plan, "fixed_budget") if row["unit"] == unit and "load" in row["metric"]
    ]
    output = [row for row in _rows_of(plan, "fixed_concurrency") if row["metric"].startswith("output tokens")]
    steps = [
        line for line in (plan.get("step") or {}).get("formats", []) if line["format"] == verdict["format"]
    ]
    limit = verdict.get("binding_at_highest_load")
    return [
        _slo_tile(plan, verdict, config),
        _row_tile("Highest load, same KV budget", capacity, served, config),
        _row_tile("Output tokens, same users", output[0]["change"] if output else None, output, config),
        Tile(
            "One decode step, speed-up", quantity(verdict.get("step_speedup"), "ratio"), _step_detail(steps)
        ),
        Tile("What limits you", verdict["binding"], f"at the highest load: {limit}" if limit else ""),
    ]


def _slo_tile(plan: Mapping[str, Any], verdict: Mapping[str, Any], config: Mapping[str, Any]) -> Tile:
    recorded = bool((plan.get("recorded_load") or {}).get("rows"))
    concurrency = (plan.get("fixed_concurrency") or {}).get("concurrency")
    place = "the recorded load" if recorded else f"{text(concurrency)} live sessions"
    limits = f"{text(config.get('slo_text') or config.get('slo'))}, at {place}"
    return Tile("SLO", "met", limits, "good") if verdict["slo_met"] else Tile("SLO", "missed", limits, "bad")


def _row_tile(
    name: str, change: float | None, rows: list[Mapping[str, Any]], config: Mapping[str, Any]
) -> Tile:
    if not rows:
        return Tile(name, percent(change), "not in this plan")
    return Tile(name, percent(change), _detail(rows[0], config), _TONES.get(effect(rows[0]), ""))


def _step_detail(steps: list[Mapping[str, Any]]) -> str:
    if not steps:
        return "not in this plan"
    share = quantity(steps[0]["attention_share"], "share")
    return f"attention was {share} of it; {', '.join(sorted(set(walk(steps))))}"


def _detail(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    before, after, unit = pair(row["baseline"], row["value"], row["unit"])
    parts = [f"{config.get('baseline') or 'baseline'} {before}, {row['format']} {after} {unit}"]
    if row.get("ci95"):
        parts.append(f"95 % CI {interval(row['ci95'])} %")
    return "; ".join([*parts, row["origin"]])


def unhelpful(plan: Mapping[str, Any]) -> list[str]:
    """Where the verdict's format does not help, from the rows and the break-even."""
    lines = []
    for effects, said in ((("worse",), "worse"), (("unclear", "no change"), "no clear change")):
        for study in ("fixed_concurrency", "fixed_budget"):
            found = [row["metric"] for row in _rows_of(plan, study) if effect(row) in effects]
            if found:
                lines.append(f"{STUDIES[study]}, {said}: {'; '.join(found)}.")
    wanted = (plan.get("verdict") or {}).get("format")
    starts = [line for line in plan.get("break_even") or [] if line["format"] == wanted]
    if starts:
        lines.append(f"A decode step is shorter {break_even_text(starts)}.")
    return lines


def rejected(rejected: Mapping[str, Any] | None) -> str:
    """How many requests were rejected, and why; empty when none was."""
    if not rejected or not rejected["count"]:
        return ""
    counts = rejected["reasons"].items()
    reasons = ", ".join(f"{name.replace('_', ' ')} {digits(count)}" for name, count in counts)
    share = quantity(rejected["share"], "share")
    return f"{digits(rejected['count'])} requests ({share}) were rejected: {reasons}."


def _rows_of(plan: Mapping[str, Any], study: str) -> list[Mapping[str, Any]]:
    """Rows of the format that the verdict speaks of."""
    wanted = (plan.get("verdict") or {}).get("format")
    return [row for row in (plan.get(study) or {}).get("rows", []) if row["format"] == wanted]
