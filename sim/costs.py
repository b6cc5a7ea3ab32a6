"""Measured kernel times of one device, from a cost table: CSV, one row per measured point.

Decode attention is linear in the total KV tokens of a batch, so between measured points it is interpolated
linearly in them, never in logarithms; between measured batches linearly in the batch. Prefill attention follows
query-key pairs, at a rate that depends on the tokens of the chunk. Outside the grid the nearest line goes on, and
says `extrapolated`. Only `median_us` of burst rows is used.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from statistics import linear_regression, median

from kvfold.sim.errors import ConfigError
from kvfold.sim.run import FS_PER_S

_FS_PER_US = FS_PER_S // 10**6
_BURST = ("", "0", "false", "False")  # column `sustained` of rows that were not run back to back


@dataclass(frozen=True, slots=True)
class Segment:
    """Attention of one decode step: base_fs + token_fs * kv_tokens, up to `until_tokens` (None: for ever)."""

    base_fs: int
    token_fs: int
    until_tokens: int | None
    origin: str


@dataclass(frozen=True, slots=True)
class Line:
    """Part of a piecewise linear function: value = base + slope * x, below `end` (None: last part)."""

    base: float
    slope: float
    end: int | None


def line_at(xs: Sequence[int], ys: Sequence[float], x: int) -> Line:
    """The line between the neighbours of x; beyond the ends the nearest one, through 0 rather than below it."""
    if len(xs) == 1:
        return Line(0.0, ys[0] / xs[0], None)
    index = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    slope = (ys[index + 1] - ys[index]) / (xs[index + 1] - xs[index])
    base = ys[index] - slope * xs[index]
    if index == 0 and base < 0 and x < xs[0]:
        return Line(0.0, ys[0] / xs[0], xs[0])
    last = index == len(xs) - 2
    return Line(base, slope, None if last else xs[index + 1])


@dataclass(frozen=True, slots=True)
class AttendTable:
    """Decode attention of one layer in one format, for one head shape."""

    q_heads: int
    kv_heads: int
    head_dim: int
    batches: tuple[int, ...]
    contexts: tuple[tuple[int, ...], ...]  # [batches][points], ascending, tokens of one sequence
    times_us: tuple[tuple[float, ...], ...]
    kernel: str

    def segments(self, batch: int, layers: float, same_shape: bool) -> tuple[list[int], list[Segment]]:
        """(first KV tokens of each segment, the segments) of `layers` layers like this one for a batch.

        Between two measured batches the times at equal contexts are blended. `layers` is a fraction where another
        head shape is scaled by its bytes, which is an extrapolation.
        """
        high = min(bisect_left(self.batches, batch), len(self.batches) - 1)
        low = high if batch >= self.batches[high] else max(0, high - 1)
        weight = 0.0
        if high != low:
            weight = (batch - self.batches[low]) / (self.batches[high] - self.batches[low])
        shares = [(low, 1 - weight), (high, weight)] if weight else [(low, 1.0)]
        known = [self.contexts[row] for row, _ in shares]
        longest = min(each[-1] for each in known)
        # The last point that is measured belongs to the part before it, and so is no extrapolation.
        starts = [batch * context + (context == longest) for context in sorted({0}.union(*known))]
        first, last = batch * max(each[0] for each in known), batch * longest
        in_batches = self.batches[0] <= batch <= self.batches[-1]
        segments = []
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            base = slope = 0.0
            for row, share in shares:
                line = line_at(self.contexts[row], self.times_us[row], start // batch)
                base += share * line.base
                slope += share * line.slope / batch
            if not in_batches:
                # the memory limit of the nearest batch goes on with the tokens
                slope *= batch / self.batches[low]
            inside = in_batches and same_shape and first <= start and end is not None and end <= last + 1
            segments.append(
                Segment(
                    base_fs=round(base * layers * _FS_PER_US),
                    token_fs=round(slope * layers * _FS_PER_US),
                    until_tokens=None if end is None else end - 1,
                    origin="interpolated" if inside else "extrapolated",
                )
            )
        return starts, segments


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Matrix products [tokens, in] x [in, out] with one weight format."""

    tokens: tuple[int, ...]
    weight_bytes: tuple[tuple[int, ...], ...]  # [tokens][shapes], ascending
    times_us: tuple[tuple[float, ...], ...]

    def time_us(self, tokens: int, weight_bytes: float) -> tuple[float, str]:
        """Time of one product whose weights take so many bytes, linear in tokens and in bytes; and its origin."""
        high = min(bisect_right(self.tokens, tokens), len(self.tokens) - 1)
        low = max(0, high - 1) if tokens < self.tokens[high] else high
        values = []
        for row in (low, high):
            line = line_at(self.weight_bytes[row], self.times_us[row], int(weight_bytes))
            values.append(line.base + line.slope * weight_bytes)
        inside = self.tokens[0] <= tokens <= self.tokens[-1]
        if not inside:  # beyond the largest batch products are bound by operations, so time follows tokens
            return values[-1] * tokens / self.tokens[high] if tokens > self.tokens[-1] else values[
                0
            ], "extrapolated"
        if high == low:
            return values[0], "interpolated"
        weight = (tokens - self.tokens[low]) / (self.tokens[high] - self.tokens[low])
        return (1 - weight) * values[0] + weight * values[1], "interpolated"


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Prefill attention of one layer: femtoseconds per query-key pair of all its heads, by tokens of the chunk.

    `causal`: pairs within the chunk, tokens (tokens + 1) / 2, with the launch; `dense`: pairs with its history,
    tokens x history, which come on top in the same launch.
    """

    q_heads: int
    head_dim: int
    causal: tuple[tuple[int, ...], tuple[float, ...]]
    dense: tuple[tuple[int, ...], tuple[float, ...]]

    def pair_fs(self, tokens: int, with_history: bool) -> tuple[float, str]:
        """A power of the tokens between measured chunks, constant beyond them; and its origin.

        So a time that hardly grows from 4 to 16 tokens, where a launch costs more than its work, is met between
        them, and so is one that grows with the pairs; a line between the two rates is three times too high there.
        """
        xs, ys = self.dense if with_history and self.dense[0] else self.causal
        if not xs[0] <= tokens <= xs[-1]:
            return ys[0] if tokens < xs[0] else ys[-1], "extrapolated"
        index = min(max(bisect_left(xs, tokens), 1), len(xs) - 1)
        if len(xs) == 1:
            return ys[0], "interpolated"
        weight = log(tokens / xs[index - 1]) / log(xs[index] / xs[index - 1])
        return ys[index - 1] * (ys[index] / ys[index - 1]) ** weight, "interpolated"

    def full_pair_fs(self, with_history: bool) -> float:
        """The least of any chunk: what a pair costs where chunks fill the GPU."""
        return min((self.dense if with_history and self.dense[0] else self.causal)[1])


@dataclass(frozen=True, slots=True)
class CostTable:
    """All that was measured on one device. `attend` by format, `linear` by weight format."""

    source: str
    attend: dict[str, AttendTable] = field(default_factory=dict)
    linear: dict[str, LinearTable] = field(default_factory=dict)
    prefill: PrefillTable | None = None
    linear_kernels: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # without their launch parameters


def load_costs(path: Path, attention: str = "") -> CostTable:
    """Read a cost table; of several kernels for one point the fastest counts, of attention those so named.

    Raises ConfigError, naming file and line, for a value that is no number and for a point without its shape.
    """
    attend: dict[tuple[str, int, int, int], dict[int, dict[int, tuple[float, str]]]] = {}
    linear: dict[str, dict[int, dict[int, float]]] = {}
    prefill: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    kernels: dict[str, set[str]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        for row in reader:
            try:
                if row["op"] == "attend" and row["sustained"] in _BURST and attention in row["kernel"]:
                    _add_attend(attend, row)
                elif row["op"] == "linear" and row["sustained"] in _BURST:
                    _add_linear(linear, row)
                    kernels.setdefault(row["weights"], set()).add(re.sub(r" \w+=\S+", "", row["kernel"]))
                elif row["op"] == "prefill" and row["format"] == "bf16" and row["sustained"] in _BURST:
                    _add_prefill(prefill, row)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}:{reader.line_num}: not a row of a cost table: {error}") from None
    return CostTable(
        path.name,
        attend_tables(attend),
        {name: linear_table(points) for name, points in linear.items()},
        prefill_table(prefill),
        {name: tuple(sorted(found)) for name, found in kernels.items()},
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"a positive number is needed, got {text!r}")
    return value


def _add_attend(
    attend: dict[tuple[str, int, int, int], dict[int, dict[int, tuple[float, str]]]], row: dict[str, str]
) -> None:
    shape = (row["format"], int(row["q_heads"]), int(row["kv_heads"]), int(row["head_dim"]))
    batch, context = int(row["batch"]), int(row["context_tokens"])
    points = attend.setdefault(shape, {}).setdefault(batch, {})
    time_us = _positive(row["median_us"])
    if context not in points or time_us < points[context][0]:
        points[context] = (time_us, row["kernel"])


def _add_linear(linear: dict[str, dict[int, dict[int, float]]], row: dict[str, str]) -> None:
    bits = {"bf16": 16, "fp8": 8, "w4a16": 4.25}[row["weights"]]
    weight_bytes = int(int(row["in_features"]) * int(row["out_features"]) * bits / 8)
    points = linear.setdefault(row["weights"], {}).setdefault(int(row["tokens"]), {})
    time_us = _positive(row["median_us"])
    points[weight_bytes] = min(time_us, points.get(weight_bytes, time_us))


def _add_prefill(prefill: dict[tuple[int, int], dict[tuple[int, int], float]], row: dict[str, str]) -> None:
    """A row whose context is its tokens is causal, any other one dense over a history of that length."""
    points = prefill.setdefault((int(row["q_heads"]), int(row["head_dim"])), {})
    tokens, context = int(row["tokens"]), int(row["context_tokens"])
    key = (tokens, 0 if context == tokens else context)
    time_us = _positive(row["median_us"])
    points[key] = min(time_us, points.get(key, time_us))


def prefill_table(prefill: dict[tuple[int, int], dict[tuple[int, int], float]]) -> PrefillTable | None:
    """From (q_heads, head_dim) -> (tokens, history) -> us; history 0 is causal. None where no causal row is.

    Of several histories the slope over them counts, so that no launch is in it.
    """
    shapes = [shape for shape in prefill if any(history == 0 for _, history in prefill[shape])]
    if not shapes:
        return None
    shape = max(shapes, key=lambda each: len(prefill[each]))
    causal: dict[int, float] = {}
    dense: dict[int, dict[int, float]] = {}
    for (tokens, history), time_us in prefill[shape].items():
        if history:
            dense.setdefault(tokens, {})[history] = time_us * _FS_PER_US
        else:
            causal[tokens] = time_us * _FS_PER_US / (tokens * (tokens + 1) // 2)
    slopes = {tokens: _slope(times) / tokens for tokens, times in dense.items()}
    return PrefillTable(*shape, _by_tokens(causal), _by_tokens(slopes))


def _slope(times: dict[int, float]) -> float:
    """Of a line through times over histories, or of the one through the origin where that is not above 0."""
    found = linear_regression(times.keys(), times.values()).slope if len(times) > 1 else 0.0
    return found if found > 0 else median(time / history for history, time in times.items())


def _by_tokens(rates: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ordered = sorted(rates)
    return tuple(ordered), tuple(rates[tokens] for tokens in ordered)


def attend_tables(
    attend: dict[tuple[str, int, int, int], dict[int, dict[int, tuple[float, str]]]],
) -> dict[str, AttendTable]:
    """Of several head shapes of a format, the one with the most points."""
    tables: dict[str, AttendTable] = {}
    for (name, q_heads, kv_heads, head_dim), batches in sorted(
        attend.items(), key=lambda item: sum(map(len, item[1].values()))
    ):
        ordered = sorted(batches)
        kernels = {kernel for points in batches.values() for _, kernel in points.values()}
        tables[name] = AttendTable(
            q_heads,
            kv_heads,
            head_dim,
            tuple(ordered),
            tuple(tuple(sorted(batches[batch])) for batch in ordered),
            tuple(
                tuple(batches[batch][context][0] for context in sorted(batches[batch])) for batch in ordered
            ),
            ", ".join(sorted(kernels)),
        )
    return tables


def linear_table(points: dict[int, dict[int, float]]) -> LinearTable:
    """From tokens -> weight bytes -> us."""
    ordered = sorted(points)
    return LinearTable(
        tuple(ordered),
        tuple(tuple(sorted(points[tokens])) for tokens in ordered),
        tuple(tuple(points[tokens][size] for size in sorted(points[tokens])) for tokens in ordered),
    )
