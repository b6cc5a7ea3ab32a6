"""Claude Code session logs: JSONL of messages under ``~/.claude/projects``, one API call over several rows.

What the rows hold, and what is made of it:

* An API call writes one row per content block, all with its ``message.id`` and usage: counted once, with the
  largest usage. A resumed session copies rows of an older file: the same rule covers them.
* ``output_tokens`` is what had streamed when the row was written, often 2: unknown, unless a rule for text is
  stated, which then counts the characters of the blocks.
* The prompt is ``input_tokens`` + ``cache_creation_input_tokens`` + ``cache_read_input_tokens``.
* A call begins when the user row before it was written and ends with its last row. What it waited for is a
  tool where that row holds tool results (from ``tool_use`` to ``tool_result``), a person where it holds text.
* Rows with ``isSidechain`` are sub-agents, told apart by ``agentId`` or by the first row of their chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from typing import Any

import msgspec

from kvfold.traces import texts
from kvfold.traces.calls import Calls
from kvfold.traces.decode import Tokens, convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import json_lines
from kvfold.traces.stamps import NS_PER_S, iso_ns
from kvfold.traces.table import Trace

_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_SYNTHETIC = "<synthetic>"
#: Tools that run a sub-agent.
_SUBAGENT_TOOLS = {"Task", "Agent"}


class _Usage(msgspec.Struct):
    input_tokens: Tokens = 0
    cache_creation_input_tokens: Tokens = 0
    cache_read_input_tokens: Tokens = 0

    def prompt(self) -> int:
        return self.input_tokens + self.cache_creation_input_tokens + self.cache_read_input_tokens


@dataclass(slots=True)
class _Call:
    place: str
    line: int
    session: str
    thread: str  # "" for the main one
    begin_ns: int
    end_ns: int
    kind: str
    results: tuple[str, ...]  # tool_use ids whose results started it
    usage: _Usage
    model: str
    name: str
    tool_use_ns: dict[str, int] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    chars: int = 0
    known_begin: bool = True


#: (row, call) of a thread.
_Rows = list[tuple[int, _Call]]


@dataclass(slots=True)
class _Thread:
    """What has happened since the thread's last call."""

    stamp_ns: int | None = None
    results: list[str] = field(default_factory=list)
    text: bool = False


def read(files: Iterable[tuple[str, bytes]], source: str, *, chars_per_token: float | None = None) -> Trace:
    """The API calls of all files on one clock. Raises BadTraceError.

    Rows that are no call of a model are dropped by that name, and so are repeats of a call, synthetic messages,
    calls without usage or time, and lines that are no objects.
    """
    calls = Calls(source, NS_PER_S)
    found: dict[str, _Call] = {}
    for name, data in files:
        _File(name, found, calls).read(data)
    if not found and (left := calls.drops["no_usage"]):
        rule = f"a trace needs token counts, but none of the {left:,} answers has usage"
        raise BadTraceError(rule, source, "take the log that Claude Code wrote, not an export of its text")
    _link(calls, _add(calls, found.values(), chars_per_token))
    if found:
        unknown = (
            "output tokens are unknown: the log keeps what had streamed when a row was written;"
            " --chars-per-token estimates them from the text"
        )
        estimated = chars_per_token is not None and texts.remark(chars_per_token, 0, len(found))
        calls.warnings.append(estimated or unknown)
    if late := sum(not call.known_begin for call in found.values()):
        calls.warnings.append(f"{late:,} calls have no user row before them: they begin with their first row")
    return calls.trace("claude-code", "ms", time_zone="UTC")


