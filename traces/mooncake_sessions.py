"""Mooncake rows with sessions, as aiperf and Dynamo write them: whole prompts, or only what each turn adds.

Sources: github.com/ai-dynamo/dynamo and aiperf (``mooncake``, ``mooncake-delta``). A row has ``session_id`` and a
``timestamp`` (milliseconds), or a ``delay`` (milliseconds from the end of the turn before). Both meanings of
``input_length`` look alike, so the user states which one a file has. In the delta form a prompt is the session's
prompts and outputs so far, plus ``input_length``. Blocks hold 512 tokens; ids of later delta turns cover what is
new, which need not begin on a block: they are left out, and the turn shares the whole blocks of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from math import nan
from typing import Annotated

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import BlockId, Tokens, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.mooncake import BLOCK_TOKENS
from kvfold.traces.sheet import json_lines
from kvfold.traces.table import Trace

_Ms = Annotated[float, msgspec.Meta(ge=0, le=1e14)]
#: Ids from here on are ours: for blocks that the delta form does not name.
_OWN_IDS = 2**62


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str | int
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId] = []
    timestamp: _Ms | None = None
    delay: _Ms | None = None
    request_id: str | int = ""


def read_whole(lines: Iterable[bytes], source: str) -> Trace:
    """Rows whose ``input_length`` is the whole prompt. Raises BadTraceError."""
    return _read(lines, source, delta=False)


def read_delta(lines: Iterable[bytes], source: str) -> Trace:
    """Rows whose ``input_length`` is what the turn adds. Raises BadTraceError."""
    return _read(lines, source, delta=True)


def _read(lines: Iterable[bytes], source: str, delta: bool) -> Trace:
    decoder = msgspec.json.Decoder(_Row)
    calls = Calls(source)
    last: dict[str | int, tuple[int, int, int]] = {}  # session -> row, prompt and context of its last turn
    own = count(_OWN_IDS)
    hashed = False
    for number, line in calls.reading(json_lines(lines)):
        place = f"{source}:{number}"
        row = decode_json(decoder, line, source, number)
        before, whole, context = last.get(row.session_id, (-1, 0, 0))
        hashed = hashed or bool(row.hash_ids)
        if before < 0 and row.timestamp is None:
            raise BadTraceError("the first row of a session must have a timestamp", place, "add it, in ms")
        prompt = row.input_length + (context if delta else 0)
        if not prompt:
            calls.drop("zero_input_tokens")
            continue
        blocks: list[int] = row.hash_ids
        if delta and before >= 0:
            blocks = [*calls.chains[before]][: whole // BLOCK_TOKENS]
            blocks += [next(own) for _ in range(prompt // BLOCK_TOKENS - len(blocks))]
        child = calls.add(
            place,
            number,
            nan if row.timestamp is None else row.timestamp / 1e3,
            prompt,
            row.output_length,
            session=row.session_id,
            chain=blocks,
            name=str(row.request_id or row.session_id),
        )
        if before >= 0 and row.delay is not None:
            calls.link(child, before, row.delay / 1e3, "unknown", "recorded")
        elif before >= 0:
            calls.link_by_clock(child, before, "unknown")
        last[row.session_id] = child, prompt, prompt + row.output_length
    if delta:
        calls.warnings.append(
            "the source holds only what is new in each prompt: summed up along each session, whose turns share"
            " the whole blocks of the turn before; block ids of later turns were left out"
        )
    format = "mooncake-delta" if delta else "mooncake-sessions"
    if not hashed:
        return calls.trace(format, "ms")
    return calls.trace(format, "ms", block_tokens=BLOCK_TOKENS, hash_scope="global")
