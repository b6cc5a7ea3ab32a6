"""Qwen-Bailian traces: JSONL, seconds, ids of chained 16-token blocks, turns that name their parent.

Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon (``*_blksz_16.jsonl``). ``input_length`` is the
whole prompt, history included. ``parent_chat_id`` is -1 for the first turn. The last block of a prompt may be
partial and has an id, which changes once the output has filled it: a turn need not extend its parent's last
block. There are no service times: waits count from arrival to arrival.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import BlockId, Seconds, Tokens, decode_json
from kvfold.traces.sheet import json_lines
from kvfold.traces.table import Trace

BLOCK_TOKENS = 16


class _Row(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    chat_id: int
    parent_chat_id: int
    timestamp: Seconds  # from any origin
    input_length: Tokens
    output_length: Tokens
    type: str
    turn: int
    hash_ids: list[BlockId]


def read(lines: Iterable[bytes], source: str) -> Trace:
    """The rows of one file. ``tenant`` holds the request type (text, search, image, …). Raises BadTraceError.

    A turn whose parent is not in the file starts a session of its own; such turns are counted. Where a chat id
    comes twice, a child belongs to the one that stands before it last.
    """
    decoder = msgspec.json.Decoder(_Row)
    calls = Calls(source)
    row_of: dict[int, int] = {}
    orphans = repeats = 0
    links: list[tuple[int, int]] = []
    for number, line in calls.reading(json_lines(lines)):
        row = decode_json(decoder, line, source, number)
        if not row.input_length:
            calls.drop("zero_input_tokens")
            continue
        parent = row_of.get(row.parent_chat_id, -1) if row.parent_chat_id >= 0 else -1
        orphans += parent < 0 <= row.parent_chat_id
        child = calls.add(
            f"{source}:{number}",
            number,
            row.timestamp,
            row.input_length,
            row.output_length,
            session=("chat", number) if parent < 0 else calls.session[parent],
            chain=row.hash_ids,
            name=str(row.chat_id),
            tenant=row.type,
        )
        if parent >= 0:
            links.append((child, parent))
        repeats += row.chat_id in row_of
        row_of[row.chat_id] = child
    for child, parent in links:
        calls.link_by_clock(child, parent, "unknown")
    if orphans:
        calls.warnings.append(
            f"{orphans:,} turns name a parent that is not before them: taken as first turns"
        )
    if repeats:
        calls.warnings.append(f"{repeats:,} rows repeat a chat_id: kept")
    return calls.trace("bailian", "s", block_tokens=BLOCK_TOKENS, hash_scope="global")
