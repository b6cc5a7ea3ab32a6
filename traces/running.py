"""Figures that grow with every batch, for the summary of a file that is not held in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvfold.traces.batch import Batch
from kvfold.traces.gather import Places
from kvfold.traces.prefix import partial_last
from kvfold.traces.spill import Spill
from kvfold.traces.table import Floats, Ints

_NAN = float("nan")


class NeedsWholeError(Exception):
    """A check of this file that only the whole table allows; the message says which."""


@dataclass(slots=True)
class Gaps:
    """Of the gaps between arrivals that come in ascending order."""

    first_s: float = _NAN
    last_s: float = _NAN
    count: int = 0
    zero: int = 0
    mean_s: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean
    often_s: float = _NAN  # the most frequent gap of the first piece, in ns steps
    often: int = 0

    def add(self, arrival_s: Floats) -> None:
        gaps = np.diff(arrival_s, prepend=arrival_s[:1] if np.isnan(self.last_s) else self.last_s)
        if np.isnan(self.first_s):
            self.first_s, gaps = float(arrival_s[0]), gaps[1:]
        self.last_s = float(arrival_s[-1])
        if not gaps.size:
            return
        rounded = np.round(gaps, 9)
        if not self.count:
            values, counts = np.unique(rounded, return_counts=True)
            self.often_s = float(values[counts.argmax()])
        self.often += int((rounded == self.often_s).sum())
        self.zero += int((gaps == 0).sum())
        mean_s, count = float(gaps.mean()), self.count + gaps.size
        step_s = mean_s - self.mean_s  # Chan, Golub and LeVeque 1979: sums of two parts joined
        self.squares += float(((gaps - mean_s) ** 2).sum()) + step_s**2 * self.count * gaps.size / count
        self.mean_s += step_s * gaps.size / count
        self.count = count


@dataclass(slots=True)
class Windows:
    """Counts of ascending arrivals in windows from the first on, as `burst` has them."""

    window_s: float
    first_s: float
    at: int = -1
    here: int = 0
    squares: int = 0
    most: int = 0

    def add(self, arrival_s: Floats) -> None:
        window = ((arrival_s - self.first_s) // self.window_s).astype(np.int64)
        at, counts = np.unique(window, return_counts=True)
        if at[0] == self.at:
            counts[0] += self.here
        else:
            self._close(np.array([self.here]))
        self._close(counts[:-1])
        self.at, self.here = int(at[-1]), int(counts[-1])

    def figures(self, count: int) -> tuple[float, float]:
        """Index of dispersion, and peak over mean; NaN in fewer than two windows."""
        self._close(np.array([self.here]))
        if self.at < 1:
            return _NAN, _NAN
        mean = count / (self.at + 1)
        return (self.squares / (self.at + 1) - mean**2) / mean, self.most / mean

    def _close(self, counts: Ints) -> None:
        self.squares += int((counts.astype(np.int64) ** 2).sum())
        self.most = max(self.most, int(counts.max(initial=0)))


@dataclass(slots=True)
class Blocks:
    """Prefix chains: which blocks come again, and whether they follow the same block each time."""

    block_tokens: int
    lengths: array[int] = field(default_factory=lambda: array("i"))  # of each row, where rows name others
    ids: Spill = field(default_factory=lambda: Spill(np.int64))
    total: int = 0
    shared: int = 0
    shared_tokens: int = 0
    partial: set[str] = field(default_factory=set)

    def add(self, batch: Batch, input_tokens: Ints, places: Places) -> None:
        new = np.zeros(len(batch), np.int64) if batch.new_blocks is None else batch.new_blocks
        shared = batch.columns.get("shared_blocks", np.zeros(len(batch), np.int64))
        columns = {"shared_blocks": shared, "new_blocks": new}
        self.partial.add(partial_last(columns, input_tokens, self.block_tokens, places))
        self.total += int((new + shared).sum())
        self.shared += int(shared.sum())
        self.shared_tokens += int(np.minimum(shared * self.block_tokens, input_tokens).sum())
        before = np.empty_like(batch.new_block_ids)
        before[1:] = batch.new_block_ids[:-1]
        before[(np.cumsum(new) - new)[new > 0]] = -1
        tokens = np.full(before.size, self.block_tokens)
        ends = (np.cumsum(new) - 1)[new > 0]
        tokens[ends] -= np.maximum(0, (shared + new) * self.block_tokens - input_tokens)[new > 0]
        hashed = ((before + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
        self.ids.add(batch.new_block_ids, (hashed.astype(np.int64) << 32) | tokens)

    def hits(self, input_tokens: int) -> tuple[float, float, int]:
        """Share of tokens and of blocks that an earlier call had, and how many blocks were new."""
        distinct, new_tokens, last, follows = 0, 0, None, 0
        for keys, carried in self.ids.pieces():
            opens = np.ones(keys.size, bool)
            opens[1:] = keys[1:] != keys[:-1]
            opens[0] = keys[0] != last
            first = np.maximum.accumulate(np.where(opens, np.arange(keys.size), 0))
            before = carried >> 32
            expected = before[first]
            expected[: int(opens.argmax()) if opens.any() else keys.size] = follows
            if not self.shared and (before != expected).any():
                raise NeedsWholeError("a block id does not always follow the same block")
            distinct += int(opens.sum())
            new_tokens += int((carried[opens] & 0xFFFFFFFF).sum())
            last, follows = keys[-1], expected[-1]
        if self.shared and distinct < self.ids.count:
            raise NeedsWholeError("block ids come again beside shared_blocks")
        shared_tokens = self.shared_tokens if self.shared else input_tokens - new_tokens
        share = (self.total - distinct) / self.total if self.total else _NAN
        return shared_tokens / input_tokens, share, distinct


def run_lengths(values: Spill) -> Iterator[Ints]:
    """How often each value stands in ``values``, for many at a time."""
    last, here = None, 0
    for keys, _ in values.pieces():
        found, counts = np.unique(keys, return_counts=True)
        if found[0] == last:
            counts[0] += here
        elif here:
            yield np.array([here])
        yield counts[:-1]
        last, here = found[-1], int(counts[-1])
    if here:
        yield np.array([here])


def quantiles(values: Spill) -> dict[str, float | int]:
    """As `stats.quantiles`."""
    names = ("p50", "p90", "p95", "p99", "max")
    marks = dict(zip(names, values.quantiles([50, 90, 95, 99, 100]), strict=True))
    if not values.count:
        return {"n": 0, "mean": _NAN} | marks
    total = sum(keys.sum().item() for keys, _ in values.pieces())
    integral = isinstance(total, int)
    return (
        {"n": values.count, "mean": total / values.count}
        | marks
        | {"max": int(marks["max"]) if integral else marks["max"]}
    )
