"""Turns inferred from prefix chains: small cases by hand, the counts of the real trace, and what is refused."""

import io
from dataclasses import replace

import numpy as np
import pytest

from kvfold.traces import mooncake
from kvfold.traces.changes import Changes
from kvfold.traces.load import load
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES
from kvfold.traces.turns import infer_turns
from tests.example_logs import lines


def trace_of(*rows: tuple[int, int, list[int]]):
    """(seconds, tokens, ids) of each call; 512 tokens a block."""
    content = [
        {"timestamp": at * 1000, "input_length": tokens, "output_length": 5, "hash_ids": ids}
        for at, tokens, ids in rows
    ]
    return mooncake.read(io.BytesIO(lines(*content)), "m")


def parents(*rows) -> list[int]:
    return infer_turns(trace_of(*rows))[0].parent_request_id.tolist()


def test_a_call_continues_the_longest_earlier_prompt():
    """The third prompt begins with both whole blocks of the first and all three of the second."""
    assert parents((0, 1030, [1, 2, 3]), (5, 1540, [1, 2, 4, 5]), (9, 2060, [1, 2, 4, 6, 7])) == [-1, 0, 1]


def test_of_equal_prompts_the_latest_counts():
    assert parents((0, 1030, [1, 2, 3]), (5, 1030, [1, 2, 4]), (9, 1540, [1, 2, 5, 6])) == [-1, -1, 1]


def test_a_shared_system_prompt_of_one_block_is_no_session():
    assert parents((0, 520, [1, 2]), (5, 1540, [1, 3, 4, 5])) == [-1, -1]


def test_a_repeated_prompt_is_no_turn():
    assert parents((0, 1030, [1, 2, 3]), (5, 1030, [1, 2, 3])) == [-1, -1]


def test_waits_are_said_to_hold_the_service():
    trace, text = infer_turns(trace_of((0, 1030, [1, 2, 3]), (60, 1540, [1, 2, 4, 5])))
    assert (trace.session_id.tolist(), trace.turn_index.tolist()) == ([0, 0], [0, 1])
    assert trace.wait_before_s[1] == 60
    assert (WAIT_KINDS[trace.wait_kind[1]], WAIT_SOURCES[trace.wait_source[1]]) == (
        "unknown",
        "start_to_start",
    )
    assert (trace.edge_child.tolist(), trace.edge_parent.tolist(), trace.edge_wait_s.tolist()) == (
        [1],
        [0],
        [60],
    )
    assert text.startswith(
        "sessions are inferred from prefix chains: 1 calls continue an earlier one, 1 sessions"
    )
    assert text in trace.meta.warnings
    assert not any("turns are not inferred" in line for line in trace.meta.warnings)


def test_it_is_one_of_the_changes_of_a_trace():
    prompts = (0, 1030, [1, 2, 3]), (60, 1540, [1, 2, 4, 5])
    trace, texts = Changes(infer_turns=True, sessions=1).apply(trace_of(*prompts))
    assert texts[0].startswith("sessions are inferred from prefix chains")
    assert (len(trace), trace.session_id.tolist()) == (2, [0, 0])


def test_known_sessions_or_missing_ids_are_refused():
    trace, _ = infer_turns(trace_of((0, 1030, [1, 2, 3])))
    with pytest.raises(ValueError, match="only from global block ids and without sessions"):
        infer_turns(trace)
    bare = replace(trace, session_id=np.full(1, -1, np.int32), meta=replace(trace.meta, hash_scope="none"))
    with pytest.raises(ValueError, match="got hash scope none"):
        infer_turns(bare)


def test_the_real_conversation_trace(shared_data):
    trace = load(shared_data / "traces/mooncake-fast25/conversation_trace.jsonl")
    turned, text = infer_turns(trace)
    assert "3,875 calls continue an earlier one, 8,156 sessions" in text
    _, calls = np.unique(turned.session_id, return_counts=True)
    assert (len(calls), int((calls > 1).sum())) == (8_156, 1_995)
    assert np.percentile(calls, [50, 90, 99]).tolist() == [1, 2, 7]
    assert np.percentile(turned.edge_wait_s, [50, 90, 95, 99]).round().tolist() == [126, 480, 612, 1_471]
    grown = turned.input_tokens[turned.edge_child] - turned.input_tokens[turned.edge_parent]
    assert np.median(grown - turned.output_tokens[turned.edge_parent]) == 28
    assert (np.median(grown), round(grown.mean())) == (483, 1_697)
