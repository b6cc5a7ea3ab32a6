"""Sorting and counting of more numbers than memory should hold: sorted runs in a file without a name."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Values of one run: 4 MB of keys, and as much of what goes with them.
_RUN = 1 << 19
#: Values that are read from each run at a time, at least.
_LEAST_PIECE = 1 << 12

_Piece = tuple[NDArray[Any], NDArray[Any]]


class Spill:
    """Numbers in any order in, in ascending order out; more than one run of them waits on disk.

    ``kind`` is float64 or int64. Each may carry an int64 along. Equal numbers come out in the order in which
    they came, but for those that were added more than a run apart, of which only the first is sure to be first.
    """

    def __init__(self, kind: type[np.generic]) -> None:
        self.count = 0
        self._kind = np.dtype(kind)
        self._waiting: list[_Piece] = []
        self._lengths: list[int] = []
        self._file: Any = None

    def add(self, keys: NDArray[Any], carried: NDArray[Any] | None = None) -> None:
        """Take these numbers; where none carries anything 0 is carried."""
        if not keys.size:
            return
        self._waiting.append((keys, np.zeros(keys.size, np.int64) if carried is None else carried))
        self.count += keys.size
        if sum(part.size for part, _ in self._waiting) >= _RUN:
            self._write()

    def pieces(self) -> Iterator[_Piece]:
        """All numbers in ascending order with what they carry, a bounded number of them at a time."""
        if self._file is None:
            if self._waiting:
                yield _sorted(self._waiting)
            return
        if self._waiting:
            self._write()
        piece = max(_LEAST_PIECE, 4 * _RUN // len(self._lengths))
        starts = np.cumsum([0, *self._lengths]).tolist()
        runs = [
            _Run(self._file, self._kind, start, length, piece)
            for start, length in zip(starts, self._lengths, strict=False)
        ]
        while runs := [run for run in runs if run.fill()]:
            bound = min((run.last for run in runs if run.left), default=None)
            yield _sorted([run.take(bound) for run in runs])

    def quantiles(self, percents: Sequence[float]) -> list[float]:
        """Order statistics with linear interpolation, as ``numpy.percentile`` gives them; NaN without numbers."""
        if not self.count:
            return [float("nan")] * len(percents)
        ranks = [percent / 100 * (self.count - 1) for percent in percents]
        wanted = sorted({at for rank in ranks for at in (floor(rank), min(floor(rank) + 1, self.count - 1))})
        found: dict[int, float] = {}
        passed = 0
        for keys, _ in self.pieces():
            inside = [at for at in wanted if passed <= at < passed + keys.size]
            found |= {at: keys[at - passed].item() for at in inside}
            passed += keys.size
        return [
            _between(found[floor(rank)], found[min(floor(rank) + 1, self.count - 1)], rank - floor(rank))
            for rank in ranks
        ]

    def _write(self) -> None:
        keys, carried = _sorted(self._waiting)
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._file.seek(16 * sum(self._lengths))
        keys.tofile(self._file)
        carried.tofile(self._file)
        self._lengths.append(keys.size)
        self._waiting = []


class _Run:
    """One sorted run on disk: its keys, then what they carry."""

    def __init__(self, file: Any, kind: np.dtype[Any], start: int, length: int, piece: int) -> None:
        self._file, self._kind, self._at, self._length, self._piece = file, kind, 16 * start, length, piece
        self._read = 0
        self._keys, self._carried = np.empty(0, kind), np.empty(0, np.int64)

    @property
    def left(self) -> bool:
        """Whether the run goes on after what was read of it."""
        return self._read < self._length

    @property
    def last(self) -> Any:
        """The largest number that was read."""
        return self._keys[-1]

    def fill(self) -> bool:
        """Read on where nothing is left to take; False at the end of the run."""
        if not self._keys.size and self.left:
            count = min(self._piece, self._length - self._read)
            self._file.seek(self._at + 8 * self._read)
            self._keys = np.fromfile(self._file, self._kind, count)
            self._file.seek(self._at + 8 * (self._length + self._read))
            self._carried = np.fromfile(self._file, np.int64, count)
            self._read += count
        return bool(self._keys.size)

    def take(self, bound: Any) -> _Piece:
        """What was read up to ``bound`` (None: all of it), which is then no longer here."""
        end = self._keys.size if bound is None else int(np.searchsorted(self._keys, bound, "right"))
        taken = self._keys[:end], self._carried[:end]
        self._keys, self._carried = self._keys[end:], self._carried[end:]
        return taken


def _sorted(parts: Sequence[_Piece]) -> _Piece:
    keys = np.concatenate([keys for keys, _ in parts])
    carried = np.concatenate([carried for _, carried in parts])
    order = np.argsort(keys, kind="stable")
    return keys[order], carried[order]


def _between(low: float, high: float, share: float) -> float:
    """NumPy's own way round, so that the last bit agrees."""
    step = high - low
    return float(high - step * (1 - share) if share >= 0.5 else low + step * share)
