"""A long file looked through in bounded memory: the summary of `stats.inspect` without the table.

Rows pass by in batches. What must be in order, or counted by value, goes through `Spill`, so every figure is
exact: quantiles are order statistics of all rows, the hit shares count every block. Only the check that a block
always follows the same block compares 31-bit hashes of the earlier one. A figure that needs the whole table is
None and named in the warnings. What cannot be checked row by row makes `summarise` give up, and the caller load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from kvfold.traces import canonical, mooncake, stats
from kvfold.traces.batch import Batch, only
from kvfold.traces.columns import DEFAULTS, KIND, TEXTS, remarks
from kvfold.traces.errors import BadTraceError
from kvfold.traces.gather import Places, check_rows
from kvfold.traces.load import is_tar, kind_of, load, load_file, named_files, sha256_of
from kvfold.traces.readers import Stated
from kvfold.traces.row import Header
from kvfold.traces.running import Blocks, Gaps, NeedsWholeError, Windows, quantiles, run_lengths
from kvfold.traces.spill import Spill
from kvfold.traces.table import Ints, Meta
from kvfold.traces.unpack import Progress, TraceFile, opened, reported, unpacked

_NAN = float("nan")
NOTHING_STATED = Stated()
#: Memory of one row of a Trace, without block ids and edges; a text counts as its pointer.
_ROW_BYTES = sum(np.dtype(kind).itemsize for kind, _ in DEFAULTS.values()) + 8 * len(TEXTS)
_EDGE_BYTES = 25
_NOT_GIVEN = "read row by row: kv_occupancy, which needs the whole table, is not computed"


@dataclass(slots=True)
class Rows:
    """A file of a format that can be read row by row.

    ``per_s`` is None where rows have ``arrival_time_s``, else how many of their ``stamp`` make a second.
    """

    format: str
    header: Header
    batches: Iterator[Batch]
    time_unit: str = "s"
    per_s: int | None = None
    warnings: tuple[str, ...] = ()


def _canonical(stream: BinaryIO, source: str) -> Rows:
    header, batches = canonical.batches(stream, source)
    return Rows("canonical", header, batches, warnings=tuple(header.warnings))


def _mooncake(stream: BinaryIO, source: str) -> Rows:
    header = Header(kvfold_trace=1, block_size_tokens=mooncake.BLOCK_TOKENS, hash_scope="global")
    batches = mooncake.batches(stream, source)
    return Rows("mooncake", header, batches, "ms", 1000, (mooncake.NO_SESSIONS,))


#: A file of 128 MiB takes up to 0.6 GB as a table.
LONG_BYTES = 1 << 27
#: How much more than its packed size a log holds, for the choice of reading it row by row.
_LEAST_RATIO = 8
#: The formats that can be read row by row.
OPENERS: dict[str, Callable[[BinaryIO, str], Rows]] = {"canonical": _canonical, "mooncake": _mooncake}


@dataclass(frozen=True, slots=True)
class Summary:
    """What one pass over a file found; with it the second pass can write the file anew."""

    meta: Meta
    figures: dict[str, Any]
    used: frozenset[str]  # fields that the rows use
    first_stamp: int  # the earliest, in units of the source


def inspect(
    path: str,
    format: str | None = None,
    progress: Progress | None = None,
    stated: Stated = NOTHING_STATED,
    long_bytes: int = LONG_BYTES,
) -> dict[str, Any]:
    """The summary of the trace at ``path``, which is held in memory only where it is short or has to be.

    Files of OPENERS from ``long_bytes`` on are read row by row. Arguments and errors are those of `load`.
    """
    with reported(path):
        if named_files(path):
            return stats.inspect(load(path, format, progress, stated))
        with opened(path, progress) as file:
            sha256 = sha256_of(file)
            try:
                with by_rows(file, path, format, long_bytes) as rows:
                    if rows is not None and stated == NOTHING_STATED:
                        return summarise(rows, path, sha256).figures
            except NeedsWholeError as error:
                reason = f"all rows were held in memory to check them: {error}"
                summary = stats.inspect(load_file(file, path, format, stated))
                return summary | {"warnings": [*summary["warnings"], reason]}
            return stats.inspect(load_file(file, path, format, stated))


@contextmanager
def by_rows(file: TraceFile, source: str, format: str | None, long_bytes: int) -> Iterator[Rows | None]:
    """The rows of an open file, from its start, where it is long and its format allows."""
    file.seek(0)
    with unpacked(file, source) as stream:
        packed = stream.raw is not file
        if file.size * (_LEAST_RATIO if packed else 1) < long_bytes or is_tar(stream):
            yield None
        else:
            kind = format or kind_of(stream, source)
            yield OPENERS[kind](stream, source) if kind in OPENERS else None


def summarise(rows: Rows, source: str, sha256: str) -> Summary:
    """One pass over all rows. Raises BadTraceError, and NeedsWholeError where row by row is not enough."""
    seen = _Seen(rows, source)
    for batch in rows.batches:
        seen.add(batch)
    check_rows(seen.read, rows.header, source)
    if not seen.kept:
        raise BadTraceError("a trace must have rows, got none with a prompt", source, "restore the file")
    return seen.summary(sha256)


class _Seen:
    """Everything that the rows so far add up to."""

    def __init__(self, rows: Rows, source: str) -> None:
        self._rows, self._source = rows, source
        self._common = rows.header.clock == "common"
        self.read = self.kept = self._late = self._edges = 0
        self._unknown_outputs = self._zero_outputs = self._input_tokens = 0
        self._refers = False
        self._used: set[str] = set()
        self._stamps: tuple[int, int] | None = None  # the first, the earliest
        self._last_s = -np.inf
        self._arrivals, self._inputs, self._outputs = Spill(np.float64), Spill(np.int64), Spill(np.int64)
        self._tool, self._human, self._sessions = Spill(np.float64), Spill(np.float64), Spill(np.int64)
        self._blocks = Blocks(rows.header.block_size_tokens)

    def add(self, batch: Batch) -> None:
        self._used |= batch.used
        kept = np.flatnonzero(batch.columns["input_tokens"])
        self._references(batch, kept, Places(self._source, batch.lines))
        self.read += len(batch)
        self.kept += kept.size
        if kept.size < len(batch):
            batch = only(batch, kept)
        if not kept.size:
            return
        places = Places(self._source, batch.lines)
        self._clock(batch, places)
        inputs = batch.columns["input_tokens"]
        outputs = batch.columns.get("output_tokens", np.full(len(batch), -1))
        self._unknown_outputs += int((outputs < 0).sum())
        self._zero_outputs += int((outputs == 0).sum())
        self._inputs.add(inputs)
        self._outputs.add(outputs[outputs >= 0])
        self._input_tokens += int(inputs.sum())
        if "session_id" in batch.columns:
            sessions = batch.columns["session_id"].astype(np.int64)
            self._sessions.add(sessions[sessions >= 0])
        if "wait_before_s" in batch.columns and "wait_kind" in batch.columns:
            waits, kinds = batch.columns["wait_before_s"], batch.columns["wait_kind"]
            for spill, kind in ((self._tool, "tool"), (self._human, "human")):
                spill.add(waits[(kinds == KIND[kind]) & ~np.isnan(waits)])
        if batch.new_block_ids.size or "shared_blocks" in batch.columns:
            self._blocks.add(batch, inputs, places)

    def _references(self, batch: Batch, kept: Ints, places: Places) -> None:
        """What a row says of earlier ones, in a file whose rows are numbered by their position."""
        columns, header = batch.columns, self._rows.header
        if "request_id" in columns:
            raise NeedsWholeError("rows are numbered by request_id")
        linked = batch.link_child.size or "shared_blocks" in columns
        if linked and self.kept + kept.size < self.read + len(batch):
            raise NeedsWholeError("rows refer to others, and some have no prompt")
        self._edges += batch.link_child.size
        self._refers |= bool(linked)
        own = self.read + batch.link_child
        self._earlier(batch.link_parent, own, batch.link_child, "a parent", places)
        blocks = batch.new_block_ids.size or "shared_blocks" in columns
        if not blocks:
            if self._blocks.lengths:
                self._blocks.lengths.extend([0] * len(batch))
            return
        if not header.block_size_tokens or header.hash_scope == "none":
            rule = "block ids need block_size_tokens and hash_scope (global or session) in the header"
            raise BadTraceError(
                rule, places[0], 'begin the file with {"kvfold_trace": 1, "block_size_tokens": …}'
            )
        if header.hash_scope == "session":
            raise NeedsWholeError("block ids mean something inside their session only")
        new = np.zeros(len(batch), np.int64) if batch.new_blocks is None else batch.new_blocks
        shared = columns.get("shared_blocks", np.zeros(len(batch), np.int64))
        if not self._blocks.lengths:
            self._blocks.lengths.extend([0] * self.read)
        self._blocks.lengths.extend((shared + new).tolist())
        rows = np.flatnonzero(shared)
        if rows.size:
            parent = columns.get("shared_parent", np.full(len(batch), -1))[rows]
            self._earlier(parent, self.read + rows, rows, "shared_parent", places)
            known = np.array([self._blocks.lengths[at] for at in parent.tolist()])
            if (wrong := rows[shared[rows] > known]).size:
                rule = "shared_blocks must be at most the blocks of shared_parent, got"
                raise BadTraceError(f"{rule} {shared[wrong[0]]}", places[wrong[0]], "correct the row")

    def _earlier(self, request_ids: Ints, own: Ints, at: Ints, name: str, places: Places) -> None:
        wrong = np.flatnonzero((request_ids < 0) | (request_ids >= own))
        if wrong.size:
            rule = f"{name} must be an earlier call, but call {request_ids[wrong[0]]} is not"
            raise BadTraceError(rule, places[at[wrong[0]]], "correct the reference")

    def _clock(self, batch: Batch, places: Places) -> None:
        if self._rows.per_s is None:
            arrival_s = batch.columns.get("arrival_time_s", np.full(len(batch), _NAN))
            alone = np.isnan(arrival_s)
            alone[batch.link_child] = False
            if alone.any():
                rule = "arrival_time_s may be left out only in a call that stands after its parent"
                place = places[int(alone.argmax())]
                raise BadTraceError(rule, place, "give the arrival, or put the parent first")
            known = arrival_s[~np.isnan(arrival_s)]
        else:
            stamps = batch.columns["stamp"]
            first, earliest = self._stamps or (int(stamps[0]), int(stamps[0]))
            self._stamps = first, min(earliest, int(stamps.min()))
            known = (stamps - first) / self._rows.per_s
        if known.size:
            if self._common:  # else the order of the file is that of the table
                self._late += int((np.diff(known, prepend=self._last_s) < 0).sum())
                self._last_s = float(known[-1])
            if self._late and self._refers:
                raise NeedsWholeError("rows refer to others, and are not in order of arrival")
            self._arrivals.add(known)

    def summary(self, sha256: str) -> Summary:
        rows, header = self._rows, self._rows.header
        gaps = Gaps()
        for arrival_s, _ in self._arrivals.pieces() if self._common else ():
            gaps.add(arrival_s)
        windows = [Windows(window_s, gaps.first_s) for window_s in (1.0, 60.0)] if gaps.count else []
        for arrival_s, _ in self._arrivals.pieces() if windows else ():
            for window in windows:
                window.add(arrival_s)
        (dispersion_1, _), (dispersion_60, peak_60) = [
            window.figures(self._arrivals.count) for window in windows
        ] or [(_NAN, _NAN)] * 2
        span_s = gaps.last_s - gaps.first_s if gaps.count else _NAN
        calls = Spill(np.int64)
        for counts in run_lengths(self._sessions):
            calls.add(counts)
        hashed = self._blocks.total > 0
        token_share, block_share, new_blocks = (
            self._blocks.hits(self._input_tokens) if hashed else (_NAN, _NAN, 0)
        )
        partials = self._blocks.partial - {"none"}
        partial = "none" if not partials else partials.pop() if len(partials) == 1 else "mixed"
        warnings = list(rows.warnings)
        if self._late and rows.per_s is not None:
            warnings.append(f"{self._late:,} rows stood before an earlier one: sorted by arrival")
        warnings += remarks(
            self._unknown_outputs,
            self._zero_outputs,
            header.hash_scope != "none",
            (gaps.count, gaps.zero, gaps.often_s, gaps.often) if self._common else None,
        )
        dropped = self.read - self.kept
        meta = Meta(
            format=rows.format,
            source=self._source,
            sha256=sha256,
            time_unit=rows.time_unit,
            clock=header.clock,
            time_zone=header.time_zone,
            block_size_tokens=header.block_size_tokens,
            partial_last=partial,
            hash_scope=header.hash_scope,
            rows_read=self.read,
            rows_kept=self.kept,
            drops={"zero_input_tokens": dropped} if dropped else {},
            warnings=tuple(dict.fromkeys(warnings)),
        )
        held = _ROW_BYTES * self.kept + _EDGE_BYTES * self._edges + 8 * new_blocks
        figures = {
            "format": meta.format,
            "source": meta.source,
            "sha256": sha256,
            "rows_read": meta.rows_read,
            "rows_kept": meta.rows_kept,
            "drops": meta.drops,
            "time_unit": meta.time_unit,
            "time_zone": meta.time_zone,
            "clock": meta.clock,
            "prompt_semantics": meta.prompt_semantics,
            "span_s": span_s,
            "rate_per_s": self._arrivals.count / span_s if span_s > 0 else _NAN,
            "interarrival_cv": (gaps.squares / gaps.count) ** 0.5 / gaps.mean_s if span_s > 0 else _NAN,
            "dispersion_1_s": dispersion_1,
            "dispersion_60_s": dispersion_60,
            "peak_over_mean_60_s": peak_60,
            "input_tokens": quantiles(self._inputs),
            "output_tokens": quantiles(self._outputs),
            "sessions": calls.count,
            "calls_per_session": quantiles(calls),
            "tool_wait_s": quantiles(self._tool),
            "human_wait_s": quantiles(self._human),
            "kv_occupancy": None,
            "block_size_tokens": meta.block_size_tokens or None,
            "partial_last": partial,
            "hash_scope": meta.hash_scope,
            "prefix_hit_token_share": token_share,
            "prefix_hit_block_share": block_share,
            "bytes_per_row": held / self.kept,
            "warnings": [*meta.warnings, *([_NOT_GIVEN] if calls.count else [])],
        }
        earliest = self._stamps[1] if self._stamps else 0
        return Summary(meta, figures, frozenset(self._used), earliest)
