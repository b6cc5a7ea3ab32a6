"""RAGPulse, a week of a university's RAG service: JSONL, seconds as text, prompts as sets of content chunks.

Source: github.com/flashserve/RAGPulse, ``data/``. ``hash_ids`` holds five lists of ids (system prompt, retrieved
passages, history, web search, user input). An id is a chunk of text wherever it stands, not a prefix block, and
the passages come in changing order: the trace has no prefix hashes, and what a cache of whole chunks would hit
is only told in the warnings. The files beside the trace give the tokens of each id; a prompt has 6 to 12 tokens
more than its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import BlockId, Tokens, convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.sheet import json_lines
from kvfold.traces.table import Trace

_Chunk = tuple[str, int]
#: Name of an id in the files of chunk lengths, and the list of ``hash_ids`` it belongs to, in prompt order.
_LISTS = {
    "sys_prompt_id": "sys_prompt",
    "passage_id": "passages_ids",
    "history_id": "history",
    "web_search_id": "web_search",
    "user_input_id": "user_input",
}


class _Chunks(msgspec.Struct, forbid_unknown_fields=True):
    sys_prompt: list[BlockId]
    passages_ids: list[BlockId]
    history: list[BlockId]
    web_search: list[BlockId]
    user_input: list[BlockId]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Annotated[str, msgspec.Meta(pattern=r"^\d{1,11}$")]  # s
    input_length: Tokens
    output_length: Tokens
    hash_ids: _Chunks
    session_id: str


def read(files: Iterable[tuple[str, bytes]], source: str) -> Trace:
    """The trace, and the chunk lengths where their files are given too. Raises BadTraceError.

    Calls of a session follow each other; the wait between them is a person's, from arrival to arrival.
    """
    calls = Calls(source)
    tokens_of: dict[_Chunk, int] = {}
    prompts: list[list[_Chunk]] = []
    traces: list[str] = []
    decoder = msgspec.json.Decoder(_Row)
    for name, data in files:
        lines = json_lines(data.splitlines())
        if b'"token_length"' in data[:_HEAD]:
            tokens_of |= _lengths(lines, name)
            continue
        traces.append(name)
        for number, line in calls.reading(lines):
            row = decode_json(decoder, line, name, number)
            if not row.input_length:
                calls.drop("zero_input_tokens")
                continue
            calls.add(
                f"{name}:{number}",
                number,
                float(row.timestamp),
                row.input_length,
                row.output_length,
                session=row.session_id,
                name=row.session_id,
            )
            prompts.append([(at, id) for at in _LISTS.values() for id in getattr(row.hash_ids, at)])
    if len(traces) != 1:
        rule = f"one file must be the trace, got {', '.join(traces) or 'only files of chunk lengths'}"
        raise BadTraceError(rule, source, "name the trace or its folder")
    calls.follow_sessions("human")
    calls.warnings.append(_reuse([prompts[row] for row in calls.order()], tokens_of))
    return calls.trace("ragpulse", "s")


#: A file of chunk lengths shows it in its first bytes.
_HEAD = 200


def _lengths(lines: Iterable[tuple[int, bytes]], name: str) -> dict[_Chunk, int]:
    decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
    tokens_of = {}
    for number, line in lines:
        row = decode_json(decoder, line, name, number)
        kind = next((key for key in _LISTS if key in row), None)
        if kind is None or "token_length" not in row:
            rule = "a row of chunk lengths must have an id and token_length"
            raise BadTraceError(rule, f"{name}:{number}", "correct the row or remove it")
        counts = convert_row({"tokens": row["token_length"], "id": row[kind]}, _Length, f"{name}:{number}")
        tokens_of[_LISTS[kind], counts.id] = counts.tokens
    return tokens_of


class _Length(msgspec.Struct):
    tokens: Tokens
    id: BlockId


def _reuse(prompts: list[list[_Chunk]], tokens_of: dict[_Chunk, int]) -> str:
    """What an unlimited cache would find again, by chunk wherever it stands and by whole prefix."""
    seen: set[_Chunk] = set()
    prefixes: dict[_Chunk, Any] = {}
    chunks = as_set = as_prefix = tokens = set_tokens = 0
    for prompt in prompts:
        known = [chunk in seen for chunk in prompt]
        lengths = [tokens_of.get(chunk, 0) for chunk in prompt]
        chunks, tokens = chunks + len(prompt), tokens + sum(lengths)
        as_set += sum(known)
        set_tokens += sum(length for length, hit in zip(lengths, known, strict=True) if hit)
        seen.update(prompt)
        node = prefixes
        for chunk in prompt:
            as_prefix += chunk in node
            node = node.setdefault(chunk, {})
    share = 100 / max(1, chunks)
    text = (
        f"prompts are unordered sets of chunks, not prefix blocks: of {chunks:,} chunks {as_set * share:.1f} %"
        f" came before in any place, {as_prefix * share:.1f} % in the same prefix; a replay shares none of them"
    )
    if not tokens:
        return f"{text}; tokens of the chunks unknown, their files are not beside the trace"
    return f"{text}; by tokens {100 * set_tokens / tokens:.1f} % came before in any place"
