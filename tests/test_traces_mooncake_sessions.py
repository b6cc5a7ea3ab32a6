"""Mooncake rows with sessions: whole prompts or deltas, as stated; waits from delays or from arrivals."""

import io

import numpy as np
import pytest

from kvfold.traces import mooncake_sessions
from kvfold.traces.errors import BadTraceError
from kvfold.traces.prefix import chain_of
from kvfold.traces.table import WAIT_SOURCES
from tests.example_logs import lines


def row(session="s", tokens=600, ids=(1, 2), output=10, **more) -> dict:
    return {
        "session_id": session,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": list(ids),
    } | more


def whole(*rows: dict):
    return mooncake_sessions.read_whole(io.BytesIO(lines(*rows)), "m.jsonl")


def delta(*rows: dict):
    return mooncake_sessions.read_delta(io.BytesIO(lines(*rows)), "m.jsonl")


def test_deltas_are_summed_up_with_the_outputs():
    """4 + 2 generated + 2 new are 8 tokens, as in Dynamo's own example."""
    trace = delta(row(tokens=4, ids=(), output=2, timestamp=0), row(tokens=2, ids=(), output=1, delay=5))
    assert trace.input_tokens.tolist() == [4, 8]
    assert trace.wait_before_s[1] == 0.005
    assert WAIT_SOURCES[trace.wait_source[1]] == "recorded"
    assert np.isnan(trace.arrival_time_s[1])
    assert (trace.meta.format, trace.meta.hash_scope) == ("mooncake-delta", "none")
    assert any("summed up along each session" in line for line in trace.meta.warnings)


def test_a_later_turn_shares_the_whole_blocks_of_the_one_before():
    """1,100 tokens are two whole blocks and a partial one, which the next turn of 1,900 fills with other text."""
    trace = delta(
        row(tokens=1100, ids=(1, 2, 3), output=500, timestamp=0),
        row(tokens=300, ids=(2,), delay=5),
        row("other", 600, (1, 9), timestamp=7),
    )
    assert trace.input_tokens.tolist() == [1100, 1900, 600]
    assert trace.shared_blocks.tolist() == [0, 2, 1]
    assert chain_of(trace, 1).tolist()[:2] == [1, 2]
    assert not set(chain_of(trace, 1).tolist()[2:]) & {1, 2, 3, 9}


def test_whole_prompts_are_taken_as_they_stand():
    trace = whole(row(timestamp=0), row(tokens=1100, ids=(1, 5, 6), timestamp=9000), row("b", timestamp=10))
    assert trace.input_tokens.tolist() == [600, 600, 1100]
    assert trace.session_id.tolist() == [0, 1, 0]
    assert trace.wait_before_s[2] == 9
    assert WAIT_SOURCES[trace.wait_source[2]] == "start_to_start"


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (row("new", delay=5), "the first row of a session must have a timestamp"),
        (row(timestamp=1, ids=(1, 2, 3)), "must have 1 ids .or 2 with the partial block., got 3"),
        (row(timestamp=-1), "timestamp: expected float >= 0.0"),
        (row(timestamp=1, hash_ids=None), "hash_ids: expected array, got null"),
        (row(timestamp=1, chat_id=4), "unknown field chat_id"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        whole(row(timestamp=0), bad)
    assert caught.value.place == "m.jsonl:2"
