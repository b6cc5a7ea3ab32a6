"""Charts as SVG text: small pure functions, no script, colours from the page's style sheet.

Every chart is 400 units wide, so that its text is readable on a phone at full width and three charts fit side by
side on a desk. Series are told apart by colour and dash (classes ``s0`` … ``s7``); their legend is the page's.
Texts are escaped by Markup; details are tooltips (``title``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from kvfold.analysis.words import UNDEFINED, digits, exact, quantity, scale

WIDTH, HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 376, 12, 200
_CHAR = 6.4  # mean width of a character at the 11-unit font size
_MOST_POINTS = 600
_STYLES = 8


@dataclass(frozen=True, slots=True)
class Axis:
    """``unit`` as words.quantity knows it; a bound that is None comes from the data (linear axes start at 0)."""

    label: str
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A series; ``dots`` are (x, y, tooltip). ``step`` keeps each value until the next point."""

    style: int
    x: Sequence[float | None]
    y: Sequence[float | None]
    dots: Sequence[tuple[float, float, str]] = ()
    step: bool = False
    kind: str = ""  # further classes


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to units of the drawing, with the ticks of the axis."""

    at: Callable[[float], float]
    ticks: list[tuple[float, str]]  # (place, text)
    label: str


def lines(
    title: str,
    series: Sequence[Line],
    x: Axis,
    y: Axis,
    verticals: Sequence[tuple[float, str]] = (),
    horizontals: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Curves over two axes with reference lines; empty when there is nothing to draw.

    Points that a log axis cannot show (0 or less) are left out. More than 600 points of a series are drawn as
    the largest of each of 600 groups.
    """
    drawn = [_visible(line, x.log, y.log) for line in series]
    points = [point for line in drawn for point in line]
    points += [(a, b) for line in series for a, b, _ in line.dots]
    if not points:
        return Markup("")
    across = _scale(x, [p[0] for p in points] + [value for value, _ in verticals], _LEFT, _RIGHT)
    up = _scale(y, [p[1] for p in points] + [value for value, _ in horizontals], _BOTTOM, _TOP)
    parts = [_grid(across, up)]
    for value, text in horizontals:
        at = up.at(value)
        parts.append(_line(_LEFT, at, _RIGHT, at, "mark"))
        parts.append(_text(_RIGHT - 3, at - 4 if at > _TOP + 14 else at + 12, text, "note end"))
    for value, text in verticals:
        at = across.at(value)
        right = at > (_LEFT + _RIGHT) / 2
        parts.append(_line(at, _TOP, at, _BOTTOM, "mark"))
        parts.append(_text(at - 4 if right else at + 4, _BOTTOM - 6, text, "note end" if right else "note"))
    for line, visible in zip(series, drawn, strict=True):
        if len(visible) > 1:
            path = _path([(across.at(a), up.at(b)) for a, b in visible], line.step)
            parts.append(Markup('<path class="line s{} {}" d="{}"/>').format(_style(line), line.kind, path))
        parts += [_dot(across.at(a), up.at(b), tip, f"dot s{_style(line)}") for a, b, tip in line.dots]
    return _svg(title, HEIGHT, parts)


def waterfall(title: str, rows: Sequence[tuple[str, float, float, str, str]], unit: str) -> Markup:
    """Horizontal bars from start to end: rows of (name, start, end, kind, origin).

    A kind is total, part or rest.
    """
    if not rows:
        return Markup("")
    ends = [value for row in rows for value in row[1:3]]
    left, right, pitch = 128, 318, 24
    low, high = min(0.0, *ends), max(ends)

    def place(value: float) -> float:
        return left + (value - low) / ((high - low) or 1.0) * (right - left)

    parts: list[Markup] = []
    for index, (name, start, end, kind, origin) in enumerate(rows):
        top = 4 + index * pitch
        size = quantity(end - start if kind == "total" else start - end, unit)
        x, width = min(place(start), place(end)), max(abs(place(end) - place(start)), 1)
        parts.append(_text(left - 6, top + 13, _fit(name, left - 8), "end"))
        parts.append(_rect(x, top + 1, width, 16, f"bar {kind}", f"{name}: {size} ({origin})"))
        parts.append(_text(WIDTH - 2, top + 13, size, "end"))
        if index < len(rows) - 1:
            parts.append(_line(place(end), top + 17, place(end), top + pitch + 1, "grid"))
    return _svg(title, 8 + len(rows) * pitch, parts)


