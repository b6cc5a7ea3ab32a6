"""Spans of an OpenTelemetry export in one shape, whichever of its many the export has.

Known: OTLP JSON (``resourceSpans``), one object with ``spans``, a list of spans, one span or one OTLP object a
line, the console exporter of the Python SDK (``context``, ``parent_id``); attributes flat, nested, at the top
level of the span, or as OTLP key-value lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvfold.traces.decode import UTF8_BOM, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import json_lines
from kvfold.traces.stamps import iso_ns, number_ns

_FAILED = {"2", "ERROR", "STATUS_CODE_ERROR"}
_OK = {"1", "OK", "STATUS_CODE_OK"}


@dataclass(frozen=True, slots=True)
class Span:
    """One span; times in nanoseconds since 1970, ``end_ns`` None where it is not recorded."""

    place: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int | None
    zoned: bool
    status: str
    attributes: dict[str, Any]


def spans_of(data: bytes, source: str) -> Iterator[Span]:
    """The spans of one file in its order. Raises BadTraceError."""
    data = data.removeprefix(UTF8_BOM)
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
    first = data[: data.find(b"\n")] if b"\n" in data else data
    try:
        msgspec.json.decode(first)
        parts = list(json_lines(data.splitlines()))
    except (msgspec.DecodeError, RecursionError):
        parts = [(1, data)]  # one value on several lines
    for line, text in parts:
        for number, (raw, resource) in enumerate(_raw_spans(decode_json(decoder, text, source, line), {}), 1):
            yield _span(raw, resource, f"{source}:{line}" + (f" (span {number})" if len(parts) == 1 else ""))


def _raw_spans(value: Any, resource: dict[str, Any]) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """(span, attributes of its resource) in whatever groups they stand."""
    if isinstance(value, list):
        for item in value:
            yield from _raw_spans(item, resource)
        return
    if not isinstance(value, dict):
        yield {}, resource  # refused for its missing fields, at its place
        return
    own = value.get("resource")
    if isinstance(own, dict):
        resource = _flat(own.get("attributes"))
    groups = (
        "resourceSpans",
        "resource_spans",
        "scopeSpans",
        "scope_spans",
        "instrumentationLibrarySpans",
        "spans",
    )
    inner = [value[name] for name in groups if isinstance(value.get(name), list)]
    if inner:
        for group in inner:
            yield from _raw_spans(group, resource)
    else:
        yield value, resource


def _span(raw: Mapping[str, Any], resource: dict[str, Any], place: str) -> Span:
    context = raw.get("context") if isinstance(raw.get("context"), dict) else {}
    ids = {**raw, **(context or {})}
    start, zoned = _moment(
        raw, ("startTimeUnixNano", "start_time_unix_nano"), ("start_time", "startTime"), place
    )
    end, _ = _moment(raw, ("endTimeUnixNano", "end_time_unix_nano"), ("end_time", "endTime"), place)
    if start is None:
        raise BadTraceError(
            "a span must have a start time", place, "export spans with start_time, or remove the row"
        )
    if end is not None and end < start:
        raise BadTraceError(
            f"a span must end after it starts, got {(end - start) / 1e9:g} s", place, "correct the row"
        )
    status = raw.get("status")
    code = str(status.get("code", status.get("status_code")) if isinstance(status, dict) else status).upper()
    attributes = resource | _flat(raw.get("resource_attributes")) | _flat(raw.get("attributes"))
    attributes |= {name: value for name, value in _flat(raw).items() if name.startswith(("gen_ai.", "llm."))}
    return Span(
        place=place,
        trace=_text(ids, "trace_id", "traceId"),
        span=_text(ids, "span_id", "spanId"),
        parent=_text(ids, "parent_span_id", "parentSpanId", "parent_id"),
        start_ns=start,
        end_ns=end,
        zoned=zoned,
        status="failed" if code in _FAILED else "ok" if code in _OK else "unknown",
        attributes=attributes,
    )


def _moment(
    raw: Mapping[str, Any], nanos: tuple[str, ...], stamps: tuple[str, ...], place: str
) -> tuple[int | None, bool]:
    """A time from its first known name, and whether its zone is known; the unit comes from the name."""
    for name in nanos:
        if raw.get(name) not in (None, "", 0, "0"):  # OTLP writes an unset time as 0
            return number_ns(raw[name], "ns", place, name), True
    for name in stamps:
        if raw.get(name) is not None:
            return iso_ns(raw[name], place)
    return None, True


def _text(raw: Mapping[str, Any], *names: str) -> str:
    return next((str(raw[name]) for name in names if raw.get(name) is not None), "")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Attributes by dotted name, from nested objects or from OTLP's list of keys and typed values."""
    if isinstance(value, list) and all(isinstance(item, dict) and "key" in item for item in value):
        return {str(item["key"]): _any_value(item.get("value")) for item in value}
    if not isinstance(value, dict):
        return {}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            flat |= _flat(inner, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = inner
    return flat


def _any_value(value: Any) -> Any:
    """The value in OTLP's typed wrapper; 64-bit integers stand in it as text."""
    if not isinstance(value, dict):
        return value
    for name, inner in value.items():
        if name in ("intValue", "int_value"):
            return int(inner) if isinstance(inner, int) or str(inner).lstrip("-").isdecimal() else inner
        if name in ("arrayValue", "array_value"):
            return [_any_value(item) for item in (inner or {}).get("values", [])]
        if name in ("kvlistValue", "kvlist_value"):
            return _flat((inner or {}).get("values", []))
        return inner
    return None
