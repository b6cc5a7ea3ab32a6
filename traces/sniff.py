"""Which format a file has, told from its content, never from its name."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from kvfold.traces import azure
from kvfold.traces.canonical import PARQUET_MAGIC
from kvfold.traces.decode import UTF8_BOM, decode_json

FORMATS = ("azure", "mooncake", "weka", "canonical")
#: Bytes that show whether a file is binary.
_HEAD = 1024
#: A file with no line end up to here is not read further to find out.
_LONGEST_LINE = 1 << 26


def sniff(stream: BinaryIO, source: str) -> str | None:
    """The format, or None if it is none of ours; the stream is back at its start.

    Raises BadTraceError for something that begins like JSON and is not.
    """
    head = stream.read(_HEAD)
    stream.seek(0)
    if head.startswith(PARQUET_MAGIC):
        return "canonical"
    if b"\0" in head:
        return None
    line = stream.readline(_LONGEST_LINE).removeprefix(UTF8_BOM)
    try:
        if line.startswith(b"{"):
            return _of_keys(_keys(line, stream, source))
    finally:
        stream.seek(0)
    line = line.strip()
    if line == azure.HEADER:
        return "azure"
    if line.startswith(b"#") and b'"kvfold_trace"' in line:
        return "canonical"
    return "canonical" if b"arrival_time_s" in line.split(b",") else None


def _keys(line: bytes, stream: BinaryIO, source: str) -> set[str]:
    """Names in the first JSON object, which is the first line or, if it is printed on several, the whole."""
    decoder: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
    try:
        return set(decoder.decode(line))
    except (msgspec.DecodeError, RecursionError):
        return set(decode_json(decoder, line + stream.read(), source, 1).keys())


def _of_keys(keys: set[str]) -> str | None:
    if "kvfold_trace" in keys or {"arrival_time_s", "input_tokens"} <= keys:
        return "canonical"
    if {"timestamp", "input_length"} <= keys:
        return "mooncake"
    return "weka" if {"requests", "block_size"} <= keys else None
