"""ServeGen's clients: rates and lengths per window, from which requests are drawn.

Source: github.com/alibaba/ServeGen, ``data/``. A client is two files of a folder. ``chunk-N-trace.csv`` has no
header; its rows are a window's start (s), rate (requests/s), CV of the gaps, pattern (Gamma, Weibull, empty
while idle) and the pattern's shape and scale. ``chunk-N-dataset.json`` has for longer windows the probabilities
of input and output lengths, and of the share of reasoning in the output, as texts of Python dictionaries.

Gaps keep the window's shape and get the mean of its rate: for Gamma that gives the window's CV (1 / sqrt(shape));
Weibull shapes were fitted upstream, and their own CV may differ from the one measured. Lengths of a request are
drawn independently of each other, since the source has no joint table.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gamma
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvfold.traces.calls import Calls
from kvfold.traces.decode import UTF8_BOM, Seconds, convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Floats, Ints, Trace

_NAME = re.compile(r"chunk-(\d+)-trace\.csv")
_TABLES = ("input_tokens", "output_tokens", "reason_ratio")
#: Beyond this a table of the requests does not fit into the memory of a laptop.
_MOST_REQUESTS = 10**8


class _Window(msgspec.Struct):
    start_s: Seconds
    rate_per_s: Seconds
    cv: Seconds
    pattern: str
    shape: Seconds
    scale: Seconds


@dataclass(frozen=True, slots=True)
class _Table:
    """Values and their probabilities, which sum to 1."""

    values: Floats
    chances: Floats

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        return self.values[rng.choice(len(self.values), count, p=self.chances)]


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its rate windows in order, and its length tables by the start of their windows."""

    name: str
    windows: list[_Window]
    lengths: dict[float, dict[str, _Table]]


def servegen(
    folder: Path,
    seed: int,
    start_s: float = 0.0,
    duration_s: float = 3600.0,
    rate_per_s: float | None = None,
) -> Trace:
    """Requests of all clients of ``folder`` from ``start_s`` on, each in its own renewal process.

    ``rate_per_s`` scales all clients alike so that the mean rate of the span is this; None keeps their rates.
    ``tenant`` is the client. Raises BadTraceError for bad files, ValueError for arguments that make no load.
    """
    clients = list(read_clients(folder))
    end_s = start_s + duration_s
    expected = sum(_expected(client, start_s, end_s) for client in clients)
    if not expected:
        raise ValueError(f"the clients must be active from {start_s:g} to {end_s:g} s, but all are idle")
    scale = 1.0 if rate_per_s is None else rate_per_s * duration_s / expected
    if not 0 < expected * scale <= _MOST_REQUESTS:
        rule = f"the load must have from 1 to {_MOST_REQUESTS:,} requests"
        raise ValueError(f"{rule}, got about {expected * scale:,.0f}: change the duration or the rate")
    calls = Calls(str(folder))
    borrowed = 0
    for client, rng in zip(clients, np.random.default_rng(seed).spawn(len(clients)), strict=True):
        arrivals_s = _arrivals(client, start_s, end_s, scale, rng)
        columns, from_others = _lengths(client, arrivals_s, rng)
        borrowed += from_others
        place = f"{folder}/{client.name}"
        rows = zip(arrivals_s.tolist(), *(columns[name].tolist() for name in _TABLES), strict=True)
        for number, (arrival_s, prompt, output, reasoning) in enumerate(calls.reading(rows), 1):
            if prompt:
                calls.add(
                    f"{place}:{number}",
                    number,
                    arrival_s - start_s,
                    prompt,
                    output,
                    reasoning=reasoning,
                    tenant=client.name,
                )
            else:
                calls.drop("zero_input_tokens")
    calls.warnings.append(
        f"drawn from {len(clients):,} clients of ServeGen, {start_s:g} to {end_s:g} s of their days, rates times"
        f" {scale:.4g}, seed {seed}; input and output lengths are independent of each other"
    )
    if borrowed:
        calls.warnings.append(
            f"{borrowed:,} requests fall into windows without lengths: drawn from the nearest one"
        )
    return calls.trace("servegen", "s")


