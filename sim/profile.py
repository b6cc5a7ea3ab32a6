"""Measured layer times of one engine on one GPU, as LLMServingSim's profiler writes them: a folder of CSV files.

`dense.csv` (layer, tokens, time_us) and `per_sequence.csv` (layer, sequences, time_us) are matrix products, norms,
LM head and sampler; `attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us) is one attention
call over a prompt's chunk with its history and n sequences of equal contexts; `skew.csv` the same call over two
groups of contexts; `moe.csv` (tokens, activated_experts, time_us) one MoE block. All of one layer on one rank,
kernel time only: no launch gaps, no collectives. `meta.json` names the model, the GPU and what was swept.

Times are interpolated linearly, beyond the grid the last line goes on. Only the square of a chunk's length enters
its attention, so between two chunks it is linear in that.
"""

from __future__ import annotations

import csv
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvfold.sim.costs import Line, line_at
from kvfold.sim.errors import ConfigError

#: Layers that run once per step and not in every decoder layer; and the norms that a decoder layer has two of.
ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)


Steps = tuple[tuple[int, ...], tuple[float, ...]]  # points and values


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured function of one count."""

    xs: tuple[int, ...]
    ys: tuple[float, ...]

    def at(self, x: int) -> float:
        line = line_at(self.xs, self.ys, x)
        return line.base + line.slope * x

    def covers(self, x: int) -> bool:
        return self.xs[0] <= x <= self.xs[-1]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention call: curves over the context of the decoding sequences, by chunk, history and number."""

    cells: dict[int, dict[int, dict[int, Curve]]]  # chunk -> history -> sequences -> curve over kv_decode

    def decode(self, sequences: int, context_tokens: int) -> tuple[Line, bool]:
        """(us as a line in the mean context, valid from it to `end`; whether all of it was measured)."""
        rows = self.cells[0][0]
        base = slope = 0.0
        end: int | None = None
        inside = min(rows) <= sequences <= max(rows)
        for count, weight in blend(sorted(rows), sequences):
            curve = rows[count]
            line = line_at(curve.xs, curve.ys, context_tokens)
            base, slope = base + weight * line.base, slope + weight * line.slope
            inside &= curve.covers(context_tokens)
            if line.end is not None:
                end = line.end if end is None else min(end, line.end)
        return Line(base, slope, end), inside

    def mixed_us(
        self, chunk: float, history: float, sequences: int, context_tokens: int
    ) -> tuple[float, bool]:
        """The call with a chunk of a prompt in it; and whether its neighbours were measured."""
        chunks = [size for size in sorted(self.cells) if size]
        inside = chunk <= chunks[-1]
        if chunk < chunks[0]:
            shares = [(chunks[0], 1.0)]  # a smaller chunk is padded to the kernel's tile
        else:
            near = blend([size * size for size in chunks], chunk * chunk)
            shares = [(round(square**0.5), share) for square, share in near]
        time_us = 0.0
        for size, share in shares:
            rows = self.cells[size]
            inside &= history <= max(rows)
            for past, weight in blend(sorted(rows), history):
                cells = rows[past]
                inside &= sequences <= max(cells)
                for count, part in blend(sorted(cells), sequences):
                    curve = cells[count]
                    inside &= count == 0 or curve.covers(context_tokens)
                    time_us += share * weight * part * (curve.at(context_tokens) if count else curve.ys[0])
        return time_us, inside


@dataclass(frozen=True, slots=True)
class Uneven:
    """What a batch of uneven contexts costs beyond one of equal contexts with as many tokens.

    While only the k longest of n sequences still read, a step takes `extra_us[chunk][n]` at k longer per token
    than the even batch. Measured on batches of two lengths, of which k have the longer one.
    """

    extra_us: dict[int, dict[int, Steps]]  # chunk -> n -> (k, us per token)

    def us(self, contexts: Sequence[int], chunk: float) -> float:
        """Of sequences with these contexts, longest first, beside a chunk of a prompt (0: none)."""
        count = len(contexts)
        if count < 2 or contexts[0] == contexts[-1]:
            return 0.0
        sizes = sorted(self.extra_us)
        rows: list[tuple[Steps, float]] = []
        for size, share in blend(sizes, min(chunk, sizes[-1])) if chunk else [(0, 1.0)]:
            counts = sorted(self.extra_us[size])
            near = min(max(count, counts[0]), counts[-1])
            rows += [(self.extra_us[size][n], share * part) for n, part in blend(counts, near)]
        total = 0.0
        for longer in range(1, count):
            step = contexts[longer - 1] - contexts[longer]
            if step:
                total += step * sum(share * _between(*row, longer) for row, share in rows)
        return total


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile folder. `tp`: GPUs that a layer is split over, times are those of one of them."""

    source: str
    model: str
    hardware: str
    tp: int
    dense: dict[str, Curve]
    per_sequence: dict[str, Curve]
    attention: Attention
    uneven: Uneven | None
    moe: dict[int, Curve] | None  # tokens -> curve over activated experts
    meta: dict[str, Any]


def blend(xs: Sequence[float], x: float) -> list[tuple[Any, float]]:
    """The two neighbours of x with their linear weights; beyond the last the line through the last two goes on."""
    if len(xs) == 1 or x <= xs[0]:
        return [(xs[0], 1.0)]
    index = min(bisect_right(xs, x), len(xs) - 1)
    low, high = xs[index - 1], xs[index]
    weight = (x - low) / (high - low)
    return [(low, 1 - weight), (high, weight)] if weight else [(low, 1.0)]


def load_profile(folder: Path, uneven: bool | None = None) -> Profile:
    """Read one folder. `uneven`: whether uneven contexts are corrected; None: as the profile's meta.json says.

    Raises ConfigError, naming file and line, for a table that is missing or malformed.
    """
    meta = _meta(folder / "meta.json")
    attention = _attention(folder / "attention.csv")
    # the sweep over uneven contexts counts where the profile itself says that it was part of it
    if uneven is None:
        uneven = meta.get("skew_profile", {}).get("enabled", True)
    skew, moe = folder / "skew.csv", folder / "moe.csv"
    per_sequence = _curves(folder / "per_sequence.csv", "sequences")
    if "lm_head" not in per_sequence:
        raise ConfigError(f"{folder / 'per_sequence.csv'}: no row of layer lm_head; profile it too")
    return Profile(
        source=folder.name,
        model=str(meta.get("model", "")),
        hardware=str(meta.get("hardware", "")),
        tp=_tp(folder, meta),
        dense=_curves(folder / "dense.csv", "tokens"),
        per_sequence=per_sequence,
        attention=attention,
        uneven=_uneven(skew, attention) if uneven and skew.is_file() else None,
        moe=_moe(moe) if moe.is_file() else None,
        meta=meta,
    )


def _between(xs: tuple[int, ...], ys: tuple[float, ...], x: int) -> float:
    """Linear between the points, constant beyond them."""
    index = bisect_right(xs, x)
    if index == 0 or index == len(xs):
        return ys[min(index, len(xs) - 1)]
    weight = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + weight * (ys[index] - ys[index - 1])


def _meta(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a profile's meta.json ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a profile's meta.json (an object is needed)")
    return found


def _tp(folder: Path, meta: dict[str, Any]) -> int:
    """From the folder's name, which ends in tp2 or the like; else what the engine ran with."""
    named = re.search(r"(?:^|_)tp(\d+)$", folder.name)
    if named:
        return int(named[1])
    return int(meta.get("engine_effective", {}).get("tensor_parallel_size", 1))