def stacked(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> Markup:
    """Horizontal stacked bars: rows of (name, [(part, value), …]); the parts' styles are ``p0``, ``p1``, …"""
    totals = [sum(value for _, value in parts) for _, parts in rows]
    if not rows or max(totals) <= 0:
        return Markup("")
    left, right, pitch = 100, 330, 30
    axis = _scale(Axis("", unit), [*totals, 0.0], left, right)
    drawn: list[Markup] = []
    for index, (name, parts) in enumerate(rows):
        top, at = 6 + index * pitch, 0.0
        drawn.append(_text(left - 6, top + 15, _fit(name, left - 8), "end"))
        for number, (part, value) in enumerate(parts):
            start, end = axis.at(at), axis.at(at + value)
            tip = f"{name}, {part}: {quantity(value, unit)}"
            drawn.append(_rect(start, top, max(end - start, 0), 20, f"bar p{number}", tip))
            at += value
        drawn.append(_text(axis.at(at) + 5, top + 15, quantity(at, unit), ""))
    return _svg(title, 10 + len(rows) * pitch, drawn)


def heatmap(
    title: str, columns: Sequence[int], rows: Sequence[int], values: Sequence[Sequence[float | None]]
) -> Markup:
    """Speed-up per cell, ``values[row][column]``: gain and loss in two colours, a line where it crosses 1."""
    if not rows or not columns:
        return Markup("")
    left, top, height = 44, 4, 26
    width = (_RIGHT - left) / len(columns)
    known = [abs(math.log(value)) for row in values for value in row if value]
    strongest = max([*known, 0.05])
    parts: list[Markup] = []
    for i, row in enumerate(values):
        y = top + i * height
        parts.append(_text(left - 6, y + 17, digits(rows[i]), "end"))
        for j, value in enumerate(row):
            x = left + j * width
            tip = f"batch {rows[i]:,}, {columns[j]:,} tokens: {quantity(value, 'ratio')}"
            kind = "gain" if value is not None and value >= 1 else "loss"
            share = abs(math.log(value)) / strongest if value else 0.0
            parts.append(_rect(x, y, width, height, kind, tip, opacity=0.05 + 0.6 * share))
            if width >= 30:
                parts.append(
                    _text(x + width / 2, y + 17, f"{value:.2f}" if value else UNDEFINED, "middle cell")
                )
    parts += _contour(values, left, top, width, height)
    bottom = top + height * len(rows)
    every = math.ceil(40 / width)
    for j in range(0, len(columns), every):
        parts.append(_text(left + (j + 0.5) * width, bottom + 14, _tokens(columns[j]), "middle"))
    parts.append(_text((left + _RIGHT) / 2, bottom + 31, "context per sequence, tokens", "middle axis"))
    parts.append(_upright((top + bottom) / 2, "batch"))
    return _svg(title, bottom + 38, parts)


def _contour(
    values: Sequence[Sequence[float | None]], left: float, top: float, width: float, height: float
) -> list[Markup]:
    """Edges between a cell that gains and one that does not."""
    gain = [[value is not None and value >= 1 for value in row] for row in values]
    edges = []
    for i, row in enumerate(gain):
        for j, one in enumerate(row):
            x, y = left + j * width, top + i * height
            if j + 1 < len(row) and row[j + 1] != one:
                edges.append(_line(x + width, y, x + width, y + height, "contour"))
            if i + 1 < len(gain) and gain[i + 1][j] != one:
                edges.append(_line(x, y + height, x + width, y + height, "contour"))
    return edges


def _visible(line: Line, x_log: bool, y_log: bool) -> list[tuple[float, float]]:
    points = [
        (a, b)
        for a, b in zip(line.x, line.y, strict=True)
        if a is not None and b is not None and (a > 0 or not x_log) and (b > 0 or not y_log)
    ]
    if len(points) <= _MOST_POINTS:
        return points
    group = math.ceil(len(points) / _MOST_POINTS)
    return [max(points[i : i + group], key=lambda point: point[1]) for i in range(0, len(points), group)]


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    low = axis.low if axis.low is not None else min(values) if axis.log else min(0.0, *values)
    high = axis.high if axis.high is not None else max(values)
    upright = end < start
    if axis.log:
        if high <= low * 1.2:
            low, high = low / 1.5, high * 1.5
        span = math.log(high / low)

        def at_log(value: float) -> float:
            return start + (end - start) * math.log(value / low) / span

        ticks = [(at_log(value), exact(value, axis.unit)) for value in _log_ticks(low, high)]
        return _Scale(at_log, _spaced(ticks, upright), axis.label)
    if high <= low:
        high = low + (abs(low) or 1.0)
    divisor, unit = scale(axis.unit, max(abs(low), abs(high)))
    marks = _linear_ticks(low / divisor, high / divisor)
    if axis.high is None:
        high = max(high, marks[-1] * divisor)
    marks = [mark for mark in marks if mark * divisor <= high * (1 + 1e-9)]

    def at(value: float) -> float:
        return start + (end - start) * (value - low) / (high - low)

    ticks = [(at(mark * divisor), f"{mark:,.6g}") for mark in marks]
    label = f"{axis.label}, {unit}" if unit and axis.label else axis.label or unit
    return _Scale(at, _spaced(ticks, upright), label)


def _linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) about a fifth of the range apart, up to just past high."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    return ticks if ticks[-1] <= high * 1.0001 or ticks[-1] - high < 0.5 * step else ticks[:-1]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 between them when the range holds fewer than three; else even steps."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) >= 3:
            return ticks
    return [tick for tick in _linear_ticks(low, high) if low <= tick <= high]


