"""How numbers and texts are written for people, the same in the terminal and in the report."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

#: What stands for a number that is not defined.
UNDEFINED = "\N{EN DASH}"
#: Per unit: (from this size on, divide by, write); the first that fits is taken. Other units are kept.
_SCALES: dict[str, tuple[tuple[float, float, str], ...]] = {
    "s": ((7200, 3600, "h"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "µs")),
    "bytes": (
        (2**40, 2**40, "TiB"),
        (2**30, 2**30, "GiB"),
        (2**20, 2**20, "MiB"),
        (2**10, 2**10, "KiB"),
        (0, 1, "B"),
    ),
    "J": ((1e6, 1e6, "MJ"), (1e3, 1e3, "kJ"), (0, 1, "J")),
    "share": ((0, 0.01, "%"),),
    "ratio": ((0, 1, "x"),),
    "requests/s": ((0, 1, "req/s"),),
    "live sessions": ((0, 1, "sessions"),),
    "% of tokens": ((0, 1, "%"),),
}
_MORE_IS_BETTER = re.compile(r"tokens$|goodput|rate|load|fit|prefix hits|attainment", re.IGNORECASE)
_LESS_IS_BETTER = re.compile(r"TTFT|TPOT|ITL|latency|completion|queue|preemptions|energy", re.IGNORECASE)
#: Controls, invisible format characters (which can reorder a line) and half surrogates.
_UNPRINTABLE = {"Cc", "Cf", "Cs"}


def scale(unit: str, size: float) -> tuple[float, str]:
    """(divisor, unit to write) for numbers of about this size: 5e-4 s are (1e-6, "µs")."""
    for least, divisor, name in _SCALES.get(unit, ()):
        if abs(size) >= least:
            return divisor, name
    return 1.0, unit


def digits(value: float) -> str:
    """Three significant digits, thousands separated: 1,234; 12.3; 1.23; 0.0123; whole numbers as they are."""
    size = abs(value)
    if isinstance(value, int) or size >= 99.95 or value == 0:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:#.3g}"


def quantity(value: float | None, unit: str) -> str:
    """A number with its unit in a readable size: ``412 ms``, ``19.2 GiB``, ``1.08x``; UNDEFINED if it has none."""
    if value is None or not math.isfinite(value):
        return UNDEFINED
    divisor, name = scale(unit, value or 1.0)
    number = value if divisor == 1 else value / divisor
    text = _share(number) if unit == "share" else f"{number:.2f}" if unit == "ratio" else digits(number)
    return _with_unit(text, name)


def exact(value: float, unit: str) -> str:
    """A round number as it was given, for ticks and limits: ``10 s``, ``100 ms``, ``2x``."""
    divisor, name = scale(unit, value or 1.0)
    return _with_unit(f"{value / divisor:,.6g}", name)


def pair(baseline: float | None, value: float | None, unit: str) -> tuple[str, str, str]:
    """Two numbers without unit, and the unit they share, that of the larger one."""
    known = [abs(each) for each in (baseline, value) if each is not None and math.isfinite(each)]
    divisor, name = scale(unit, max(known, default=0.0) or 1.0)
    first, second = (
        UNDEFINED
        if each is None or not math.isfinite(each)
        else digits(each if divisor == 1 else each / divisor)
        for each in (baseline, value)
    )
    return first, second, name


def percent(change: float | None) -> str:
    """A change with its sign: ``+4.1 %``; UNDEFINED if it has none."""
    return UNDEFINED if change is None or not math.isfinite(change) else f"{_points(change)} %"


def interval(bounds: Sequence[float] | None) -> str:
    """A confidence interval of a change, in percent: ``[-12.1, -9.0]``; empty where there is none."""
    return "" if bounds is None else f"[{_points(bounds[0])}, {_points(bounds[1])}]"


def effect(row: Mapping[str, Any]) -> str:
    """``better``, ``worse``, ``unclear`` or ``no change``, for a comparison row; empty where none can be said.

    A change is clear when its interval lies on one side of 0; without an interval it is neither clear nor not.
    """
    bounds = row.get("ci95")
    if row.get("change") == 0 and (bounds is None or bounds[0] == bounds[1] == 0):
        return "no change"
    if bounds is None:
        return ""
    if bounds[0] <= 0 <= bounds[1]:
        return "unclear"
    rises = bounds[0] > 0
    if _LESS_IS_BETTER.search(str(row["metric"])):
        return "worse" if rises else "better"
    if _MORE_IS_BETTER.search(str(row["metric"])):
        return "better" if rises else "worse"
    return ""


def text(value: Any) -> str:
    """Any value of a configuration as text: lists joined, numbers with separators, none as UNDEFINED."""
    if value is None or value == "":
        return UNDEFINED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return digits(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(text(item) for item in value) or "none"
    return str(value)


def clean(value: Any) -> Any:
    """The same value with every unprintable character in its texts shown as �.

    So no text can move a cursor, reorder a line or break the encoding. Line breaks and tabs become blanks.
    """
    if isinstance(value, str):
        return "".join(_printable(character) for character in value)
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _printable(character: str) -> str:
    if character in "\n\t":
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in _UNPRINTABLE else character


def _with_unit(number: str, name: str) -> str:
    return number + name if name == "x" else f"{number} {name}".rstrip()


def _share(points: float) -> str:
    """Percent to one decimal; what rounds to nothing is said to be more than nothing."""
    if points in (0, 100):
        return f"{points:.0f}"
    return "<0.1" if 0 < points < 0.05 else f"{points:.1f}"


def _points(change: float) -> str:
    points = change * 100
    if abs(points) < 0.05:
        return "0.0"
    return f"{points:+,.0f}" if abs(points) >= 999.5 else f"{points:+.1f}"
