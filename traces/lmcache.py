"""LMCache agent traces: JSONL of texts, epoch microseconds, rows in no order of time, one session a file.

Source: github.com/LMCache/lmcache-agent-trace. ``input`` is the whole prompt. There are no token counts, so
the user must state a rule (``texts``); no end times, so waits count from arrival to arrival. An empty output is
unknown, since the files leave out the calls of tools that a model emitted instead of text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvfold.traces import texts
from kvfold.traces.calls import Calls
from kvfold.traces.decode import decode_json
from kvfold.traces.sheet import json_lines
from kvfold.traces.table import Trace


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=10**17)]  # us since 1970
    input: str
    output: str
    session_id: str


def read(files: Iterable[tuple[str, bytes]], source: str, *, chars_per_token: float | None = None) -> Trace:
    """Calls of all files on one clock. Raises BadTraceError, also without a rule for the tokens."""
    calls = Calls(source, ticks_per_s=10**6)
    decoder = msgspec.json.Decoder(_Row)
    texts_only = outputs = 0
    for name, data in files:
        for number, line in calls.reading(json_lines(data.splitlines())):
            row = decode_json(decoder, line, name, number)
            if not row.input:
                calls.drop("empty_input")
                continue
            if chars_per_token is None:
                texts_only += 1
                continue
            outputs += bool(row.output)
            calls.add(
                f"{name}:{number}",
                number,
                row.timestamp,
                texts.tokens_of(len(row.input), chars_per_token),
                texts.tokens_of(len(row.output), chars_per_token) if row.output else -1,
                session=row.session_id,
                chain=texts.chain_of(row.input, chars_per_token),
                name=row.session_id,
            )
    if chars_per_token is None:
        raise texts.no_counts(source, texts_only)
    calls.warnings.append(texts.remark(chars_per_token, len(calls), outputs))
    calls.follow_sessions("unknown")
    return calls.trace("lmcache", "us", time_zone="UTC", block_tokens=texts.BLOCK_TOKENS, hash_scope="global")
