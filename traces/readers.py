"""The reader of each format, imported when a file has it; and what a user may state that a log does not say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from math import isfinite
from typing import Any, BinaryIO

from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Trace

#: Module and function of each format; those of SEVERAL take (name, content) of many files, others one stream.
_READERS = {
    "azure": ("azure", "read"),
    "bailian": ("bailian", "read"),
    "burstgpt": ("burstgpt", "read"),
    "canonical": ("canonical", "read"),
    "claude-code": ("claude_code", "read"),
    "columns": ("column_map", "read_stated"),
    "guidellm": ("guidellm", "read"),
    "llmservingsim": ("llmservingsim", "read"),
    "lmcache": ("lmcache", "read"),
    "mooncake": ("mooncake", "read"),
    "mooncake-delta": ("mooncake_sessions", "read_delta"),
    "mooncake-sessions": ("mooncake_sessions", "read_whole"),
    "otel": ("otel", "read"),
    "ragpulse": ("ragpulse", "read"),
    "splitwise-sim": ("splitwise_sim", "read"),
    "swe-agent": ("swe_agent", "read"),
    "tracelab": ("tracelab", "read"),
    "vidur": ("vidur", "read"),
    "vllm-bench": ("vllm_bench", "read"),
    "weka": ("weka", "read"),
}
FORMATS = tuple(_READERS)
#: Formats whose sessions or tables may stand in several files.
SEVERAL = frozenset({"claude-code", "lmcache", "otel", "ragpulse", "swe-agent", "weka"})
_OF_TEXT = frozenset({"claude-code", "lmcache", "otel", "swe-agent"})


@dataclass(frozen=True, slots=True)
class Stated:
    """What the user says of a log: how to count the tokens of text, and the columns of a flat file.

    ``columns`` is a map as `column_map.parse` reads it. Raises ValueError for a rule that makes no sense.
    """

    chars_per_token: float | None = None
    columns: str = ""

    def __post_init__(self) -> None:
        rule = self.chars_per_token
        if rule is not None and not (isfinite(rule) and 0.1 <= rule <= 100):
            raise ValueError(f"chars_per_token must be from 0.1 to 100, got {rule}")

    @property
    def format(self) -> str | None:
        """The format that the statement implies."""
        return "columns" if self.columns else None


def read_one(kind: str, stream: BinaryIO, source: str, stated: Stated) -> Trace:
    """The trace in one file of format ``kind``. Raises BadTraceError."""
    if kind in SEVERAL:
        return read_several(kind, [(source, stream.read())], source, stated)
    more = (stated.columns,) if kind == "columns" else ()
    return _read(kind, source, stream, source, *more)


def read_several(kind: str, files: Iterable[tuple[str, bytes]], source: str, stated: Stated) -> Trace:
    """The trace in (name, content) of files that all have the format ``kind``. Raises BadTraceError."""
    more = {"chars_per_token": stated.chars_per_token} if kind in _OF_TEXT else {}
    return _read(kind, source, files, source, **more)


def _read(kind: str, place: str, *arguments: Any, **more: Any) -> Trace:
    module, name = _READERS[kind]
    try:
        trace: Trace = getattr(import_module(f"kvfold.traces.{module}"), name)(*arguments, **more)
    except RecursionError:  # in what a reader does with a document that its parser could just hold
        raise BadTraceError("JSON must not be nested without end", place, "restore the file") from None
    return trace
