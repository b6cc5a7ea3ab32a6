"""WEKA / kv-cache-tester Claude Code sessions: one JSON object a file, seconds on the session's own clock.

Source: github.com/callanjfox/kv-cache-tester, ``traces/``. Block ids are local to a file and shared by its
sub-agents; blocks hold 64 tokens, the last partial one has no id. What the files do not say outright was
checked on all 710 files of the archive:

* ``think_time`` is the gap since the last call *with a recorded api_time* ended, which need not be the call
  before: 4,158 waits follow a streaming call that has no api_time. Added up this way, the edges below give
  back the recorded arrival within 2 s on all but 7 of 48,508 calls.
* The ``t`` of a completed sub-agent's marker is when its result came back; it started ``duration_ms``
  earlier, within 1.2 s of the end of the call that spawned it (57 of 59). An ``async_launched`` one (no
  duration) started at ``t``. Inner ``t`` counts from that start; re-issued files that hold absolute times
  instead are recognised.

Columns and edges. ``parent_request_id``, ``wait_before_s`` and ``wait_kind`` are as recorded: the call from
whose end the client measured, the gap, and what arrived. ``edge_*`` are for replay, and count no span of
service twice:

* one edge carries the recorded gap, from the call whose end it was measured from; if that is not the call
  before, a second edge with wait 0 keeps the order;
* after completed sub-agents, each of their last calls has an edge with the gap between the end of the last
  one to end and this call (kind subagent), and edges to the main thread have wait 0, since the sub-agents
  cover it;
* a sub-agent's first call follows the main call that had ended when it started (kind subagent). One launched
  asynchronously joins nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, Literal

import msgspec
import numpy as np

from kvfold.traces.columns import KIND, SOURCE, STATUS, Edges, assemble
from kvfold.traces.decode import UTF8_BOM, BlockId, Seconds, SomeTokens, Tokens, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import Chains, partial_last
from kvfold.traces.table import Meta, Trace

#: Marker times are ms, call times whole seconds: two stamps of one event differ by less than this.
_CLOCK_STEP_S = 1.0


class _Call(msgspec.Struct, tag_field="type", tag="n", gc=False):
    t: Seconds
    in_: Tokens = msgspec.field(name="in")
    out: Tokens
    hash_ids: list[BlockId]
    input_types: list[str] = []
    model: str = ""
    stop: str = ""
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    ttft: Seconds | None = None


class _Streamed(_Call, tag="s", gc=False):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent", gc=False):
    t: Seconds
    duration_ms: Seconds | None
    requests: list[_Call | _Streamed]
    agent_id: str = ""


class _Session(msgspec.Struct, gc=False):
    id: str
    block_size: SomeTokens
    hash_id_scope: Literal["local"]
    requests: list[_Call | _Streamed | _Subagent]


#: The last row of a completed sub-agent and when it ended, in seconds.
_Join = tuple[int, float]


@dataclass(slots=True)
class _Thread:
    """One agent's calls so far. ``timed`` is the last row with a recorded end; -1 after a dropped call."""

    agent: int
    name: str
    timed: int = -1
    rows: list[int] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # NaN if unknown


