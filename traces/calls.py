"""The calls of a log in the order of its rows, on their way to a Trace: sorted, numbered, linked, counted."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import isnan, nan
from sys import intern
from typing import Any, TypeVar

import numpy as np

from kvfold.traces.columns import KIND, SOURCE, STATUS, Edges, assemble
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import Chains, partial_last
from kvfold.traces.table import Meta, Trace

T = TypeVar("T")

_INTS = ("input_tokens", "output_tokens", "reasoning_tokens", "recorded_cached_tokens", "source_row")
_FLOATS = ("recorded_e2e_s", "recorded_ttft_s")
_TEXTS = ("source_id", "model", "tenant", "tool_names")
#: Row of a parent, seconds from its end to the child, kind of that wait.
_Link = tuple[int, float, str]


class Calls:
    """Columns that grow by one call at a time.

    Arrivals are kept as whole ticks of ``ticks_per_s`` so that an epoch in nanoseconds loses nothing; a log
    without a unit of its own gives seconds (``ticks_per_s`` 0). Rows are numbered as they are added; sorting
    comes last. Sessions may be named by anything hashable.
    """

    def __init__(self, source: str, ticks_per_s: int = 0) -> None:
        self.source = source
        self.ticks_per_s = ticks_per_s
        self.rows_read = 0
        self.drops: Counter[str] = Counter()
        self.warnings: list[str] = []
        self._places: list[str] = []  # empty where file and line say it all
        self.session: list[Hashable] = []  # None: single-shot
        self.chains: list[Sequence[int]] = []
        self._stamps: Any = array("q" if ticks_per_s else "d")
        self._ints = {name: array("q") for name in _INTS}
        self._floats = {name: array("d") for name in _FLOATS}
        self._texts: dict[str, list[str]] = {name: [] for name in _TEXTS}
        self._status = array("b")
        self._agent = array("l")
        self._links: list[tuple[_Link, ...]] = []  # parents of each call
        self._wait_source: list[str] = []
        self._files: list[tuple[int, str]] = []  # first row of each file, and its name
        self._overlaps = 0

    def __len__(self) -> int:
        return len(self._places)

    def reading(self, rows: Iterable[T]) -> Iterator[T]:
        """The same rows, counted as read."""
        for row in rows:
            self.rows_read += 1
            yield row

    def drop(self, reason: str) -> None:
        """The row just read is not a call, or none that can be used."""
        self.drops[reason] += 1

    def add(
        self,
        place: str,
        line: int,
        arrival: float,
        input_tokens: int,
        output_tokens: int,
        *,
        session: Hashable = None,
        agent: int = 0,
        chain: Sequence[int] = (),
        reasoning: int = -1,
        cached: int = -1,
        e2e_s: float = nan,
        ttft_s: float = nan,
        status: str = "unknown",
        name: str = "",
        model: str = "",
        tenant: str = "",
        tools: str = "",
    ) -> int:
        """Append a call; its row. ``arrival`` in ticks, NaN if it follows from a parent (seconds only)."""
        file = place.rpartition(":")[0]
        if not self._files or file != self._files[-1][1]:
            self._files.append((len(self), file))
        self._places.append(place if chain else "")
        self._stamps.append(arrival)
        self.session.append(session)
        self._agent.append(agent)
        self.chains.append(chain)
        for column, number in zip(
            self._ints.values(), (input_tokens, output_tokens, reasoning, cached, line), strict=True
        ):
            column.append(number)
        self._floats["recorded_e2e_s"].append(e2e_s)
        self._floats["recorded_ttft_s"].append(ttft_s)
        self._status.append(STATUS[status])
        for texts, text in zip(self._texts.values(), (name, model, tenant, tools), strict=True):
            texts.append(intern(text))  # one object for all rows that say the same
        self._links.append(())
        self._wait_source.append("none")
        return len(self._places) - 1

    def link(self, child: int, parent: int, wait_s: float, kind: str, source: str) -> None:
        """``child`` comes ``wait_s`` after ``parent`` ended; the first link of a call is its recorded parent."""
        if not self._links[child]:
            self._wait_source[child] = "none" if isnan(wait_s) else source
        self._links[child] = (*self._links[child], (parent, wait_s, kind))

    def link_by_clock(self, child: int, parent: int, kind: str) -> None:
        """As ``link``, the wait taken from the stamps.

        From the end of the parent where its service time is recorded; else from its arrival, so that the wait
        holds that service too. Calls that overlap have a wait of 0 and are counted; without stamps it is unknown.
        """
        gap_s = (self._stamps[child] - self._stamps[parent]) / (self.ticks_per_s or 1)
        service_s = self._floats["recorded_e2e_s"][parent]
        source = "start_to_start" if isnan(service_s) else "end_to_start"
        wait_s = gap_s if isnan(service_s) else gap_s - service_s
        self._overlaps += wait_s < 0
        self.link(child, parent, 0.0 if wait_s < 0 else wait_s, kind, source)

    def follow_sessions(self, kind: str) -> None:
        """Link every call of a session and agent to the one before it on the clock."""
        last: dict[tuple[Hashable, int], int] = {}
        for row in self.order():
            if self.session[row] is not None:
                key = self.session[row], self._agent[row]
                if key in last:
                    self.link_by_clock(row, last[key], kind)
                last[key] = row

    def order(self) -> list[int]:
        """Rows by arrival, those of one instant as in the file; one without arrival stands after its parent."""
        moments = self._stamps
        if not self.ticks_per_s:
            moments = list(self._stamps)
            for row, links in enumerate(self._links):
                if isnan(moments[row]) and links:
                    moments[row] = moments[links[0][0]]
        order: list[int] = np.argsort(np.array(moments), kind="stable").tolist()
        return order

    def trace(
        self,
        format: str,
        time_unit: str,
        *,
        clock: str = "common",
        time_zone: str = "",
        block_tokens: int = 0,
        hash_scope: str = "none",
    ) -> Trace:
        """The calls sorted by arrival (in the order of the rows where sessions have their own clocks).

        Arrivals count from the earliest. Raises BadTraceError without calls, and for broken block chains.
        """
        if not self._places:
            gone = ", ".join(f"{count:,} {reason}" for reason, count in self.drops.items()) or "no rows"
            rule = f"a trace must have calls with a prompt, got none ({gone})"
            raise BadTraceError(rule, self.source, "check that the file is whole")
        order = self.order() if clock == "common" else list(range(len(self)))
        late = self._late() if clock == "common" else 0
        columns = self._columns(order, clock)
        edges, lost = self._edges(order, columns)
        meta_blocks: dict[str, Any] = {}
        if block_tokens:
            places = [self._place(row) for row in order]
            chains = Chains()
            for row, place in zip(order, places, strict=True):
                chain: Sequence[Any] = self.chains[row]
                if hash_scope == "session":
                    chain = [(self.session[row], block) for block in chain]
                chains.add(chain, place)
            columns |= chains.columns(local_ids=hash_scope == "session")
            meta_blocks = {
                "block_size_tokens": block_tokens,
                "hash_scope": hash_scope,
                "partial_last": partial_last(columns, columns["input_tokens"], block_tokens, places),
            }
        meta = Meta(
            format=format,
            source=self.source,
            sha256="",
            time_unit=time_unit,
            clock=clock,
            time_zone=time_zone,
            rows_read=self.rows_read,
            rows_kept=len(self),
            drops=dict(sorted(self.drops.items())),
            warnings=(*self.warnings, *self._remarks(late, lost)),
            **meta_blocks,
        )
        return assemble(meta, columns, edges)

    def _late(self) -> int:
        """Rows that stand after a later one of their file."""
        back = np.diff(np.array(self._stamps)) < 0
        back[[start - 1 for start, _ in self._files[1:]]] = False
        return int(back.sum())

    def _place(self, row: int) -> str:
        file = self._files[bisect_right(self._files, row, key=lambda item: item[0]) - 1][1]
        return self._places[row] or f"{file}:{self._ints['source_row'][row]}"

    def _columns(self, order: list[int], clock: str) -> dict[str, Any]:
        stamps = np.array(self._stamps)
        origin = stamps[~np.isnan(stamps)].min() if clock == "common" and not np.isnan(stamps).all() else 0
        columns: dict[str, Any] = {"arrival_time_s": ((stamps - origin) / (self.ticks_per_s or 1))[order]}
        columns |= {name: np.array(values)[order] for name, values in (self._ints | self._floats).items()}
        columns |= {name: [texts[row] for row in order] for name, texts in self._texts.items()}
        columns["status"] = np.array(self._status)[order]
        columns["agent_id"] = np.array(self._agent)[order]
        numbers: dict[Hashable, int] = {}
        calls: Counter[Hashable] = Counter()
        sessions, turns = [], []
        for row in order:
            name = self.session[row]
            sessions.append(-1 if name is None else numbers.setdefault(name, len(numbers)))
            turns.append(0 if name is None else calls[name])
            calls[name] += 1
        return columns | {"session_id": sessions, "turn_index": turns}

    def _edges(self, order: list[int], columns: dict[str, Any]) -> tuple[Edges, int]:
        """Edges in row order, and how many were left out because the parent arrives after its child."""
        edges, lost = Edges(), 0
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        row_of = place.tolist()
        names = ("parent_request_id", "wait_before_s", "wait_kind", "wait_source")
        parents, waits, kinds, sources = (columns.setdefault(name, []) for name in names)
        for at, row in enumerate(order):
            links = [link for link in self._links[row] if row_of[link[0]] < at]
            lost += len(self._links[row]) - len(links)
            for parent, wait_s, kind in links:
                edges.add(at, row_of[parent], wait_s, KIND[kind])
            parent, wait_s, kind = links[0] if links else (-1, nan, "none")
            parents.append(row_of[parent] if links else -1)
            waits.append(wait_s)
            kinds.append(KIND[kind])
            sources.append(SOURCE[self._wait_source[row] if links else "none"])
        return edges, lost

    def _remarks(self, late: int, lost: int) -> Iterator[str]:
        if late:
            yield f"{late:,} rows stood before an earlier one: sorted by arrival"
        if lost:
            yield f"{lost:,} parents arrive after their child: these links were left out"
        if whole := self._wait_source.count("start_to_start"):
            yield (
                f"{whole:,} waits count from arrival to arrival, since the source has no service times: they"
                " hold the service of the call before, so a replay waits too long by that"
            )
        if self._overlaps:
            yield f"{self._overlaps:,} calls arrive before the one they follow has ended: their wait is 0"
