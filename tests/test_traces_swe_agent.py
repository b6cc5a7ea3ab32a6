"""SWE-agent and mini-SWE-agent: tool times recorded or unknown, totals spread by text, usage where it is."""

import json

import numpy as np
import pytest

from kvfold.traces import swe_agent
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.readers import Stated
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES
from tests.example_logs import TRAJECTORY

RULE = Stated(chars_per_token=4.0)


def read(document, rule: float | None = None):
    return swe_agent.read([("t.traj", json.dumps(document).encode())], "t", chars_per_token=rule)


def test_recorded_totals_are_spread_over_the_steps():
    """Prompts of 801 and 1,103 characters (texts and line ends) share 475 sent tokens, outputs 50 received."""
    trace = read(TRAJECTORY)
    assert trace.input_tokens.tolist() == [475 * 801 // 1904, 475 * 1103 // 1904]
    assert trace.output_tokens.tolist() == [25, 25]
    assert any(
        "the recorded totals of each run, spread over its steps" in line for line in trace.meta.warnings
    )
    assert (trace.meta.hash_scope, trace.meta.clock) == ("session", "session")
    assert trace.shared_blocks.tolist() == [0, 3]


def test_the_tool_runs_between_the_calls():
    trace = read(TRAJECTORY)
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, 0.5])
    assert WAIT_KINDS[trace.wait_kind[1]] == "tool"
    assert WAIT_SOURCES[trace.wait_source[1]] == "recorded"
    assert trace.tool_names == ["ls", "submit"]
    assert np.isnan(trace.arrival_time_s).tolist() == [False, True]


def test_without_execution_time_the_wait_is_unknown_not_zero():
    steps = [
        {key: value for key, value in step.items() if key != "execution_time"}
        for step in TRAJECTORY["trajectory"]
    ]
    trace = read(TRAJECTORY | {"trajectory": steps})
    assert np.isnan(trace.edge_wait_s).tolist() == [True]
    assert WAIT_SOURCES[trace.wait_source[1]] == "none"
    assert any("no tool wait is recorded for 1 calls" in line for line in trace.meta.warnings)


def test_a_stated_rule_comes_before_the_totals():
    assert read(TRAJECTORY, rule=1.0).input_tokens.tolist() == [801, 1103]


def test_without_totals_or_rule_there_is_no_trace():
    with pytest.raises(BadTraceError, match="only the text of its 2 calls") as caught:
        read(TRAJECTORY | {"info": {}})
    assert "--chars-per-token" in caught.value.mend


def test_the_query_is_the_prompt_where_it_is_kept():
    steps = [TRAJECTORY["trajectory"][0] | {"query": [{"role": "user", "content": "q" * 100}]}]
    assert read(TRAJECTORY | {"trajectory": steps}, rule=1.0).input_tokens.tolist() == [
        104 + 1
    ]  # with the role


def test_mini_messages_with_usage_and_stamps():
    def message(role, content, second=None, **usage):
        extra = {"timestamp": 1_760_000_000.0 + second} if second is not None else {}
        return {
            "role": role,
            "content": content,
            "extra": extra | ({"response": {"usage": usage}} if usage else {}),
        }

    trace = read(
        {
            "info": {"model_stats": {"api_calls": 2}},
            "messages": [
                message("system", "s" * 100),
                message("user", "u" * 100),
                message("assistant", "a" * 40, 5, prompt_tokens=60, completion_tokens=12),
                message("user", "o" * 80, 8),
                message("assistant", "a" * 40, 10, prompt_tokens=99, completion_tokens=7),
            ],
        }
    )
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([60, 99], [12, 7])
    assert trace.wait_before_s.tolist()[1] == 3.0
    assert trace.recorded_e2e_s.tolist()[1] == 2.0
    assert trace.arrival_time_s.tolist() == [0.0, 3.0]  # of the first call only the end is known
    assert trace.meta.hash_scope == "none"


@pytest.mark.parametrize(
    ("document", "rule"),
    [
        ({"trajectory": [5], "info": {}}, "a step must be an object"),
        ({"messages": "x", "info": {}}, "must have `trajectory` or a list of messages"),
        (
            {"trajectory": [{"execution_time": -1}], "info": {}},
            "execution_time: expected float >= 0.0, got -1",
        ),
        ({"trajectory": [], "info": {}}, "a trace must have calls"),
        ([{"role": "user", "content": "x"}, 5], "a message must be an object"),
    ],
)
def test_a_bad_document_is_named(document, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(document, rule=4.0)
    assert caught.value.place.startswith("t")


@pytest.mark.parametrize(
    ("name", "calls", "waits", "sent"),
    [("sweagent_with_execution_time", 5, 4, 7_141), ("sweagent_no_timing", 12, 0, 122_612)],
)
def test_the_real_trajectories(shared_data, name, calls, waits, sent):
    trace = load(shared_data / f"traces/swe-agent-traj/{name}.traj")
    assert (trace.meta.format, trace.meta.rows_read, len(trace)) == ("swe-agent", calls, calls)
    assert int((~np.isnan(trace.edge_wait_s)).sum()) == waits
    assert sent - calls <= trace.input_tokens.sum() <= sent  # each step is rounded down
    if waits:
        assert 0.26 < trace.edge_wait_s.min() < trace.edge_wait_s.max() < 0.5


@pytest.mark.parametrize(("name", "calls"), [("mini_github_issue", 10), ("mini_local", 2)])
def test_the_real_mini_runs_have_text_only(shared_data, name, calls):
    path = shared_data / f"traces/swe-agent-traj/{name}.traj.json"
    with pytest.raises(BadTraceError, match=f"only the text of its {calls} calls"):
        load(path)
    trace = load(path, stated=RULE)
    assert len(trace) == calls
    assert np.isnan(trace.edge_wait_s).all()
