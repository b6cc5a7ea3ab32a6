"""TraceLab's coding-agent traces: its rounds as JSONL or Parquet, and its table for simulators as CSV.

Source: github.com/uw-syfi/TraceLab, ``README.md`` and ``artifacts/trace_facts/csv_export``. In both, the prompt is
the cached prefix plus what was appended; there are no prefix hashes.

* A round is one call. It begins with the last user message or tool result before its first output and ends with
  its last output (``timing_events``, ISO times). ``session_id`` repeats over projects and users.
* The table has ``arrival_time`` in milliseconds, synthetic and the same for a whole session, and
  ``tool_wait_after_ms`` of the tools *after* a row. There 0 may mean no tool, a person's turn or a tool of no
  length: unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from datetime import datetime
from itertools import chain, groupby
from math import nan
from typing import Annotated, Any, BinaryIO

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import Seconds, Tokens, convert_row
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import Row, sheet
from kvfold.traces.stamps import NS_PER_S, iso_ns
from kvfold.traces.table import Trace

_INPUTS = ("user_message", "tool_result")
_OUTPUTS = ("reasoning", "text", "tool_call")
_Ms = Seconds


class _Event(msgspec.Struct):
    event_type: str = ""
    timestamp: Any = None


class _Tool(msgspec.Struct):
    tool_name: str = ""
    tool_wall_latency_ms: Annotated[float, msgspec.Meta(ge=-1e14, le=1e14)] | None = None


class _Round(msgspec.Struct):
    session_id: str | int
    prefix_tokens: Tokens
    newly_append_tokens: Tokens
    output_tokens: Tokens | None = None
    reasoning_output_tokens: Tokens | None = None
    provider: str = ""
    user: str = ""
    project: str = ""
    round_index: int = 0
    model: str = ""
    timing_events: list[_Event] = []
    tools: list[_Tool] = []


class _Line(msgspec.Struct):
    id: str | int
    input_len: Tokens
    output_len: Tokens
    arrival_time: _Ms
    round_idx: Tokens
    tool_wait_after_ms: _Ms
    prefix_len: Tokens


def read(stream: BinaryIO, source: str) -> Trace:
    """The calls of one file of either kind. Raises BadTraceError."""
    rows = sheet(stream, source)
    first = next(rows, None)
    if first is None:
        return Calls(source).trace("tracelab", "ms")
    every = chain([first], rows)
    return (_rounds if "prefix_tokens" in first[1] else _table)(every, source)


def _rounds(rows: Iterable[Row], source: str) -> Trace:
    calls = Calls(source, NS_PER_S)
    tools_of: dict[int, list[_Tool]] = {}
    kinds: dict[int, str] = {}
    seen: Counter[tuple[Hashable, int]] = Counter()
    for number, cells in calls.reading(rows):
        place = f"{source}:{number}"
        row = convert_row(cells, _Round, place)
        prompt = row.prefix_tokens + row.newly_append_tokens
        if not prompt:
            calls.drop("zero_input_tokens")
            continue
        begin_ns, end_ns, kind = _span(row.timing_events, place)
        if begin_ns is None:
            calls.drop("no_timestamp")
            continue
        session = row.provider, row.user, row.project, row.session_id
        seen[session, row.round_index] += 1
        child = calls.add(
            place,
            number,
            begin_ns,
            prompt,
            -1 if row.output_tokens is None else row.output_tokens,
            session=session,
            reasoning=-1 if row.reasoning_output_tokens is None else row.reasoning_output_tokens,
            cached=row.prefix_tokens,
            e2e_s=nan if end_ns is None else max(0, end_ns - begin_ns) / NS_PER_S,
            name=str(row.session_id),
            model=row.model,
            tenant=row.provider,
            tools=",".join(dict.fromkeys(tool.tool_name for tool in row.tools if tool.tool_name)),
        )
        tools_of[child], kinds[child] = row.tools, kind
    last: dict[Hashable, int] = {}
    for child in calls.order():
        parent = last.get(calls.session[child])
        if parent is not None:
            walls_ms = [tool.tool_wall_latency_ms for tool in tools_of[parent]]
            known_ms = [wall for wall in walls_ms if wall is not None and wall >= 0]
            if kinds[child] == "tool" and known_ms:
                calls.link(child, parent, max(known_ms) / 1e3, "tool", "recorded")
            else:
                calls.link_by_clock(child, parent, kinds[child])
        last[calls.session[child]] = child
    if repeats := sum(times - 1 for times in seen.values()):
        calls.warnings.append(f"{repeats:,} rows repeat the round_index of their session: kept")
    return calls.trace("tracelab", "ms", time_zone="UTC")


def _span(events: list[_Event], place: str) -> tuple[int | None, int | None, str]:
    """When a round began and ended, in nanoseconds, and what it waited for."""
    inputs: list[tuple[int, str]] = []
    outputs: list[int] = []
    for event in events:
        stamp = event.timestamp.isoformat() if isinstance(event.timestamp, datetime) else event.timestamp
        if stamp is not None and event.event_type in _INPUTS:
            inputs.append((iso_ns(stamp, place)[0], event.event_type))
        elif stamp is not None and event.event_type in _OUTPUTS:
            outputs.append(iso_ns(stamp, place)[0])
    first = min(outputs, default=None)
    before = [item for item in inputs if first is None or item[0] <= first]
    kinds = {kind for _, kind in before}
    kind = (
        "unknown"
        if not kinds
        else "mixed"
        if len(kinds) > 1
        else "tool"
        if "tool_result" in kinds
        else "human"
    )
    begin = max((ns for ns, _ in before), default=first)
    return begin, max(outputs, default=None), kind


def _table(rows: Iterable[Row], source: str) -> Trace:
    calls = Calls(source)
    unknown = 0
    lines = [
        (number, convert_row(cells, _Line, f"{source}:{number}")) for number, cells in calls.reading(rows)
    ]
    lines.sort(key=lambda item: str(item[1].id))  # stable: rows of a session may stand apart
    for _, session in groupby(lines, key=lambda item: str(item[1].id)):
        last: tuple[int, _Line] | None = None
        for number, line in sorted(session, key=lambda item: item[1].round_idx):
            place = f"{source}:{number}"
            if last and last[1].round_idx == line.round_idx:
                rule = f"round_idx must differ inside session {line.id}, got {line.round_idx} twice"
                raise BadTraceError(rule, place, "correct the row or remove it")
            if not line.prefix_len + line.input_len:
                calls.drop("zero_input_tokens")
                continue
            child = calls.add(
                place,
                number,
                nan if last else line.arrival_time / 1e3,
                line.prefix_len + line.input_len,
                line.output_len,
                session=line.id,
                cached=line.prefix_len,
                name=str(line.id),
            )
            if last:
                wait_ms = last[1].tool_wait_after_ms
                unknown += not wait_ms
                known = (wait_ms / 1e3, "tool") if wait_ms else (nan, "unknown")
                calls.link(child, last[0], *known, "recorded")
            last = child, line
    if unknown:
        calls.warnings.append(
            f"{unknown:,} waits of 0 ms are unknown: a person's turn, no tool, or one of no length"
        )
    calls.warnings.append("arrivals are synthetic, one for each session")
    return calls.trace("tracelab", "ms")
