"""Sessions inferred from prefix chains, for a trace whose source names none (Mooncake)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvfold.traces.columns import KIND, SOURCE, Edges, with_warnings
from kvfold.traces.mooncake import NO_SESSIONS
from kvfold.traces.prefix import chain_of
from kvfold.traces.table import Trace

#: One block alone is a system prompt that every call shares.
_LEAST_BLOCKS = 2


def infer_turns(trace: Trace) -> tuple[Trace, str]:
    """Calls that continue an earlier prompt as turns of one session, with one line that says what was done.

    A call follows the latest earlier one whose whole blocks, two or more, are the longest beginning of its own
    prompt, if its prompt is longer. Waits count from arrival to arrival, of kind unknown: they hold the service
    of the turn before. Mooncake's conversation trace gets 3,875 links, whose prompts exceed the prompt and
    output before by 28 tokens at the median. Raises ValueError where sessions are known or ids are missing.
    """
    if trace.meta.hash_scope != "global" or (trace.session_id >= 0).any() or len(trace.edge_child):
        rule = "turns can be inferred only from global block ids and without sessions"
        raise ValueError(f"{rule}, got hash scope {trace.meta.hash_scope}")
    parents = _parents(trace)
    session, turn = np.empty(len(trace), np.int32), np.zeros(len(trace), np.int32)
    wait_s = np.full(len(trace), np.nan)
    edges = Edges()
    sessions = 0
    for row, parent in enumerate(parents.tolist()):
        if parent < 0:
            session[row], sessions = sessions, sessions + 1
            continue
        session[row], turn[row] = session[parent], turn[parent] + 1
        wait_s[row] = trace.arrival_time_s[row] - trace.arrival_time_s[parent]
        edges.add(row, parent, wait_s[row], KIND["unknown"])
    links = len(edges.child)
    text = (
        f"sessions are inferred from prefix chains: {links:,} calls continue an earlier one, {sessions:,}"
        " sessions; their waits count from arrival to arrival and hold the service of the turn before"
    )
    linked = parents >= 0
    changed = replace(
        trace,
        session_id=session,
        turn_index=turn,
        parent_request_id=parents,
        wait_before_s=wait_s,
        wait_kind=np.where(linked, KIND["unknown"], KIND["none"]).astype(np.int8),
        wait_source=np.where(linked, SOURCE["start_to_start"], SOURCE["none"]).astype(np.int8),
        edge_child=np.array(edges.child, np.int64),
        edge_parent=np.array(edges.parent, np.int64),
        edge_wait_s=np.array(edges.wait_s, np.float64),
        edge_wait_kind=np.array(edges.kind, np.int8),
    )
    kept = tuple(line for line in trace.meta.warnings if line != NO_SESSIONS)
    return with_warnings(replace(changed, meta=replace(trace.meta, warnings=kept)), text), text


def _parents(trace: Trace) -> np.ndarray:
    """Row that each call continues; -1 for none."""
    parents = np.full(len(trace), -1, np.int64)
    whole = trace.input_tokens // trace.meta.block_size_tokens
    latest: dict[int, int] = {}  # last whole block of a prompt -> the latest row with it
    for row in range(len(trace)):
        chain = chain_of(trace, row).tolist()
        found = next((latest[block] for block in reversed(chain[_LEAST_BLOCKS - 1 :]) if block in latest), -1)
        if found >= 0 and trace.input_tokens[row] > trace.input_tokens[found]:
            parents[row] = found
        if whole[row]:
            latest[chain[whole[row] - 1]] = row
    return parents
