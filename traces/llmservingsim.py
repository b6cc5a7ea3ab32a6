"""Workloads of LLMServingSim: JSONL or CSV, integer nanoseconds, single calls or agent sessions.

Source: github.com/casys-kaist/LLMServingSim, ``workloads/README.md``. A row with ``sub_requests`` is a session:
each call is sent ``tool_duration_ns`` after the one before it ended. Where every prompt has its token ids, prefix
blocks are made of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import nan
from typing import Annotated, Any, BinaryIO

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import Tokens, convert_row
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import sheet
from kvfold.traces.stamps import NS_PER_S
from kvfold.traces.table import Trace
from kvfold.traces.texts import chain_of_parts

#: Page size of vLLM, on which the tool's own prefix cache works.
BLOCK_TOKENS = 16
_Ns = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Call(msgspec.Struct):
    input_toks: Tokens
    output_toks: Tokens
    tool_duration_ns: _Ns = 0
    input_tok_ids: list[_TokenId] | None = None


class _Row(msgspec.Struct):
    arrival_time_ns: _Ns
    session_id: str | int | None = None
    sub_requests: list[_Call] | None = None
    input_toks: Tokens | None = None
    output_toks: Tokens | None = None
    input_tok_ids: list[_TokenId] | None = None


def read(stream: BinaryIO, source: str) -> Trace:
    """The calls of one file, those of sessions linked by their tools' waits. Raises BadTraceError."""
    calls = Calls(source)
    hashed = 0
    last: tuple[str, int, _Call] | None = None  # place, row and call before
    for number, at, row, call in calls.reading(_rows(stream, source)):
        place = f"{source}:{number}" + (f" (call {at + 1})" if row.sub_requests else "")
        if not call.input_toks:
            calls.drop("zero_input_tokens")
            continue
        ids = call.input_tok_ids
        if ids is not None and len(ids) != call.input_toks:
            rule = f"input_tok_ids must hold input_toks = {call.input_toks} ids, got {len(ids)}"
            raise BadTraceError(rule, place, "correct the row or leave the ids out")
        hashed += ids is not None
        session = f"{number}" if row.sub_requests else None
        follows = last if at and last and last[0] == session else None
        child = calls.add(
            place,
            number,
            nan if follows else row.arrival_time_ns / NS_PER_S,
            call.input_toks,
            call.output_toks,
            session=session,
            chain=() if ids is None else _chain(ids),
            name="" if row.session_id is None else str(row.session_id),
        )
        if follows:
            calls.link(child, follows[1], follows[2].tool_duration_ns / NS_PER_S, "tool", "recorded")
        if session is not None:
            last = session, child, call
    blocks: dict[str, Any] = {}
    if hashed and hashed == len(calls):
        blocks = {"block_tokens": BLOCK_TOKENS, "hash_scope": "global"}
    elif hashed:
        calls.warnings.append(f"only {hashed:,} prompts have token ids: no prefix blocks are made of them")
    return calls.trace("llmservingsim", "ns", **blocks)


def _rows(stream: BinaryIO, source: str) -> Iterator[tuple[int, int, _Row, _Call]]:
    """(line, position in its session, row, call)."""
    for number, cells in sheet(stream, source):
        place = f"{source}:{number}"
        row = convert_row(cells, _Row, place)
        for at, call in enumerate(row.sub_requests or [convert_row(cells, _Call, place)]):
            yield number, at, row, call


def _chain(ids: Sequence[int]) -> list[int]:
    whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    return chain_of_parts(
        array("Q", ids[at : at + BLOCK_TOKENS]).tobytes() for at in range(0, whole, BLOCK_TOKENS)
    )
