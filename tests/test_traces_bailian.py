"""Bailian: 16-token blocks, parents by chat id, seconds; arrival-to-arrival waits said to be so."""

import io

import numpy as np
import pytest

from kvfold.traces import bailian
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.table import WAIT_SOURCES
from tests.example_logs import bailian_row as row
from tests.example_logs import lines


def read(*rows: dict):
    return bailian.read(io.BytesIO(lines(*rows)), "b.jsonl")


def test_a_turn_follows_its_parent():
    """The child leaves the parent's padded last block (3) for another one (4)."""
    trace = read(row(), row(7, timestamp=1.0), row(1, 0, 60.0, 72, (1, 2, 4, 5, 6), turn=2))
    assert trace.session_id.tolist() == [0, 1, 0]
    assert trace.turn_index.tolist() == [0, 0, 1]
    assert trace.parent_request_id.tolist() == [-1, -1, 0]
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, np.nan, 60])
    assert WAIT_SOURCES[trace.wait_source[2]] == "start_to_start"
    assert trace.shared_blocks.tolist() == [0, 3, 2]
    assert (trace.meta.block_size_tokens, trace.meta.partial_last, trace.meta.time_unit) == (16, "kept", "s")
    assert trace.tenant == ["text"] * 3
    assert any("1 waits count from arrival to arrival" in line for line in trace.meta.warnings)


def test_the_prompt_is_whole_not_a_delta():
    assert read(row(), row(1, 0, 1.0, 72, (1, 2, 4, 5, 6))).input_tokens.tolist() == [40, 72]


def test_missing_parents_and_repeated_ids_are_counted():
    trace = read(row(), row(0, timestamp=1.0), row(2, 0, 2.0), row(3, 99, 3.0))
    assert trace.parent_request_id.tolist() == [-1, -1, 1, -1]
    text = " ".join(trace.meta.warnings)
    assert "1 rows repeat a chat_id" in text
    assert "1 turns name a parent that is not before them" in text


def test_zero_prompts_are_dropped_by_name_and_their_children_counted():
    trace = read(row(), row(1, timestamp=1.0, input_length=0, hash_ids=()), row(2, 1, 2.0))
    assert trace.meta.drops == {"zero_input_tokens": 1}
    assert trace.parent_request_id.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (row(1, hash_ids=[1]), r"40 tokens in blocks of 16 must have 2 ids .or 3 with the partial block."),
        (row(1, hash_ids=[2, 1, 3]), "a block id must always follow the same blocks"),
        (row(1, timestamp=-1.0), "timestamp: expected float >= 0"),
        (row(None), "chat_id: expected int, got null"),
        (row(1) | {"hash_ids": {"a": [1]}}, "hash_ids: expected array, got object"),
        (row(1, session_id="x"), "unknown field session_id"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(row(), bad)
    assert caught.value.place == "b.jsonl:2"


def test_the_real_head_row(shared_data):
    trace = load(shared_data / "traces/qwen-bailian-head/qwen_thinking_blksz_16.head1.jsonl")
    assert (len(trace), trace.meta.format, trace.meta.block_size_tokens) == (1, "bailian", 16)
    assert (trace.input_tokens[0], trace.output_tokens[0], trace.new_blocks[0]) == (502, 1494, 32)
