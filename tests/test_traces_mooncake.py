"""Mooncake JSONL: milliseconds, global chained ids of 512-token blocks, file order within one tick."""

import io
import json

import numpy as np
import pytest

from kvfold.traces import mooncake
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.prefix import chain_of, prefix_hit_block_share, prefix_hit_token_share


def row(timestamp=0, input_length=600, output_length=5, hash_ids=(0, 1), **more) -> dict:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    } | more


def read(*rows: dict | str):
    lines = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows)
    return mooncake.read(io.BytesIO(lines.encode()), "m.jsonl")


def test_milliseconds_from_the_first_row_and_stable_order():
    trace = read(
        row(1_178_628, output_length=1), row(1_178_625, output_length=2), row(1_178_628, output_length=3)
    )
    np.testing.assert_allclose(trace.arrival_time_s, [0, 0.003, 0.003])
    assert trace.output_tokens.tolist() == [2, 1, 3]
    assert trace.source_row.tolist() == [2, 1, 3]
    assert trace.session_id.tolist() == [-1, -1, -1]
    assert trace.shared_parent.tolist() == [-1, 0, 0]


def test_exact_duplicates_stay():
    trace = read(row(), row(), row())
    assert (len(trace), trace.meta.drops) == (3, {})
    assert trace.shared_blocks.tolist() == [0, 2, 2]


def test_ids_beyond_32_bits_stay_apart():
    trace = read(row(hash_ids=[5, 2**40 + 1]), row(hash_ids=[5, 2**41 + 1]))
    assert trace.shared_blocks.tolist() == [0, 1]
    assert chain_of(trace, 1).tolist() == [5, 2**41 + 1]


def test_zero_prompts_are_dropped_by_name():
    trace = read(row(), row(input_length=0, hash_ids=[]))
    assert trace.meta.drops == {"zero_input_tokens": 1}


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (
            row(input_length=1025, hash_ids=[0, 1, 2, 3]),
            "1025 tokens in blocks of 512 must have 2 ids .or 3 with the partial block., got 4",
        ),
        (row(hash_ids=[1, 0]), "a block id must always follow the same blocks, got 1"),
        (row(input_length=-1), r"input_length: expected int >= 0, got -1"),
        (row(timestamp=-5), "timestamp: expected int >= 0, got -5"),
        (row(timestamp=10**30), "timestamp: "),
        (row(timestamp=0.5), "timestamp: expected int, got float"),
        (row(output_length=None), "output_length: expected int, got null"),
        (row(hash_ids=[0, 2**64]), "hash_ids.1.: "),
        (row(chat_id=3), "unknown field chat_id"),
        ('{"timestamp": 0, "input_length": 600}', "missing required field output_length"),
        ('{"timestamp": 0, "input_le', "one whole JSON object"),
        ('{"timestamp": NaN, "input_length": 600}', "one whole JSON object"),
        ('{"timestamp": 1e999, "input_length": 600, "output_length": 1, "hash_ids": [0,1]}', "timestamp"),
        ("[1, 2]", "expected object, got array"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(row(), bad)
    assert caught.value.place == "m.jsonl:2"
    assert caught.value.mend


def test_the_real_conversation_trace(shared_data):
    trace = load(shared_data / "traces/mooncake-fast25/conversation_trace.jsonl")
    assert (len(trace), trace.meta.rows_read) == (12_031, 12_031)
    assert prefix_hit_token_share(trace) == pytest.approx(0.374, abs=0.001)
    assert prefix_hit_block_share(trace) == pytest.approx(0.366, abs=0.001)
    assert trace.meta.partial_last == "kept"
    assert int((np.diff(trace.arrival_time_s) == 0).sum()) == 10_851
    assert any("10,851 of 12,030 gaps" in warning for warning in trace.meta.warnings)
    assert int((trace.output_tokens == 1).sum()) == 72
    assert len(trace.block_ids) == 182_790


def test_the_real_slice_starts_at_zero(shared_data):
    trace = load(shared_data / "traces/mooncake-arxiv-toolagent-slice/mooncake_trace_slice_93rows.jsonl")
    assert (len(trace), trace.arrival_time_s[0]) == (93, 0.0)
