"""LLMServingSim: nanoseconds, sessions whose calls wait for tools, prefix blocks from token ids."""

import io

import numpy as np
import pytest

from kvfold.traces import llmservingsim
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.table import WAIT_KINDS
from tests.example_logs import lines


def read(*rows: dict):
    return llmservingsim.read(io.BytesIO(lines(*rows)), "l.jsonl")


def call(tokens: int, wait_ns: int = 0, **more) -> dict:
    return {"input_toks": tokens, "output_toks": 2, "tool_duration_ns": wait_ns} | more


def test_flat_rows_and_sessions_in_one_file():
    session = {"session_id": "s", "arrival_time_ns": 4_000_000_000}
    trace = read(
        session | {"sub_requests": [call(32, 127_348_767), call(40, 0), call(50)]},
        {"input_toks": 20, "output_toks": 2, "arrival_time_ns": 1_000_000_000},
    )
    assert trace.input_tokens.tolist() == [20, 32, 40, 50]
    assert trace.session_id.tolist() == [-1, 0, 0, 0]
    np.testing.assert_array_equal(trace.arrival_time_s, [0, 3, np.nan, np.nan])
    np.testing.assert_array_equal(trace.edge_wait_s, [0.127348767, 0])
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "none", "tool", "tool"]
    assert trace.meta.rows_read == 4


def test_token_ids_give_blocks_of_16():
    rows = [
        {"input_toks": n, "output_toks": 1, "arrival_time_ns": n, "input_tok_ids": list(range(n))}
        for n in (20, 40)
    ]
    trace = read(*rows)
    assert (trace.meta.block_size_tokens, trace.meta.partial_last) == (16, "dropped")
    assert (trace.shared_blocks.tolist(), trace.new_blocks.tolist()) == ([0, 1], [1, 1])
    del rows[1]["input_tok_ids"]
    assert any("only 1 prompts have token ids" in line for line in read(*rows).meta.warnings)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (
            {"input_toks": 3, "output_toks": 1, "arrival_time_ns": 0, "input_tok_ids": [1]},
            "hold input_toks = 3 ids, got 1",
        ),
        ({"input_toks": 3, "output_toks": 1, "arrival_time_ns": -5}, "arrival_time_ns: expected int >= 0"),
        ({"input_toks": 3, "arrival_time_ns": 5}, "missing required field output_toks"),
        ({"arrival_time_ns": 5, "sub_requests": {}}, "sub_requests: expected array . null, got object"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read({"input_toks": 3, "output_toks": 1, "arrival_time_ns": 0}, bad)
    assert caught.value.place.startswith("l.jsonl:2")


def test_the_real_workload(shared_data):
    trace = load(shared_data / "validation/llmservingsim-vllm/workload_sharegpt-llama-3.1-8b-300-sps10.csv")
    assert (trace.meta.format, trace.meta.rows_read, len(trace)) == ("llmservingsim", 300, 300)
    assert trace.arrival_time_s[1] == pytest.approx(0.347938951 - 0.046926808)
    assert (np.median(trace.input_tokens), np.percentile(trace.input_tokens, 90)) == pytest.approx(
        (732, 1460), rel=0.02
    )
    assert (np.median(trace.output_tokens), np.percentile(trace.output_tokens, 90)) == pytest.approx(
        (632, 770), rel=0.02
    )
