"""Claude Code logs: one call over several rows, placeholders for outputs, sub-agents, rows that are none."""

import json

import numpy as np
import pytest

from kvfold.traces import claude_code
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.readers import Stated
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES
from tests.example_logs import claude_row as row
from tests.example_logs import lines


def use(*names: str, tool: str = "Bash") -> list[dict]:
    return [{"type": "tool_use", "id": name, "name": tool, "input": {}} for name in names]


def result(*names: str) -> list[dict]:
    return [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in names]


def read(*rows: dict, rule: float | None = None):
    return claude_code.read([("c.jsonl", lines(*rows))], "c", chars_per_token=rule)


def edges(trace) -> list:
    return list(
        zip(trace.edge_child.tolist(), trace.edge_parent.tolist(), trace.edge_wait_s.tolist(), strict=True)
    )


def test_rows_of_one_message_are_one_call():
    """Three rows of a call, the usage of the last one larger; what came first and last give its span."""
    rows = [
        row("user"),
        row(second=2, message_id="m1"),
        row(second=3, message_id="m1"),
        row(second=7, message_id="m1"),
    ]
    rows[-1]["message"]["usage"]["cache_read_input_tokens"] = 4000
    trace = read(*rows)
    assert (trace.meta.rows_read, len(trace)) == (4, 1)
    assert trace.meta.drops == {"no_model_call": 1, "repeats_message_id": 2}
    assert trace.input_tokens.tolist() == [100 + 20 + 4000]
    assert trace.recorded_cached_tokens.tolist() == [4000]
    assert trace.recorded_e2e_s.tolist() == [7]


def test_a_resumed_session_copies_rows_that_count_once():
    old = lines(row("user"), row(second=2, message_id="m1"))
    new = lines(
        row("user", sessionId="s2"),
        row(second=2, message_id="m1", sessionId="s2"),
        row("user", 5),
        row(second=8),
    )
    trace = claude_code.read([("old.jsonl", old), ("new.jsonl", new)], "c")
    assert trace.source_id == ["m1", "msg8"]
    assert trace.meta.drops == {"no_model_call": 3, "repeats_message_id": 1}


def test_what_led_to_a_copied_call_is_not_taken_for_the_next_one():
    copied = [row("user"), row(second=1, message_id="m1", content=use("t")), row("user", 2, result("t"))]
    copied.append(row(second=4, message_id="m2", content=[{"type": "text", "text": "x" * 40}]))
    resumed = [*copied, row("user", 60), row(second=65)]
    files = [("old.jsonl", lines(*copied)), ("new.jsonl", lines(*resumed))]
    trace = claude_code.read(files, "c", chars_per_token=4.0)
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "tool", "human"]
    assert trace.output_tokens[1] == 10


def test_the_wait_for_two_tools_counts_from_the_last_one_that_was_asked_for():
    trace = read(
        row("user"),
        row(second=1, message_id="m1", content=use("t1")),
        row(second=3, message_id="m1", content=use("t2")),
        row("user", 4, result("t2")),
        row("user", 9, result("t1")),
        row(second=12),
    )
    assert trace.wait_before_s.tolist()[1:] == [6.0]


def test_output_tokens_are_unknown_or_estimated_by_a_stated_rule():
    trace = read(row("user"), row(second=1, content=[{"type": "text", "text": "x" * 40}]))
    assert trace.output_tokens.tolist() == [-1]
    assert any("output tokens are unknown" in line for line in trace.meta.warnings)
    trace = read(row("user"), row(second=1, content=[{"type": "text", "text": "x" * 40}]), rule=4.0)
    assert trace.output_tokens.tolist() == [10]
    assert any("tokens of 0 prompts and 1 outputs are estimated" in line for line in trace.meta.warnings)


def test_tool_and_human_waits():
    """The tool runs from 4 s to 10 s, the call after it from 10 s; the person answers at 60 s."""
    trace = read(
        row("user", 0),
        row(second=3, message_id="m1"),
        row(second=4, message_id="m1", content=use("t1")),
        row("user", 10, result("t1")),
        row(second=20),
        row("user", 60),
        row(second=65),
    )
    assert trace.arrival_time_s.tolist() == [0, 10, 60]
    assert trace.recorded_e2e_s.tolist() == [4, 10, 5]
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, 6, 40])
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "tool", "human"]
    assert [WAIT_SOURCES[code] for code in trace.wait_source] == ["none", "recorded", "end_to_start"]
    assert trace.tool_names == ["Bash", "", ""]


def test_a_call_after_a_result_and_a_text_waited_for_both():
    trace = read(
        row("user"),
        row(second=1, content=use("t")),
        row("user", 2, result("t")),
        row("user", 9),
        row(second=10),
    )
    assert WAIT_KINDS[trace.wait_kind[1]] == "mixed"