class _Reader:
    """Columns of all sessions so far."""

    def __init__(self) -> None:
        self.columns: defaultdict[str, list[Any]] = defaultdict(list)
        self.edges = Edges()
        self.chains = Chains()
        self.places: list[str] = []
        self.file = ""
        self.session_id = -1
        self.turn_index = 0
        self.first_file: dict[tuple[tuple[Any, ...], ...], str] = {}  # by all requests of the session
        self.repeats: list[str] = []
        self.count: Counter[str] = Counter()

    def session(self, session: _Session, file: str) -> None:
        self.chains.forget()
        self.file = file
        self.session_id += 1
        self.turn_index = 0
        first_row = len(self.places)
        main = _Thread(0, session.id)
        agents = 0
        joins: list[_Join] = []
        for number, item in enumerate(session.requests, 1):
            if isinstance(item, _Subagent):
                agents += 1
                joins += self.subagent(item, agents, main, number)
            elif self.call(item, main, item.t, number, joins):
                joins = []
        names = ("agent_id", "arrival_time_s", "input_tokens", "output_tokens")
        key = tuple(zip(*(self.columns[name][first_row:] for name in names), strict=True))
        if key and self.first_file.setdefault(key, file) != file:
            self.repeats.append(f"{file} (= {self.first_file[key]})")

    def subagent(self, marker: _Subagent, agent: int, main: _Thread, number: int) -> list[_Join]:
        """Append a sub-agent's calls; the end that the next main call waits for, if any."""
        start_s = marker.t if marker.duration_ms is None else max(0.0, marker.t - marker.duration_ms / 1e3)
        first_s = marker.requests[0].t if marker.requests else 0.0
        shift_s = start_s
        if first_s > _CLOCK_STEP_S:
            if min(abs(first_s - start_s), abs(first_s - marker.t)) > _CLOCK_STEP_S:
                raise BadTraceError(
                    f"the first t of sub-agent {marker.agent_id} (requests[{number - 1}]) must be 0 or its"
                    f" start {start_s:g} s, got {first_s:g}",
                    f"{self.file}:1",
                    "write the sub-agent's times relative to its start",
                )
            shift_s = 0.0
            self.count["absolute"] += 1
        thread = _Thread(agent, f"{main.name}/{marker.agent_id or agent}")
        for inner, call in enumerate(marker.requests, 1):
            self.call(call, thread, shift_s + call.t, inner, spawner=main)
        if marker.duration_ms is None:
            self.count["async"] += 1
            return []
        if not thread.rows:
            return []
        end_s = thread.ends_s[-1]
        return [(thread.rows[-1], marker.t if isnan(end_s) else end_s)]

    def call(
        self,
        call: _Call,
        thread: _Thread,
        start_s: float,
        number: int,
        joins: Sequence[_Join] = (),
        spawner: _Thread | None = None,
    ) -> bool:
        """Append one call; False if it was dropped."""
        self.count["read"] += 1
        if not call.in_:
            self.count["zero_input_tokens"] += 1
            thread.timed = -1
            return False
        row = len(self.places)
        place = f"{self.file}:1 ({thread.name} request {number})"
        wait_s, kind, source, parent = nan, KIND["none"], SOURCE["none"], -1
        if thread.rows:
            parent, wait_s, kind = self.link(row, call, thread, start_s, joins)
            source = SOURCE["none"] if isnan(wait_s) else SOURCE["recorded"]
            self.count["no_think"] += call.think_time is None
        elif spawner is not None and spawner.rows:
            at = max(0, bisect_right(spawner.starts_s, start_s) - 1)
            parent, end_s, kind = spawner.rows[at], spawner.ends_s[at], KIND["subagent"]
            wait_s = nan if isnan(end_s) else max(0.0, start_s - end_s)
            source = SOURCE["none"] if isnan(wait_s) else SOURCE["end_to_start"]
            self.edges.add(row, parent, wait_s, kind)
        self.count["no_api"] += call.api_time is None
        values = {
            "source_id": thread.name,
            "source_row": number,
            "session_id": self.session_id,
            "turn_index": self.turn_index,
            "agent_id": thread.agent,
            "parent_request_id": parent,
            "arrival_time_s": start_s,
            "wait_before_s": wait_s,
            "wait_kind": kind,
            "wait_source": source,
            "input_tokens": call.in_,
            "output_tokens": call.out,
            "recorded_e2e_s": nan if call.api_time is None else call.api_time,
            "recorded_ttft_s": nan if call.ttft is None else call.ttft,
            "status": STATUS["ok"] if call.stop else STATUS["unknown"],
            "model": call.model,
        }
        for name, value in values.items():
            self.columns[name].append(value)
        self.chains.add(call.hash_ids, place)
        self.places.append(place)
        self.turn_index += 1
        if call.api_time is not None:
            thread.timed = row
        thread.rows.append(row)
        thread.starts_s.append(start_s)
        thread.ends_s.append(nan if call.api_time is None else start_s + call.api_time)
        return True

    def link(
        self, row: int, call: _Call, thread: _Thread, start_s: float, joins: Sequence[_Join]
    ) -> tuple[int, float, int]:
        """Add the edges of a call that is not its thread's first; its recorded parent, wait and kind."""
        kind, previous = _kind(call.input_types), thread.rows[-1]
        if call.think_time is None or thread.timed < 0:
            parent, wait_s = previous, nan
        else:
            parent, wait_s = thread.timed, call.think_time
        self.count["earlier_end"] += parent != previous
        if joins:
            gap_s = max(0.0, start_s - max(end_s for _, end_s in joins))
            self.edges.add(row, parent, 0.0, KIND["subagent"])
        else:
            self.edges.add(row, parent, wait_s, kind)
        if parent != previous:
            self.edges.add(row, previous, 0.0, KIND["none"])
        for last_row, _ in joins:
            self.edges.add(row, last_row, gap_s, KIND["subagent"])
        return parent, wait_s, kind