class _File:
    """The rows of one file, read in order."""

    def __init__(self, name: str, found: dict[str, _Call], calls: Calls) -> None:
        self.name, self.found, self.calls = name, found, calls
        self.threads: defaultdict[tuple[str, str], _Thread] = defaultdict(_Thread)
        self.root_of: dict[str, str] = {}  # uuid of a side-chain row -> uuid of its chain's first row
        self.elsewhere = set(found)

    def read(self, data: bytes) -> None:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
        for number, row in self.calls.reading(self._rows(data, decoder)):
            if not isinstance(row, dict):
                self.calls.drop("no_object")
                continue
            place = f"{self.name}:{number}"
            session, thread = str(row.get("sessionId") or self.name), self._thread(row)
            stamp_ns = iso_ns(row["timestamp"], place)[0] if row.get("timestamp") is not None else None
            message = row.get("message")
            if row.get("type") == "assistant" and isinstance(message, dict):
                self._assistant(
                    row, message, stamp_ns, self.threads[session, thread], (session, thread), number
                )
                continue
            self.calls.drop("no_model_call")
            if row.get("type") == "user" and stamp_ns is not None:
                self._user(message, stamp_ns, self.threads[session, thread])

    def _rows(self, data: bytes, decoder: msgspec.json.Decoder[Any]) -> Iterator[tuple[int, Any]]:
        """(number, row) of a file of lines or of one object with ``loglines``."""
        if b'"loglines"' in data[:_HEAD]:
            document = decode_json(decoder, data, self.name, 1)
            yield from enumerate(document.get("loglines") or [] if isinstance(document, dict) else [], 1)
            return
        for number, line in json_lines(data.splitlines()):
            yield number, decode_json(decoder, line, self.name, number)

    def _thread(self, row: dict[str, Any]) -> str:
        """Name of the sub-agent that a row belongs to; empty for the main thread."""
        if not row.get("isSidechain"):
            return ""
        uuid, above = str(row.get("uuid")), str(row.get("parentUuid"))
        self.root_of[uuid] = self.root_of.get(above, uuid)
        return str(row.get("agentId") or self.root_of[uuid])

    def _user(self, message: Any, stamp_ns: int, thread: _Thread) -> None:
        content = message.get("content") if isinstance(message, dict) else None
        blocks = content if isinstance(content, list) else [content]
        results = [
            str(block.get("tool_use_id"))
            for block in blocks
            if isinstance(block, dict) and block.get("type") == "tool_result"
        ]
        thread.results += results
        thread.text = thread.text or not results
        thread.stamp_ns = stamp_ns

    def _assistant(
        self,
        row: dict[str, Any],
        message: dict[str, Any],
        stamp_ns: int | None,
        thread: _Thread,
        key: tuple[str, str],
        number: int,
    ) -> None:
        place = f"{self.name}:{number}"
        usage = message.get("usage")
        name = str(message.get("id") or row.get("uuid") or place)
        known = self.found.get(name)
        if message.get("model") == _SYNTHETIC:
            self.calls.drop("synthetic")
            return
        if not isinstance(usage, dict):
            self.calls.drop("no_usage")
            return
        if stamp_ns is None:
            self.calls.drop("no_timestamp")
            return
        counts = convert_row({n: usage[n] for n in _USAGE if usage.get(n) is not None}, _Usage, place)
        if known is None and not counts.prompt():
            self.calls.drop("zero_input_tokens")
            return
        if known is not None:
            self.calls.drop("repeats_message_id")
            if name in self.elsewhere:
                thread.stamp_ns, thread.results, thread.text = None, [], False
                return
            known.end_ns = max(known.end_ns, stamp_ns)
            known.usage = max(known.usage, counts, key=_Usage.prompt)
            call = known
        else:
            kind = "mixed" if thread.results and thread.text else "tool" if thread.results else "human"
            begin_ns = stamp_ns if thread.stamp_ns is None else min(thread.stamp_ns, stamp_ns)
            call = _Call(
                place=place,
                line=number,
                session=key[0],
                thread=key[1],
                begin_ns=begin_ns,
                end_ns=stamp_ns,
                kind=kind if thread.stamp_ns is not None else "unknown",
                results=tuple(thread.results),
                usage=counts,
                model=str(message.get("model") or ""),
                name=name,
                known_begin=thread.stamp_ns is not None,
            )
            self.found[name] = call
            thread.stamp_ns, thread.results, thread.text = None, [], False
        content = message.get("content")
        for block in content if isinstance(content, list) else []:
            if isinstance(block, dict):
                call.chars += sum(len(_plain(block.get(part))) for part in ("text", "thinking", "input"))
                if block.get("type") == "tool_use":
                    call.tool_use_ns[str(block.get("id"))] = stamp_ns
                    call.tools.append(str(block.get("name") or ""))


#: A document with ``loglines`` shows it in its first bytes.
_HEAD = 200


def _add(calls: Calls, found: Iterable[_Call], chars_per_token: float | None) -> dict[tuple[str, str], _Rows]:
    """Add the calls; (row, call) of each thread of each session, by time."""
    agents: dict[str, list[str]] = defaultdict(lambda: [""])  # session -> its threads, the main one first
    threads: dict[tuple[str, str], _Rows] = defaultdict(list)
    for call in sorted(found, key=lambda call: call.begin_ns):
        names = agents[call.session]
        if call.thread not in names:
            names.append(call.thread)
        row = calls.add(
            call.place,
            call.line,
            call.begin_ns,
            call.usage.prompt(),
            -1 if chars_per_token is None else texts.tokens_of(call.chars, chars_per_token),
            session=call.session,
            agent=names.index(call.thread),
            cached=call.usage.cache_read_input_tokens,
            e2e_s=(call.end_ns - call.begin_ns) / NS_PER_S if call.known_begin else nan,
            status="ok",
            name=call.name,
            model=call.model,
            tools=",".join(dict.fromkeys(filter(None, call.tools))),
        )
        threads[call.session, call.thread].append((row, call))
    return threads


def _link(calls: Calls, threads: dict[tuple[str, str], _Rows]) -> None:
    """Each call follows the one before it in its thread; sub-agents start from and join the main thread."""
    for (session, thread), rows in threads.items():
        for (above, before), (row, call) in pairwise(rows):
            last = _joined(threads, session, before, call) if not thread else []
            if last:
                gap_s = (call.begin_ns - max(inner.end_ns for _, inner in last)) / NS_PER_S
                calls.link(row, above, 0.0, "subagent", "end_to_start")
                for inner_row, _ in last:
                    calls.link(row, inner_row, gap_s, "subagent", "end_to_start")
                continue
            used_ns = [before.tool_use_ns[name] for name in call.results if name in before.tool_use_ns]
            if used_ns:
                calls.link(row, above, max(0, call.begin_ns - max(used_ns)) / NS_PER_S, call.kind, "recorded")
            else:
                calls.link_by_clock(row, above, call.kind)
        if thread:
            main = threads.get((session, ""), [])
            at = bisect_right(main, rows[0][1].begin_ns, key=lambda item: item[1].begin_ns)
            if at:
                calls.link_by_clock(rows[0][0], main[at - 1][0], "subagent")


def _joined(threads: dict[tuple[str, str], _Rows], session: str, before: _Call, call: _Call) -> _Rows:
    """Last calls of the sub-agents that ran between two calls of the main thread, if the first asked for them."""
    if not _SUBAGENT_TOOLS.intersection(before.tools):
        return []
    inner = [rows for (of, thread), rows in threads.items() if of == session and thread]
    spans = [(rows[0][1].begin_ns, rows[-1]) for rows in inner]
    return [last for first, last in spans if before.begin_ns <= first and last[1].end_ns <= call.begin_ns]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()
