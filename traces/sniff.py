"""Which format a file has, told from its content, never from its name."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

from kvfold.traces import azure
from kvfold.traces.canonical_parquet import MAGIC as PARQUET_MAGIC
from kvfold.traces.decode import UTF8_BOM, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.readers import FORMATS as FORMATS
from kvfold.traces.sheet import header_of

#: Bytes that show whether a file is binary.
_HEAD = 1024
#: A file with no line end up to here is not read further to find out.
_LONGEST_LINE = 1 << 26
#: Columns that a CSV file of each format has. The first match counts.
_COLUMNS = {
    "canonical": {"arrival_time_s"},
    "burstgpt": {"Timestamp", "Model", "Request tokens", "Response tokens"},
    "vidur": {"num_prefill_tokens", "num_decode_tokens"},
    "tracelab": {"input_len", "output_len", "round_idx", "tool_wait_after_ms", "prefix_len"},
    "llmservingsim": {"arrival_time_ns", "input_toks", "output_toks"},
    "splitwise-sim": {"arrival_timestamp", "prompt_size", "token_size"},
}
#: Keys that the first JSON object of each format has. The first match counts.
_KEYS = (
    ("canonical", {"kvfold_trace"}),
    ("canonical", {"arrival_time_s", "input_tokens"}),
    ("bailian", {"chat_id", "parent_chat_id", "input_length"}),
    ("weka", {"requests", "block_size"}),
    ("lmcache", {"timestamp", "input", "output", "session_id"}),
    ("tracelab", {"session_id", "prefix_tokens", "newly_append_tokens"}),
    ("llmservingsim", {"arrival_time_ns", "input_toks", "output_toks"}),
    ("llmservingsim", {"arrival_time_ns", "sub_requests"}),
    ("vllm-bench", {"input_lens", "output_lens", "ttfts"}),
    ("guidellm", {"benchmarks", "metadata"}),
    ("swe-agent", {"trajectory", "info"}),
    ("swe-agent", {"messages", "info"}),
    ("claude-code", {"loglines"}),
    ("claude-code", {"type", "sessionId"}),
    ("claude-code", {"type", "parentUuid"}),
    ("claude-code", {"type", "leafUuid"}),
    ("claude-code", {"type", "snapshot"}),
    ("otel", {"resourceSpans"}),
    ("otel", {"resource_spans"}),
    ("otel", {"spans"}),
    ("otel", {"span_id"}),
    ("otel", {"spanId"}),
    ("otel", {"context", "start_time"}),
)

_Object = dict[str, msgspec.Raw]


def sniff(stream: BinaryIO, source: str, format: str | None = None) -> str | None:
    """The format, or None if it is none of ours; the stream is back at its start.

    Raises BadTraceError for something that begins like JSON and is not, and where two formats look alike and
    ``format`` does not say which one it is.
    """
    head = stream.read(_HEAD)
    stream.seek(0)
    if head.startswith(PARQUET_MAGIC):
        return _of_parquet(stream, source)
    if b"\0" in head:
        return None
    line = stream.readline(_LONGEST_LINE).removeprefix(UTF8_BOM)
    try:
        if line.lstrip().startswith(b"{"):
            return _of_object(_first_object(line, stream, source), source, format)
        if line.lstrip().startswith(b"["):
            return _of_list(line + stream.read(), source)
    finally:
        stream.seek(0)
    if line.strip() == azure.HEADER:
        return "azure"
    if line.startswith(b"#") and b'"kvfold_trace"' in line:
        return "canonical"
    return _of_columns(header_of(line))


def _first_object(line: bytes, stream: BinaryIO, source: str) -> _Object:
    """The first JSON object, which is the first line or, if it is printed on several, the whole."""
    decoder: msgspec.json.Decoder[_Object] = msgspec.json.Decoder(_Object)
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return decode_json(decoder, line + stream.read(), source, 1)


def _of_object(first: _Object, source: str, format: str | None = None) -> str | None:
    for known, keys in _KEYS:
        if keys <= first.keys():
            return known
    if "input_length" in first and bytes(first.get("hash_ids", b"")).lstrip().startswith(b"{"):
        return "ragpulse"
    if "input_length" in first and "session_id" in first:
        if format in ("mooncake-sessions", "mooncake-delta"):
            return format
        rule = "rows with input_length and session_id may hold whole prompts or only what each turn adds"
        mend = "say which: --format mooncake-sessions for whole prompts, --format mooncake-delta for what is added"
        raise BadTraceError(rule, f"{source}:1", mend)
    if {"timestamp", "input_length"} <= first.keys():
        return "mooncake"
    return "ragpulse" if len(first) == 2 and "token_length" in first else None


def _of_list(data: bytes, source: str) -> str | None:
    """A list of messages is a run of mini-SWE-agent; a list of spans is an export of OpenTelemetry."""
    decoder: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
    items = decode_json(decoder, data, source, 1)
    if not items or not bytes(items[0]).lstrip().startswith(b"{"):
        return None
    first = decode_json(msgspec.json.Decoder(dict[str, Any]), bytes(items[0]), source, 1)
    if {"role", "content"} <= first.keys():
        return "swe-agent"
    return "otel" if _of_object({name: msgspec.Raw(b"0") for name in first}, source) == "otel" else None


def _of_columns(names: list[str]) -> str | None:
    return next((format for format, columns in _COLUMNS.items() if columns <= set(names)), None)


def _of_parquet(stream: BinaryIO, source: str) -> str:
    """Canonical unless the columns are those of another format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.ParquetFile(stream).schema_arrow.names
    except (pa.ArrowException, OSError, ValueError):
        return "canonical"  # whose reader says what is wrong
    finally:
        stream.seek(0)
    if {"session_id", "prefix_tokens", "newly_append_tokens"} <= set(names):
        return "tracelab"
    return _of_columns(names) or "canonical"
