"""Batches of canonical rows gathered into a Trace: sorted, renumbered, references and block chains checked."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvfold.traces.batch import Batch, runs
from kvfold.traces.columns import DEFAULTS, TEXTS, Edges, assemble, by_arrival
from kvfold.traces.delta import delta_columns
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import Chains, partial_last
from kvfold.traces.row import Header
from kvfold.traces.table import Ints, Meta, Trace


def gather(batches: Iterable[Batch], header: Header, source: str) -> Trace:
    """A Trace of the rows of one file. Raises BadTraceError.

    Rows of a common clock are sorted by arrival; a call without one follows its first parent. Rows that carry
    whole chains in ``new_block_ids`` are brought to delta form. Rows without a prompt are dropped and counted.
    """
    table = Table(batches)
    check_rows(len(table.lines), header, source)
    order = _Order(table, source, sort=header.clock == "common")
    kept = order.kept
    if not kept.size:
        raise BadTraceError("a trace must have rows, got none with a prompt", source, "restore the file")
    columns: dict[str, Any] = {}
    for name in (*DEFAULTS, *TEXTS):
        if name in table.columns:
            values = table.columns.pop(name)
            columns[name] = [values[at] for at in kept.tolist()] if name in TEXTS else values[kept]
    places = Places(source, table.lines[kept])
    edges = order.edges(places)
    first_parent = np.full(kept.size, -1)
    first_parent[edges.child[::-1]] = edges.parent[::-1]  # the first one wins
    columns["parent_request_id"] = first_parent
    partial = "none"
    if table.new_block_ids.size or np.any(columns.get("shared_blocks", 0)):
        columns |= _chains(table, columns, order, header, places)
        partial = partial_last(columns, columns["input_tokens"], header.block_size_tokens, places)
    else:
        columns.pop("shared_parent", None)
    dropped = len(table.lines) - kept.size
    meta = Meta(
        format="canonical",
        source=source,
        sha256="",
        time_unit="s",
        clock=header.clock,
        time_zone=header.time_zone,
        block_size_tokens=header.block_size_tokens,
        partial_last=partial,
        hash_scope=header.hash_scope,
        rows_read=len(table.lines),
        rows_kept=kept.size,
        drops={"zero_input_tokens": dropped} if dropped else {},
        warnings=tuple(header.warnings),
    )
    return assemble(meta, columns, edges)


def check_rows(rows: int, header: Header, source: str) -> None:
    """Raises BadTraceError where the header states another number of rows than there are: a file cut off."""
    if header.rows not in (None, rows):
        rule = f"the file must have the {header.rows:,} rows that its header states, got {rows:,}"
        raise BadTraceError(rule, source, "restore the rest of it, or correct `rows` in the header")


class Places(Sequence[str]):
    """``file:line`` of each row, made only when it is asked for."""

    def __init__(self, source: str, lines: Ints) -> None:
        self._source, self._lines = source, lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: Any) -> Any:
        return f"{self._source}:{self._lines[row]}"


class Table:
    """All batches as one, still in the order of the file."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        parts: dict[str, list[Any]] = {}
        texts: dict[str, list[str]] = {}
        lines, blocks, ids, links = [], [], [], []
        rows = 0
        for batch in batches:
            for name, values in batch.columns.items():
                if name in TEXTS:
                    texts.setdefault(name, [""] * rows).extend(values)
                else:
                    if name not in parts:
                        parts[name] = [np.full(rows, DEFAULTS[name][1], values.dtype)] if rows else []
                    parts[name].append(values)
            for name in parts.keys() - batch.columns.keys():
                parts[name].append(np.full(len(batch), DEFAULTS[name][1], parts[name][0].dtype))
            for name in texts.keys() - batch.columns.keys():
                texts[name].extend([""] * len(batch))
            if batch.link_child.size:
                links.append((batch.link_child + rows, batch.link_parent, batch.link_wait_s, batch.link_kind))
            if batch.new_blocks is not None:
                ids.append(batch.new_block_ids)
            blocks.append(np.zeros(len(batch), np.int64) if batch.new_blocks is None else batch.new_blocks)
            lines.append(batch.lines)
            rows += len(batch)
        self.lines: Ints = _joined(lines)
        self.new_blocks: Ints = _joined(blocks)
        self.new_block_ids: Ints = _joined(ids)
        self.columns: dict[str, Any] = texts | {name: _joined(parts.pop(name)) for name in [*parts]}
        child, parent, wait_s, kind = zip(*links, strict=True) if links else ((), (), (), ())
        self.link_child: Ints = _joined(child)
        self.link_parent: Ints = _joined(parent)
        self.link_wait_s = _joined(wait_s).astype(np.float64)
        self.link_kind = _joined(kind)

    def chains(self, rows: Ints) -> tuple[Ints, Ints]:
        """The block ids of ``rows``, one row after another, and how many each has."""
        lengths = self.new_blocks[rows]
        starts = (np.cumsum(self.new_blocks) - self.new_blocks)[rows]
        return runs(self.new_block_ids, starts, lengths), lengths


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class _Order:
    """Which rows of the file are kept, in which order, and where each request_id went."""

    def __init__(self, table: Table, source: str, sort: bool) -> None:
        self._table, self._source = table, source
        rows = np.arange(len(table.lines))
        given = table.columns.pop("request_id", None)
        self._ids: Ints | None = None  # sorted; None: each row's id is its position
        if given is not None:
            ids = np.where(given < 0, rows, given)
            self._at = np.argsort(ids, kind="stable")
            self._ids = ids[self._at]
            if repeated := np.flatnonzero(np.diff(self._ids) == 0).tolist():
                first = min(repeated, key=lambda at: self._at[at])
                last = np.searchsorted(self._ids, self._ids[first], "right") - 1
                place = self._place(self._at[last])
                rule = f"request_id must be unique, got {self._ids[first]} here and in "
                mend = "number the rows anew or leave request_id out"
                raise BadTraceError(rule + self._place(self._at[first]), place, mend)
        self.kept: Ints = np.flatnonzero(table.columns.get("input_tokens", rows))
        moments = self._moments()
        if sort:
            self.kept = self.kept[by_arrival(moments[self.kept])]
        self._row = np.full(len(rows) + 1, -1)  # the last entry is for a position of -1
        self._row[self.kept] = np.arange(self.kept.size)

    def _place(self, at: Any) -> str:
        return f"{self._source}:{self._table.lines[at]}"

    def _positions(self, request_ids: Ints) -> Ints:
        """Where in the file each id stands; -1 where it does not."""
        if self._ids is None:
            return np.where(request_ids < len(self._table.lines), request_ids, -1)
        found = np.searchsorted(self._ids, request_ids)
        found[found == len(self._ids)] = 0
        return np.where(self._ids[found] == request_ids, self._at[found], -1)

    def _moments(self) -> Any:
        """Arrival of each row, or of its first parent where it has none of its own."""
        table = self._table
        moments = table.columns.get("arrival_time_s", np.full(len(table.lines), np.nan)).copy()
        missing = self.kept[np.isnan(moments[self.kept])]
        first_link = np.searchsorted(table.link_child, missing)
        parents = np.full(missing.size, -1)
        linked = first_link < table.link_child.size
        linked[linked] = table.link_child[first_link[linked]] == missing[linked]
        parents[linked] = self._positions(table.link_parent[first_link[linked]])
        for at, parent in zip(missing.tolist(), parents.tolist(), strict=True):
            if not 0 <= parent < at:
                rule = "arrival_time_s may be left out only in a call that stands after its parent"
                raise BadTraceError(rule, self._place(at), "give the arrival, or put the parent first")
            moments[at] = moments[parent]
        return moments

    def rows_of(self, request_ids: Ints, rows: Ints, name: str, places: Sequence[str]) -> Ints:
        """The Trace rows of calls that ``rows`` refer to, each of which must be before its row."""
        at = self._positions(request_ids)
        found = self._row[at]
        wrong = np.flatnonzero((found < 0) | (found >= rows))
        if wrong.size:
            first = wrong[rows[wrong].argmin()]
            why = (
                "is not in the file"
                if at[first] < 0
                else "has no prompt"
                if found[first] < 0
                else "arrives later"
            )
            rule = f"{name} must be an earlier call, but call {request_ids[first]} {why}"
            raise BadTraceError(rule, places[rows[first]], "correct the reference")
        return found

    def edges(self, places: Sequence[str]) -> Edges:
        """The links of kept rows, in row order of the child."""
        table = self._table
        child = self._row[table.link_child]
        ours = np.flatnonzero(child >= 0)
        ours = ours[np.argsort(child[ours], kind="stable")]
        child = child[ours]
        parent = self.rows_of(table.link_parent[ours], child, "a parent", places)
        wait_s, kind = table.link_wait_s[ours], table.link_kind[ours].astype(np.int8)
        return Edges(
            array("q", child.tobytes()),
            array("q", parent.tobytes()),
            array("d", wait_s.tobytes()),
            array("b", kind.tobytes()),
        )


