"""A few thousand calls at a time, in columns: what readers of long files give and what bounds their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from kvfold.traces.decode import UTF8_BOM
from kvfold.traces.table import Floats, Ints

#: Rows of one batch: 0.3 µs a row are lost to Python between batches, and 2 MB of rows are held at a time.
ROWS = 4096


@dataclass(slots=True)
class Batch:
    """Rows as they stand in the file. A column of Trace that is not in ``columns`` is unknown on every row.

    ``new_block_ids`` are those of all rows, one after another, ``new_blocks[i]`` of row i: its whole chain, or
    what comes after ``shared_blocks`` of an earlier call. ``link_*`` hold every parent of every row, in row
    order; ``link_child`` counts from the batch's first row, ``link_parent`` is a request_id of the file.
    """

    lines: Ints  # [rows] where each row stands in the file, from 1
    columns: dict[str, Any]  # name -> array or list of texts, [rows]
    new_blocks: Ints | None = None  # [rows]
    new_block_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # [new blocks]
    link_child: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # [links]
    link_parent: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    link_wait_s: Floats = field(default_factory=lambda: np.empty(0))
    link_kind: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def used(self) -> set[str]:
        """Names of the fields that a file of these rows needs."""
        lists = ("new_block_ids", len(self.new_block_ids)), ("parents", len(self.link_child))
        return {*self.columns, *(name for name, items in lists if items)}


def numbered(lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[list[int], list[bytes]]]:
    """(numbers, stripped lines) of up to ROWS lines at a time, without the blank ones and without a BOM."""
    several, number = iter(lines), first
    while block := list(islice(several, ROWS)):
        if number == 1:
            block[0] = block[0].removeprefix(UTF8_BOM)
        texts = [line.strip() for line in block]
        numbers = [at for at, text in enumerate(texts, number) if text]
        yield numbers, [text for text in texts if text]
        number += len(block)


def runs(values: Ints, starts: Ints, lengths: Ints) -> Ints:
    """``values[start : start + length]`` of each pair, one after another."""
    offsets = np.cumsum(lengths) - lengths
    if int(lengths.sum()) == values.size and np.array_equal(starts, offsets):
        return values
    return values[np.arange(int(lengths.sum())) + np.repeat(starts - offsets, lengths)]


def only(batch: Batch, kept: Ints) -> Batch:
    """These rows of a batch in which no row refers to another."""
    columns = {
        name: [values[at] for at in kept.tolist()] if isinstance(values, list) else values[kept]
        for name, values in batch.columns.items()
    }
    some = replace(batch, lines=batch.lines[kept], columns=columns)
    if batch.new_blocks is not None:
        starts = np.cumsum(batch.new_blocks) - batch.new_blocks
        some.new_blocks = batch.new_blocks[kept]
        some.new_block_ids = runs(batch.new_block_ids, starts[kept], some.new_blocks)
    return some