def test_sub_agents_start_from_and_join_the_main_thread():
    side = {"isSidechain": True}
    trace = read(
        row("user", 0),
        row(second=2, content=use("t", tool="Task")),
        row("user", 3, uuid="u3", **side),
        row(second=5, uuid="a5", parentUuid="u3", **side),
        row("user", 6, result("x"), uuid="u6", parentUuid="a5", **side),
        row(second=9, uuid="a9", parentUuid="u6", **side),
        row("user", 10, result("t")),
        row(second=12),
    )
    assert trace.agent_id.tolist() == [0, 1, 1, 0]
    assert edges(trace) == [(1, 0, 1.0), (2, 1, 1.0), (3, 0, 0.0), (3, 2, 1.0)]
    assert [WAIT_KINDS[code] for code in trace.edge_wait_kind] == ["subagent", "tool", "subagent", "subagent"]


def test_agent_ids_tell_sub_agents_apart():
    rows = [row(second=at, isSidechain=True, agentId=f"a{at % 2}") for at in (1, 2, 3, 4)]
    assert read(row("user"), row(second=0, message_id="m"), *rows).agent_id.tolist() == [0, 1, 2, 1, 2]


def test_rows_that_are_no_calls_have_a_name_each():
    synthetic = row(second=4)
    synthetic["message"]["model"] = "<synthetic>"
    timeless = row(second=5)
    del timeless["timestamp"]
    bare = row(second=6)
    del bare["message"]["usage"]
    zero = row(second=7)
    zero["message"]["usage"] = {"input_tokens": 0, "output_tokens": 0}
    others = [
        {"type": "summary", "leafUuid": "x"},
        {"silly": "this"},
        row("user", timesstamp="x", message="error"),
    ]
    content = (
        lines(row("user"), row(second=2), synthetic, timeless, bare, zero, *others)
        + b'42\n[1]\n"text"\nnull\n'
    )
    trace = claude_code.read([("c.jsonl", content)], "c")
    assert trace.meta.drops == {
        "no_model_call": 4,
        "no_object": 4,
        "no_timestamp": 1,
        "no_usage": 1,
        "synthetic": 1,
        "zero_input_tokens": 1,
    }
    assert (trace.meta.rows_read, len(trace)) == (13, 1)


def test_rows_out_of_order_are_put_in_order():
    trace = read(row("user", 30), row(second=35), row("user", 0), row(second=5))
    assert trace.arrival_time_s.tolist() == [0, 30]


def test_a_call_without_a_user_row_begins_with_its_first_row():
    trace = read(row(second=5))
    assert np.isnan(trace.recorded_e2e_s[0])
    assert any("1 calls have no user row before them" in line for line in trace.meta.warnings)


def test_usage_that_is_no_count_is_named():
    bad = row(second=5)
    bad["message"]["usage"]["input_tokens"] = -4
    with pytest.raises(BadTraceError, match="input_tokens: expected int >= 0, got -4") as caught:
        read(row("user"), bad)
    assert caught.value.place == "c.jsonl:2"


def test_an_export_without_usage_is_refused():
    bare = row(second=6)
    del bare["message"]["usage"]
    content = json.dumps({"loglines": [row("user"), bare]}, indent=1).encode()
    with pytest.raises(BadTraceError, match="none of the 1 answers has usage"):
        claude_code.read([("c.json", content)], "c", chars_per_token=4.0)


@pytest.mark.parametrize(
    ("name", "rows", "kept", "drops"),
    [
        ("edge_cases", 19, 4, {"no_model_call": 12, "no_object": 3}),
        ("representative_messages", 12, 5, {"no_model_call": 7}),
        ("session_b", 3, 1, {"no_model_call": 2}),
        ("todowrite_examples", 12, 6, {"no_model_call": 6}),
    ],
)
def test_the_real_fixtures(shared_data, name, rows, kept, drops):
    folder = shared_data / "traces/claude-code-jsonl-fixtures"
    trace = load(folder / f"daaain/{name}.jsonl")
    assert (trace.meta.format, trace.meta.rows_read, len(trace)) == ("claude-code", rows, kept)
    assert trace.meta.drops == drops
    assert (trace.output_tokens == -1).all()


def test_the_real_waits(shared_data):
    folder = shared_data / "traces/claude-code-jsonl-fixtures/daaain"
    trace = load(folder / "representative_messages.jsonl", stated=Stated(chars_per_token=4.0))
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, 30, 1, 30, 1])
    assert [WAIT_KINDS[code] for code in trace.wait_kind[1:]] == ["human", "tool", "human", "tool"]
    assert (trace.output_tokens > 0).all()


@pytest.mark.parametrize("name", ["sample_session.json", "sample_session.jsonl"])
def test_the_real_exports_have_no_usage(shared_data, name):
    with pytest.raises(BadTraceError, match="has usage"):
        load(shared_data / "traces/claude-code-jsonl-fixtures/simonw" / name)
