"""Every law of a trace: sound ones keep it, and each way of breaking it is found and named."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.traces.errors import BadTraceError
from kvfold.traces.laws import laws, validate
from kvfold.traces.load import load


@pytest.fixture(scope="module")
def sample():
    return load("traces/data/sample.jsonl")


def broken(trace, column, row, value):
    """``trace`` with one changed value."""
    values = getattr(trace, column).copy()
    values[row] = value
    return replace(trace, **{column: values})


def test_the_sample_keeps_all_laws(sample):
    found = validate(sample)
    assert {law["name"] for law in found} == {law.name for law in laws(sample)}
    assert sum(law["checked"] for law in found) > 10_000


@pytest.mark.parametrize(
    "name",
    [
        "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
        "mooncake-fast25/conversation_trace.jsonl",
        "weka-claude-code-traces/traces",
    ],
)
def test_real_traces_keep_all_laws(shared_data, name):
    validate(load(shared_data / "traces" / name))


SHARING, CHILD = 40, 100


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("arrival_time_s", -1.0, "arrival_time_s must be finite"),
        ("arrival_time_s", np.inf, "arrival_time_s must be finite"),
        ("arrival_time_s", 1e10, "in order of arrival|before its parent"),
        ("input_tokens", 0, "input_tokens must be at least 1"),
        ("input_tokens", 64, "one block for every 64 tokens"),
        ("output_tokens", -2, "output_tokens must be a count or -1"),
        ("reasoning_tokens", 10**9, "reasoning_tokens must be at most output_tokens"),
        ("recorded_cached_tokens", 10**9, "recorded_cached_tokens must be at most input_tokens"),
        ("wait_before_s", -0.5, "wait_before_s must be finite"),
        ("recorded_ttft_s", np.inf, "recorded_ttft_s must be finite"),
        ("shared_parent", SHARING, "shared_parent must be an earlier call"),
        ("shared_parent", -1, "shared_parent must be an earlier call"),
        ("shared_blocks", 10**6, "shared_blocks must be at most|one block for every"),
        ("parent_request_id", 0, "parent_request_id must be among the parents"),
    ],
)
def test_a_broken_row_is_named(sample, column, value, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        validate(broken(sample, column, SHARING, value))
    assert caught.value.place.startswith("traces/data/sample.jsonl:")


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("edge_parent", 10**6, "a parent must be an earlier call"),
        ("edge_parent", -1, "a parent must be an earlier call"),
        ("edge_wait_s", -1.0, "a wait must be at least 0 s"),
        ("edge_wait_s", np.inf, "a wait must be at least 0 s"),
        ("edge_parent", 0, "in the call's session|among the parents"),
    ],
)
def test_a_broken_link_is_named(sample, column, value, rule):
    with pytest.raises(BadTraceError, match=rule):
        validate(broken(sample, column, CHILD, value))


def test_a_block_that_is_new_twice_is_named(sample):
    rows = np.flatnonzero(sample.new_blocks)
    bad = broken(sample, "block_ids", sample.new_block_start[rows[9]], sample.block_ids[0])
    with pytest.raises(BadTraceError, match="a block must be new once") as caught:
        validate(bad)
    assert (
        caught.value.place.split(":")[1] == str(sample.source_row[rows[9]])
        or int(sample.source_row[rows[9]]) < 0
    )
