"""Canonical rows gathered into a Trace: sorted, renumbered, references and block chains checked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import nan
from typing import Any

import numpy as np

from kvfold.traces.columns import TEXTS, Edges, assemble, by_arrival
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import Chains, partial_last
from kvfold.traces.row import SECONDS, WORDS, Header, Row, links_of
from kvfold.traces.table import Meta, Trace

_PLAIN = (
    *TEXTS,
    *("session_id", "turn_index", "agent_id", "input_tokens", "output_tokens"),
    *("reasoning_tokens", "recorded_cached_tokens"),
)


def gather(rows: Sequence[Row], lines: Sequence[int], header: Header, source: str) -> Trace:
    """A Trace of the rows of one file; ``lines`` says where each stands. Raises BadTraceError.

    Rows of a common clock are sorted by arrival; a call without one follows its first parent. Rows that carry
    whole chains in ``new_block_ids`` are brought to delta form. Rows without a prompt are dropped and counted.
    """
    if header.rows is not None and header.rows != len(rows):
        rule = f"the file must have the {header.rows:,} rows that its header states, got {len(rows):,}"
        raise BadTraceError(rule, source, "restore the rest of it, or correct `rows` in the header")
    order = _Order(rows, [f"{source}:{line}" for line in lines], sort=header.clock == "common")
    if not order.kept:
        raise BadTraceError("a trace must have rows, got none with a prompt", source, "restore the file")
    kept = [rows[at] for at in order.kept]
    columns: dict[str, Any] = {name: [getattr(row, name) for row in kept] for name in _PLAIN}
    for name in SECONDS:
        values = [getattr(row, name) for row in kept]
        columns[name] = [nan if value is None else value for value in values]
    for name, words in WORDS.items():
        code = dict(zip(words, count(), strict=False))
        columns[name] = [code[getattr(row, name)] for row in kept]
    columns["source_row"] = [row.source_row for row in kept]
    if header.rows is None:  # not written by kvfold: where a row names no source, this file is it
        own = zip(columns["source_row"], order.kept, strict=True)
        columns["source_row"] = [lines[at] if given < 0 else given for given, at in own]
    edges = order.edges()
    columns["parent_request_id"] = np.full(len(kept), -1)
    for child, parent in zip(reversed(edges.child), reversed(edges.parent), strict=True):
        columns["parent_request_id"][child] = parent  # the first one wins
    partial = "none"
    if any(row.new_block_ids or row.shared_blocks for row in kept):
        places = [order.places[at] for at in order.kept]
        columns |= _chains(kept, order, header, places)
        partial = partial_last(columns, np.array(columns["input_tokens"]), header.block_size_tokens, places)
    dropped = len(rows) - len(kept)
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
        rows_read=len(rows),
        rows_kept=len(kept),
        drops={"zero_input_tokens": dropped} if dropped else {},
        warnings=tuple(header.warnings),
    )
    return assemble(meta, columns, edges)


class _Order:
    """Which rows of the file are kept, in which order, and where each request_id went."""

    def __init__(self, rows: Sequence[Row], places: list[str], sort: bool) -> None:
        self.places = places
        ids = [at if row.request_id < 0 else row.request_id for at, row in enumerate(rows)]
        self._at = dict(zip(ids, count(), strict=False))
        if len(self._at) != len(ids):
            first = next(at for at, request_id in enumerate(ids) if self._at[request_id] != at)
            place = places[self._at[ids[first]]]
            rule = f"request_id must be unique, got {ids[first]} here and in {places[first]}"
            raise BadTraceError(rule, place, "number the rows anew or leave request_id out")
        self._links = [links_of(row, place) for row, place in zip(rows, places, strict=True)]
        self.kept = [at for at, row in enumerate(rows) if row.input_tokens]
        moments = self._moments(rows)
        if sort and self.kept:
            self.kept = [self.kept[at] for at in by_arrival(np.array([moments[at] for at in self.kept]))]
        self._row = dict(zip(self.kept, count(), strict=False))

    def _moments(self, rows: Sequence[Row]) -> list[float]:
        """Arrival of each row, or of its first parent where it has none of its own."""
        moments: list[float] = []
        for at, row in enumerate(rows):
            moment = row.arrival_time_s
            if moment is None and self._links[at]:
                parent = self._at.get(self._links[at][0][0], at)
                moment = moments[parent] if parent < at else None
            if moment is None:
                rule = "arrival_time_s may be left out only in a call that stands after its parent"
                raise BadTraceError(rule, self.places[at], "give the arrival, or put the parent first")
            moments.append(moment)
        return moments

    def row_of(self, request_id: int, row: int, name: str) -> int:
        """The Trace row of ``request_id``, which row ``row`` refers to and which must be before it."""
        at = self._at.get(request_id)
        found = None if at is None else self._row.get(at)
        if found is None or found >= row:
            why = (
                "is not in the file" if at is None else "has no prompt" if found is None else "arrives later"
            )
            rule = f"{name} must be an earlier call, but call {request_id} {why}"
            raise BadTraceError(rule, self.places[self.kept[row]], "correct the reference")
        return found

    def edges(self) -> Edges:
        edges = Edges()
        for row, at in enumerate(self.kept):
            for parent, wait_s, kind in self._links[at]:
                edges.add(row, self.row_of(parent, row, "a parent"), wait_s, kind)
        return edges


def _chains(rows: Sequence[Row], order: _Order, header: Header, places: Sequence[str]) -> dict[str, Any]:
    """The delta columns; built anew where an id comes twice, since rows may hold whole chains."""
    if not header.block_size_tokens or header.hash_scope == "none":
        rule = "block ids need block_size_tokens and hash_scope (global or session) in the header"
        raise BadTraceError(
            rule, places[0], 'begin the file with {"kvfold_trace": 1, "block_size_tokens": …}'
        )
    scoped = header.hash_scope == "session"
    parents: list[int] = []
    lengths: list[int] = []
    for at, row in enumerate(rows):
        parent = order.row_of(row.shared_parent, at, "shared_parent") if row.shared_blocks else -1
        if row.shared_blocks > (lengths[parent] if parent >= 0 else 0):
            rule = f"shared_blocks must be at most the {lengths[parent]} blocks of shared_parent"
            raise BadTraceError(f"{rule}, got {row.shared_blocks}", places[at], "correct the row")
        if scoped and row.session_id < 0:
            raise BadTraceError("session-scoped block ids need a session_id", places[at], "add it")
        if scoped and parent >= 0 and rows[parent].session_id != row.session_id:
            rule = f"shared_parent must be in session {row.session_id}, got one of {rows[parent].session_id}"
            raise BadTraceError(rule, places[at], "correct the row")
        parents.append(parent)
        lengths.append(row.shared_blocks + len(row.new_block_ids))
    ids = [block for row in rows for block in row.new_block_ids]
    if len(set(ids)) == len(ids):
        new_blocks = np.array([len(row.new_block_ids) for row in rows], np.int64)
        return {
            "shared_parent": parents,
            "shared_blocks": [row.shared_blocks for row in rows],
            "new_block_start": np.cumsum(new_blocks) - new_blocks,
            "new_blocks": new_blocks,
            "block_ids": np.array(ids, np.int64),
        }
    chains = Chains()
    whole: list[list[Any]] = []
    for row, parent, place in zip(rows, parents, places, strict=True):
        new = [(row.session_id, block) for block in row.new_block_ids] if scoped else row.new_block_ids
        whole.append([*(whole[parent][: row.shared_blocks] if parent >= 0 else ()), *new])
        chains.add(whole[-1], place)
    return chains.columns(local_ids=scoped)
