"""Any flat CSV, JSONL or Parquet log, read by a map that says which column holds what and in which unit.

A map is written ``arrival_time_s=ts:ms,input_tokens=prompt_len,output_tokens=gen_len``: our field, the log's
column, and the unit where the field has one. Units are never told from the size of the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from math import nan
from typing import Any, BinaryIO

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import Tokens, convert_row
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import sheet
from kvfold.traces.stamps import NS_PER_S, UNITS, iso_ns, number_ns
from kvfold.traces.table import WAIT_KINDS, Trace

_SPANS = ("wait_before_s", "recorded_e2e_s", "recorded_ttft_s")
_COUNTS = ("input_tokens", "output_tokens", "reasoning_tokens", "recorded_cached_tokens")
_TEXTS = ("session_id", "source_id", "model", "tenant", "tool_names")
_UNITS: dict[str, tuple[str, ...]] = {
    "arrival_time_s": (*UNITS, "iso"),
    **dict.fromkeys(_SPANS, tuple(UNITS)),
    "input_tokens": ("whole", "delta"),
    **dict.fromkeys((*_COUNTS[1:], *_TEXTS), ()),
}
_NEEDED = ("arrival_time_s", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Columns by field, their units, and what kind of wait ``wait_before_s`` is."""

    columns: dict[str, str]
    units: dict[str, str]
    wait_kind: str = "unknown"


def parse(text: str) -> ColumnMap:
    """The map that ``text`` spells: ``field=column[:unit[:kind of wait]]``, separated by commas.

    Raises ValueError that names the rule.
    """
    columns: dict[str, str] = {}
    units: dict[str, str] = {}
    kind = "unknown"
    for part in text.split(","):
        field, given, rest = part.strip().partition("=")
        column, *more = rest.split(":")
        if field not in _UNITS or not given or not column:
            raise ValueError(
                f"each part must be FIELD=COLUMN[:UNIT] with a field of {', '.join(_UNITS)}, got {part!r}"
            )
        if field in columns:
            raise ValueError(f"{field} may be mapped once, got it twice")
        if field == "wait_before_s" and len(more) == 2:
            kind = more.pop()
            if kind not in WAIT_KINDS:
                raise ValueError(f"a kind of wait must be one of {', '.join(WAIT_KINDS)}, got {kind!r}")
        allowed = _UNITS[field]
        if len(more) > 1 or (more and more[0] not in allowed):
            rule = f"one of {', '.join(allowed)}" if allowed else "left out"
            raise ValueError(f"the unit of {field} must be {rule}, got {':'.join(more)!r}")
        if not more and allowed and field != "input_tokens":
            raise ValueError(
                f"{field} needs its unit: {field}={column}:UNIT with one of {', '.join(allowed)}"
            )
        columns[field] = column
        if more:
            units[field] = more[0]
    if missing := [field for field in _NEEDED if field not in columns]:
        raise ValueError(f"the map must name {', '.join(_NEEDED)}; {', '.join(missing)} is missing")
    if "session_id" in columns and "input_tokens" not in units:
        rule = "with session_id, input_tokens must say whether prompts are whole or only what is new"
        raise ValueError(f"{rule}: input_tokens={columns['input_tokens']}:whole or :delta")
    if "wait_before_s" in columns and "session_id" not in columns:
        raise ValueError("wait_before_s needs session_id, which says what the wait follows")
    return ColumnMap(columns, units, kind)


class _Counts(msgspec.Struct):
    input_tokens: Tokens
    output_tokens: Tokens | None = None
    reasoning_tokens: Tokens | None = None
    recorded_cached_tokens: Tokens | None = None


def read(stream: BinaryIO, source: str, columns: ColumnMap, format: str = "columns") -> Trace:
    """The rows of one file as the map says. Raises BadTraceError.

    An empty cell is unknown, and so is every field that is not mapped; only an arrival and a prompt are needed.
    """
    calls = Calls(source, NS_PER_S)
    waits: dict[int, float] = {}
    context: Counter[Hashable] = Counter()
    zoned: Counter[bool] = Counter()
    delta = columns.units.get("input_tokens") == "delta"
    unmapped: set[str] = set()
    for number, cells in calls.reading(sheet(stream, source)):
        place = f"{source}:{number}"
        unmapped |= cells.keys()
        row = {field: cells[column] for field, column in columns.columns.items() if column in cells}
        for field in ("arrival_time_s", "input_tokens"):
            if field not in row:
                rule = f"a row must have {field} in the column {columns.columns[field]!r}"
                raise BadTraceError(rule, place, f"its columns are {', '.join(map(repr, cells))}")
        counts = convert_row({name: row[name] for name in _COUNTS if name in row}, _Counts, place)
        if not counts.input_tokens:
            calls.drop("zero_input_tokens")
            continue
        if columns.units["arrival_time_s"] == "iso":
            stamp, has_zone = iso_ns(row["arrival_time_s"], place)
            zoned[has_zone] += 1
        else:
            stamp = number_ns(row["arrival_time_s"], columns.units["arrival_time_s"], place, "arrival_time_s")
        spans = {
            name: number_ns(row[name], columns.units[name], place, name) / NS_PER_S
            for name in _SPANS
            if name in row
        }
        session = str(row["session_id"]) if "session_id" in row else None
        prompt = counts.input_tokens
        if delta and session is not None:
            if counts.output_tokens is None:
                rule = "prompts given as deltas need output_tokens on every row, to sum up what came before"
                raise BadTraceError(rule, place, "fill it in or map whole prompts")
            prompt += context[session]
            context[session] = prompt + counts.output_tokens
        child = calls.add(
            place,
            number,
            stamp,
            prompt,
            _known(counts.output_tokens),
            session=session,
            reasoning=_known(counts.reasoning_tokens),
            cached=_known(counts.recorded_cached_tokens),
            e2e_s=spans.get("recorded_e2e_s", nan),
            ttft_s=spans.get("recorded_ttft_s", nan),
            name=str(row.get("source_id", "")),
            model=str(row.get("model", "")),
            tenant=str(row.get("tenant", "")),
            tools=str(row.get("tool_names", "")),
        )
        if "wait_before_s" in spans:
            waits[child] = spans["wait_before_s"]
    _follow(calls, waits, columns.wait_kind)
    if delta:
        calls.warnings.append(
            "the source holds only what is new in each prompt: summed up along each session"
        )
    left = sorted(unmapped - set(columns.columns.values()))
    if left and format == "columns":
        calls.warnings.append(f"columns that are not mapped: {', '.join(left)}")
    if len(zoned) > 1:
        calls.warnings.append(
            f"{zoned[False]:,} stamps without a zone stand beside others with one: taken as UTC"
        )
    zone = "UTC" if zoned[True] else ""
    return calls.trace(format, columns.units["arrival_time_s"], time_zone=zone)


def read_stated(stream: BinaryIO, source: str, text: str) -> Trace:
    """As ``read``, with the map that ``text`` spells. Raises ValueError for a bad map, BadTraceError."""
    if not text:
        raise ValueError("the format columns needs a map of its columns, got none")
    return read(stream, source, parse(text))


def _known(count: int | None) -> int:
    return -1 if count is None else count


def _follow(calls: Calls, waits: dict[int, float], kind: str) -> None:
    """Link each call of a session to the one before it, with the recorded wait where there is one."""
    last: dict[Hashable, int] = {}
    for row in calls.order():
        session: Any = calls.session[row]
        if session is None:
            continue
        if session in last:
            if row in waits:
                calls.link(row, last[session], waits[row], kind, "recorded")
            else:
                calls.link_by_clock(row, last[session], kind)
        last[session] = row
