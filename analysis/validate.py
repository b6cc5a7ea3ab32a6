"""Checks of what we compute against somebody else's measurement or against theory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_ROUNDING = 1e-12  # a value exactly at its limit passes
#: Every family of checks, in the order in which they run and print.
FAMILIES = ("engine", "tables", "gaac", "fp8", "splitwise", "memory", "queueing", "codec")


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of ours beside a reference.

    `error` = value / reference - 1 for numbers; `gate` is the largest |error| that passes, None: printed only.
    Where `reference` and `value` are texts, `passed` says whether the stated relation holds.
    """

    family: str
    name: str
    source: str
    reference: float | str
    value: float | str | None
    error: float | None
    gate: float | None
    passed: bool | None
    unit: str = ""
    origin: str = "modelled"
    note: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Family:
    """The checks of one family. `skipped` says why some or all of it did not run; `figures` go into the report."""

    checks: tuple[Check, ...] = ()
    skipped: tuple[str, ...] = ()
    figures: tuple[dict[str, Any], ...] = field(default=())


def compared(
    family: str,
    name: str,
    source: str,
    reference: float,
    value: float | None,
    gate: float | None = None,
    *,
    unit: str = "",
    origin: str = "modelled",
    note: str = "",
) -> Check:
    """A number beside the published or measured one; a missing value fails a gate."""
    error = None if value is None else value / reference - 1
    passed = None if gate is None else error is not None and abs(error) <= gate + _ROUNDING
    return Check(family, name, source, reference, value, error, gate, passed, unit, origin, note)


def holds(
    family: str, name: str, source: str, reference: str, value: str, passed: bool, note: str = ""
) -> Check:
    """A relation (a sign, an order) that must hold."""
    return Check(family, name, source, reference, value, None, 0.0, passed, "", "modelled", note)
