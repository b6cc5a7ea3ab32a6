"""How a check is written, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfold.analysis.words import UNDEFINED, percent, quantity

#: Units that words.quantity knows under another name.
_UNITS = {"x": "ratio"}


def row_of(check: Mapping[str, Any]) -> tuple[str, ...]:
    """(check, reference, ours, error, gate, pass or miss, origin)."""
    gate, passed = check["gate"], check["passed"]
    limit = "" if gate is None else "holds" if check["error"] is None else f"{100 * gate:g} %"
    verdict = "" if passed is None else "pass" if passed else "MISS"
    error = percent(check["error"]) if check["error"] is not None else ""
    return (
        check["name"],
        written(check["reference"], check["unit"]),
        written(check["value"], check["unit"]),
        error,
        limit,
        verdict,
        check["origin"],
    )


def written(value: float | str | None, unit: str) -> str:
    if value is None:
        return UNDEFINED
    if isinstance(value, str):
        return value
    if unit == "us":
        return quantity(value * 1e-6, "s")
    return quantity(value, _UNITS.get(unit, unit))