def read(files: Iterable[tuple[str, bytes]], source: str) -> Trace:
    """Sessions from (file name, content), one after another in the given order. Raises BadTraceError.

    Rows keep the order of the files, parents before children. Files that repeat the requests of another are
    kept and named in the warnings. Block ids are numbered anew so that two sessions never share a number.
    """
    decoder = msgspec.json.Decoder(_Session)
    reader = _Reader()
    block_tokens = 0
    for name, data in files:
        session = decode_json(decoder, data.removeprefix(UTF8_BOM), name, 1)
        if block_tokens not in (0, session.block_size):
            raise BadTraceError(
                f"block_size must be the same in all files, got {session.block_size} after {block_tokens}",
                f"{name}:1",
                "load files of one block size at a time",
            )
        block_tokens = session.block_size
        reader.session(session, name)
    if not reader.places:
        raise BadTraceError(
            "a trace must have calls, got none with a prompt", source, "check that the files are whole"
        )
    columns = reader.columns | reader.chains.columns(local_ids=True)
    count = reader.count
    dropped = count["zero_input_tokens"]
    meta = Meta(
        format="weka",
        source=source,
        sha256="",
        time_unit="s",
        clock="session",
        block_size_tokens=block_tokens,
        partial_last=partial_last(columns, np.array(columns["input_tokens"]), block_tokens, reader.places),
        hash_scope="session",
        rows_read=count["read"],
        rows_kept=len(reader.places),
        drops={"zero_input_tokens": dropped} if dropped else {},
        warnings=tuple(_warnings(count, reader.repeats)),
    )
    return assemble(meta, columns, reader.edges)


def _kind(input_types: list[str]) -> int:
    """What arrived between two calls; exactly a tool result or exactly text, else mixed."""
    if not input_types:
        return KIND["unknown"]
    if len(input_types) > 1:
        return KIND["mixed"]
    return {"tool_result": KIND["tool"], "text": KIND["human"]}.get(input_types[0], KIND["mixed"])


def _warnings(count: Counter[str], repeats: list[str]) -> Iterable[str]:
    if count["no_think"]:
        yield f"think_time unknown on {count['no_think']:,} calls: their waits are unknown"
    if count["no_api"]:
        yield f"api_time unknown on {count['no_api']:,} calls"
    if count["earlier_end"]:
        yield (
            f"think_time on {count['earlier_end']:,} calls counts from the end of an earlier call than the one"
            " before, which has no api_time: these waits hold that call's service too"
        )
    if count["async"]:
        yield f"{count['async']:,} sub-agents have no recorded end: no call waits for them"
    if count["absolute"]:
        yield f"{count['absolute']:,} sub-agents have absolute times: taken as they stand"
    if repeats:
        yield f"{len(repeats):,} files repeat another file's requests, kept: {', '.join(repeats)}"