def _rows(path: Path, columns: Sequence[str]) -> list[list[float]]:
    """The named columns as numbers; a column `layer` is not one of them."""
    return [[float(value) for value in row[1:]] for row in _table(path, ["", *columns])]


def _table(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """The named columns as text, the last one checked to be a time above 0; an empty name gives an empty text."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = []
            for row in reader:
                try:
                    values = [row[name] if name else "" for name in columns]
                    if not 0 < float(values[-1]) < float("inf") or not all(map(_is_number, values[1:])):
                        raise ValueError(f"numbers and a time above 0 are needed, got {values}")
                except (KeyError, TypeError, ValueError) as error:
                    raise ConfigError(f"{path}:{reader.line_num}: not a row of a profile: {error}") from None
                rows.append(values)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a profile needs it") from None
    if not rows:
        raise ConfigError(f"{path}: no rows; a profile needs it")
    return rows


def _is_number(text: str) -> bool:
    return float("-inf") < float(text) < float("inf")


def _curve(points: dict[int, float]) -> Curve:
    xs = sorted(points)
    return Curve(tuple(xs), tuple(points[x] for x in xs))


def _curves(path: Path, count: str) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for layer, x, time_us in _table(path, ["layer", count, "time_us"]):
        points.setdefault(layer, {})[int(x)] = float(time_us)
    return {layer: _curve(each) for layer, each in points.items()}


def _attention(path: Path) -> Attention:
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    points: dict[int, dict[int, dict[int, dict[int, float]]]] = {}
    for chunk, past, count, context, time_us in _rows(path, columns):
        cell = points.setdefault(int(chunk), {}).setdefault(int(past), {})
        cell.setdefault(int(count), {})[int(context)] = time_us
    if 0 not in points.get(0, {}) or len(points) < 2:
        raise ConfigError(f"{path}: a profile needs rows with and without a prefill_chunk")
    return Attention(
        {
            chunk: {past: {n: _curve(each) for n, each in cells.items()} for past, cells in rows.items()}
            for chunk, rows in points.items()
        }
    )


def _moe(path: Path) -> dict[int, Curve]:
    points: dict[int, dict[int, float]] = {}
    for tokens, activated, time_us in _rows(path, ["tokens", "activated_experts", "time_us"]):
        points.setdefault(int(tokens), {})[int(activated)] = time_us
    return {tokens: _curve(each) for tokens, each in sorted(points.items())}


def _uneven(path: Path, attention: Attention) -> Uneven | None:
    """From batches of two lengths at the ratio of lengths that most rows have.

    The file's times are sums over the profiler's repeats, so its even batches are held against attention.csv to
    find by how much.
    """
    columns = ["n", "nb", "skew", "pc", "kvs", "kv_big", "t_mean_us", "t_max_us", "t_skew_us"]
    rows = _rows(path, columns)
    scales = []
    for n, _, _, chunk, _, longest, _, even_us, _ in rows:
        curve = attention.cells[0][0].get(int(n))
        if chunk == 0 and curve is not None and int(longest) in curve.xs:
            scales.append(even_us / curve.at(int(longest)))
    if not scales:
        raise ConfigError(f"{path}: no even batch of it is in attention.csv, so its times have no scale")
    scale = median(scales)
    usual, _ = Counter(row[2] for row in rows).most_common(1)[0]
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    for n, count, ratio, chunk, short, longest, mean_us, _, time_us in rows:
        if ratio == usual and longest > short:
            extra_us = (time_us - mean_us) / scale / (longest - short)
            found.setdefault((int(chunk), int(n)), {}).setdefault(int(count), []).append(extra_us)
    extra: dict[int, dict[int, Steps]] = {}
    for (size, sequences), by_count in found.items():
        longer = sorted(by_count)
        values = (*(median(by_count[k]) for k in longer), 0.0)
        extra.setdefault(size, {})[sequences] = ((*longer, sequences), values)
    return Uneven(extra)