def read_clients(folder: Path) -> Iterator[Client]:
    """The clients in a folder and those below it, by name. Raises BadTraceError."""
    files = sorted(file for file in folder.rglob("chunk-*-trace.csv") if _NAME.fullmatch(file.name))
    if not files:
        rule = "the folder must hold chunk-N-trace.csv and chunk-N-dataset.json, got no such files"
        raise BadTraceError(rule, str(folder), "name a category of ServeGen's data, such as language/m-mid")
    for file in files:
        name = file.relative_to(folder).as_posix().removesuffix("-trace.csv")
        lengths = file.with_name(file.name.replace("-trace.csv", "-dataset.json"))
        try:
            yield Client(name, _windows(file), _tables(lengths))
        except OSError as error:
            place = error.filename or str(file)
            raise BadTraceError(f"a client needs both files: {error.strerror}", place, "restore it") from None


def _windows(file: Path) -> list[_Window]:
    windows: list[_Window] = []
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
        for cells in csv.reader(lines):
            place = f"{file}:{len(windows) + 1}"
            names = _Window.__struct_fields__
            if len(cells) != len(names):
                rule = f"a window must have {len(names)} cells ({', '.join(names)}), got {len(cells)}"
                raise BadTraceError(rule, place, "restore the row")
            window = convert_row(dict(zip(names, cells, strict=True)), _Window, place)
            if windows and window.start_s <= windows[-1].start_s:
                raise BadTraceError("windows must be in order of time", place, "sort the rows")
            if window.rate_per_s and (window.pattern not in ("Gamma", "Weibull") or not window.shape):
                rule = "a window with a rate must have the pattern Gamma or Weibull and a shape above 0"
                raise BadTraceError(
                    f"{rule}, got {window.pattern!r} and {window.shape:g}", place, "correct it"
                )
            windows.append(window)
    if len(windows) < 2:
        raise BadTraceError("a client must have two windows or more", f"{file}:1", "restore the file")
    return windows


def _tables(file: Path) -> dict[float, dict[str, _Table]]:
    decoder = msgspec.json.Decoder(dict[str, dict[str, str]])
    raw = decode_json(decoder, file.read_bytes().removeprefix(UTF8_BOM), str(file), 1)
    found: dict[float, dict[str, _Table]] = {}
    for start, texts in raw.items():
        tables = {
            name: _table(texts[name], f"{file}:1 (window {start}, {name})")
            for name in _TABLES
            if name in texts
        }
        present = {name: table for name, table in tables.items() if table is not None}
        if {"input_tokens", "output_tokens"} <= present.keys():
            start_s = convert_row({"start_s": start}, _Start, f"{file}:1").start_s
            found[start_s] = present
    if not found:
        raise BadTraceError(
            "a client must have lengths in one window or more", f"{file}:1", "restore the file"
        )
    return found


class _Start(msgspec.Struct):
    start_s: Seconds


def _table(text: str, place: str) -> _Table | None:
    """The table that a dictionary's text spells; None where it is empty."""
    try:
        pairs: Any = ast.literal_eval(text)
        if not isinstance(pairs, dict):
            raise ValueError
        values = np.array(list(pairs), np.float64)
        chances = np.array(list(pairs.values()), np.float64)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        rule = f"lengths must be the text of a dictionary of numbers, got {text[:40]!r}"
        raise BadTraceError(rule, place, "restore the file") from None
    if not len(values):
        return None
    total = chances.sum()
    if not (
        np.isfinite(values).all() and (values >= 0).all() and (chances >= 0).all() and abs(total - 1) < 1e-3
    ):
        rule = f"lengths must be 0 or more and their probabilities sum to 1, got a sum of {total:g}"
        raise BadTraceError(rule, place, "restore the file")
    return _Table(values, chances / total)