def _chains(
    table: Table, columns: dict[str, Any], order: _Order, header: Header, places: Sequence[str]
) -> dict[str, Any]:
    """The delta columns; built anew where an id comes twice, since rows may hold whole chains."""
    if not header.block_size_tokens or header.hash_scope == "none":
        rule = "block ids need block_size_tokens and hash_scope (global or session) in the header"
        mend = 'begin the file with {"kvfold_trace": 1, "block_size_tokens": …}'
        raise BadTraceError(rule, places[0], mend)
    kept = order.kept
    new_blocks = table.new_blocks[kept]
    none = np.full(kept.size, -1)
    shared = columns.get("shared_blocks", np.zeros(kept.size, np.int64))
    sessions = columns.get("session_id", none)
    parent = none.copy()
    rows = np.flatnonzero(shared)
    named = columns.get("shared_parent", none)[rows]
    parent[rows] = order.rows_of(np.where(named < 0, -1, named), rows, "shared_parent", places)
    lengths = shared + new_blocks
    scoped = header.hash_scope == "session"
    short = rows[shared[rows] > lengths[parent[rows]]]
    if short.size:
        row = short[0]
        rule = f"shared_blocks must be at most the {lengths[parent[row]]} blocks of shared_parent, got "
        raise BadTraceError(f"{rule}{shared[row]}", places[row], "correct the row")
    if scoped and (sessions < 0).any():
        place = places[(sessions < 0).argmax()]
        raise BadTraceError("session-scoped block ids need a session_id", place, "add it")
    other = rows[sessions[parent[rows]] != sessions[rows]] if scoped else rows[:0]
    if other.size:
        row = other[0]
        rule = f"shared_parent must be in session {sessions[row]}, got one of {sessions[parent[row]]}"
        raise BadTraceError(rule, places[row], "correct the row")
    ids, _ = table.chains(kept)
    if len(np.unique(ids)) == len(ids):
        return {
            "shared_parent": parent,
            "shared_blocks": shared,
            "new_block_start": np.cumsum(new_blocks) - new_blocks,
            "new_blocks": new_blocks,
            "block_ids": ids,
        }
    if not shared.any():
        return delta_columns(ids, new_blocks, places, sessions.astype(np.int64) if scoped else None)
    chains = Chains()
    whole: list[list[Any]] = []
    for row, end in enumerate(np.cumsum(new_blocks).tolist()):
        new = ids[end - new_blocks[row] : end].tolist()
        above = whole[parent[row]][: shared[row]] if parent[row] >= 0 else []
        whole.append([*above, *([(int(sessions[row]), block) for block in new] if scoped else new)])
        chains.add(whole[-1], places[row])
    return chains.columns(local_ids=scoped)
