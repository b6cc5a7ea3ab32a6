"""How a check is written, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvfold.analysis.words import UNDEFINED, percent, quantity

#: Units that words.quantity knows under another name.
_UNITS = {"x": "ratio"}


def row_of(check: Mapping[str, Any]) -> tuple[str, ...]:
    """(check, reference, ours, error, gate, pass or miss, origin)."""
    gate, passed = check["gate"], check["passed"]
    limit = "" if gate is None else "holds" if check["error"] is None else f"{100 * gate:g} %"
    verdict = "" if passed is None else "pass" if passed else "MISS"
    return (
        check["name"],
        written(check["reference"], check["unit"]),
        written(check["value"], check["unit"]),
        _error(check),
        limit,
        verdict,
        check["origin"],
    )


def by_source(checks: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The checks of each source, both in the order in which they come."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        found.setdefault(check["source"], []).append(check)
    return found


def notes_of(checks: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The names of the checks to which each note applies."""
    found: dict[str, list[str]] = {}
    for check in checks:
        if check["note"]:
            found.setdefault(check["note"], []).append(check["name"])
    return found


def _error(check: Mapping[str, Any]) -> str:
    """In percent of the reference; a share that has no gate differs by percentage points."""
    if check["error"] is None:
        return ""
    if check["unit"] == "share" and check["gate"] is None:
        return f"{100 * (check['value'] - check['reference']):+.1f} pp"
    return percent(check["error"])


def written(value: float | str | None, unit: str) -> str:
    if value is None:
        return UNDEFINED
    if isinstance(value, str):
        return value
    if unit == "us":
        return quantity(value * 1e-6, "s")
    return quantity(value, _UNITS.get(unit, unit))