def _spans(client: Client, start_s: float, end_s: float) -> Iterator[tuple[float, float, _Window]]:
    """(begin, end, window) of the part of each window inside the span; the last is as long as the one before."""
    starts = [window.start_s for window in client.windows]
    ends = [*starts[1:], 2 * starts[-1] - starts[-2]]
    for window, end in zip(client.windows, ends, strict=True):
        if window.start_s < end_s and end > start_s:
            yield max(window.start_s, start_s), min(end, end_s), window


def _expected(client: Client, start_s: float, end_s: float) -> float:
    return sum((end - begin) * window.rate_per_s for begin, end, window in _spans(client, start_s, end_s))


def _arrivals(client: Client, start_s: float, end_s: float, scale: float, rng: np.random.Generator) -> Floats:
    """Arrivals of a renewal process whose clock runs at the window's rate, so that gaps cross windows unbiased.

    The process began long before: the first arrival ends a random part of a gap that a random moment falls into.
    """
    parts: list[Floats] = []
    next_at = np.nan  # arrivals expected from the beginning of the window until the next one
    for begin, end, window in _spans(client, start_s, end_s):
        rate = window.rate_per_s * scale
        length = (end - begin) * rate
        if not length:
            continue
        if np.isnan(next_at):
            next_at = rng.random() * _gap_around(window, rng)
        marks = np.array([next_at])
        while marks[-1] <= length:
            more = _gaps(window, int(length - marks[-1]) + 64, rng)
            marks = np.concatenate([marks, marks[-1] + np.cumsum(more)])
        inside = int(np.searchsorted(marks, length, "right"))
        parts.append(begin + marks[:inside] / rate)
        next_at = marks[inside] - length
    return np.concatenate(parts) if parts else np.empty(0)


def _gaps(window: _Window, count: int, rng: np.random.Generator) -> Floats:
    """Gaps of mean 1 with the window's pattern and shape."""
    if window.pattern == "Gamma":
        return rng.gamma(window.shape, 1 / window.shape, count)
    return rng.weibull(window.shape, count) / gamma(1 + 1 / window.shape)


def _gap_around(window: _Window, rng: np.random.Generator) -> float:
    """A gap of mean 1 that a random moment falls into, so that long ones are drawn as often as they are long.

    Of Gamma gaps these are Gamma with a shape of one more; of Weibull gaps their power of the shape is Gamma
    distributed with 1 + 1 / shape (both by substitution in the density times the gap).
    """
    if window.pattern == "Gamma":
        return rng.gamma(window.shape + 1) / window.shape
    return rng.gamma(1 + 1 / window.shape) ** (1 / window.shape) / gamma(1 + 1 / window.shape)


def _lengths(client: Client, arrivals_s: Floats, rng: np.random.Generator) -> tuple[dict[str, Ints], int]:
    """Token counts of each arrival, and how many were drawn from another window since theirs has none."""
    starts = np.array(sorted(client.lengths))
    columns = {name: np.full(len(arrivals_s), -1, np.int64) for name in _TABLES}
    step_s = float(np.diff(starts).min()) if len(starts) > 1 else np.inf
    own = np.searchsorted(starts, arrivals_s, "right") - 1
    inside = (own >= 0) & (arrivals_s - starts[own] < step_s)
    after = np.minimum(own + 1, len(starts) - 1)
    nearer = np.abs(starts[after] - arrivals_s) < np.abs(starts[own] + step_s - arrivals_s)
    window = np.where(inside, own, np.where((own < 0) | nearer, after, own))
    for at in np.unique(window).tolist():
        rows = np.flatnonzero(window == at)
        tables = client.lengths[starts[at]]
        for name in ("input_tokens", "output_tokens"):
            columns[name][rows] = tables[name].draw(len(rows), rng)
        if "reason_ratio" in tables:
            share = tables["reason_ratio"].draw(len(rows), rng)
            columns["reason_ratio"][rows] = np.round(share * columns["output_tokens"][rows])
    return columns, int((~inside).sum())