def _spaced(ticks: list[tuple[float, str]], upright: bool) -> list[tuple[float, str]]:
    """Every k-th tick, for the smallest k at which no two texts touch; none whose text leaves the drawing."""
    if not upright:
        ticks = [tick for tick in ticks if tick[0] + len(tick[1]) * _CHAR / 2 <= WIDTH]
    for every in range(1, len(ticks) + 1):
        kept = ticks[::every]
        room = 16 if upright else max(len(text) for _, text in kept) * _CHAR + 6
        if all(abs(b[0] - a[0]) >= room for a, b in pairwise(kept)):
            return kept
    return ticks


def _grid(across: _Scale, up: _Scale) -> Markup:
    parts = []
    for at, text in up.ticks:
        parts += [_line(_LEFT, at, _RIGHT, at, "grid"), _text(_LEFT - 5, at + 4, text, "end")]
    for at, text in across.ticks:
        parts += [_line(at, _TOP, at, _BOTTOM, "grid"), _text(at, _BOTTOM + 15, text, "middle")]
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 33, across.label, "middle axis"))
    parts.append(_upright((_TOP + _BOTTOM) / 2, up.label))
    return Markup("").join(parts)


def _path(points: Sequence[tuple[float, float]], step: bool) -> str:
    if not step:
        return "M" + "L".join(f"{_n(x)},{_n(y)}" for x, y in points)
    first, rest = points[0], points[1:]
    return f"M{_n(first[0])},{_n(first[1])}" + "".join(f"H{_n(x)}V{_n(y)}" for x, y in rest)


def _style(line: Line) -> int:
    return line.style % _STYLES


def _fit(text: str, width: float) -> str:
    most = int(width / _CHAR)
    return text if len(text) <= most else text[: most - 1] + "…"


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, _n(x), _n(y), text)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    line = Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>')
    return line.format(kind, _n(x1), _n(y1), _n(x2), _n(y2))


def _upright(y: float, text: str) -> Markup:
    label = Markup('<text class="middle axis" transform="translate(11 {}) rotate(-90)">{}</text>')
    return label.format(_n(y), text)


def _rect(
    x: float, y: float, width: float, height: float, kind: str, tip: str, opacity: float | None = None
) -> Markup:
    faint = "" if opacity is None else Markup(' fill-opacity="{}"').format(f"{opacity:.2f}")
    rect = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"{}><title>{}</title></rect>')
    return rect.format(kind, _n(x), _n(y), _n(width), _n(height), faint, tip)


def _dot(x: float, y: float, tip: str, kind: str) -> Markup:
    circle = Markup('<circle class="{}" cx="{}" cy="{}" r="4"><title>{}</title></circle>')
    return circle.format(kind, _n(x), _n(y), tip)


def _svg(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    svg = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>')
    return svg.format(title, WIDTH, _n(height), Markup("").join(parts))
