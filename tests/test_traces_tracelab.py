"""TraceLab: the prompt is prefix plus appended tokens; waits of tools after a row belong to the next call."""

import io
import json

import numpy as np
import pytest

from kvfold.traces import tracelab
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES
from tests.example_logs import TRACELAB, lines


def table(*rows: str):
    header = "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len"
    return tracelab.read(io.BytesIO("\n".join([header, *rows]).encode()), "t.csv")


def event(kind: str, second: float) -> dict:
    return {"event_type": kind, "timestamp": f"2026-01-01T00:{int(second // 60):02d}:{second % 60:06.3f}Z"}


def round_of(index: int, *events: dict, prefix=100, new=20, wall_ms=(), **more) -> dict:
    return {
        "provider": "claude",
        "session_id": "s",
        "round_index": index,
        "model": "m",
        "prefix_tokens": prefix,
        "newly_append_tokens": new,
        "output_tokens": 12,
        "reasoning_output_tokens": None,
        "timing_events": list(events),
        "tools": [{"tool_name": "Bash", "tool_wall_latency_ms": wall} for wall in wall_ms],
    } | more


def rounds(*rows: dict):
    return tracelab.read(io.BytesIO(lines(*rows)), "t.jsonl")


def test_the_table_in_milliseconds_with_the_wait_on_the_child():
    trace = table(
        "0,100,10,1500,0,250.0,0", "1,7,1,500,0,0,0", "0,20,10,1500,1,0.000000,110", "0,30,1,1500,2,0,140"
    )
    assert trace.input_tokens.tolist() == [7, 100, 130, 170]
    assert trace.recorded_cached_tokens.tolist() == [0, 0, 110, 140]
    np.testing.assert_array_equal(trace.arrival_time_s, [0, 1, np.nan, np.nan])
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, np.nan, 0.25, np.nan])
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "none", "tool", "unknown"]
    text = " ".join(trace.meta.warnings)
    assert "1 waits of 0 ms are unknown" in text
    assert "arrivals are synthetic" in text


def test_a_repeated_round_of_the_table_is_named():
    with pytest.raises(BadTraceError, match="round_idx must differ inside session 0, got 1 twice") as caught:
        table("0,1,1,0,1,0,0", "0,1,1,0,1,0,0")
    assert caught.value.place == "t.csv:3"


def test_rounds_take_their_times_from_events():
    """A tool of 1.5 s, then a person after 60 s; the wait after a tool is the recorded one of the longest tool."""
    trace = rounds(
        round_of(0, event("user_message", 0), event("tool_call", 5), wall_ms=(1500, 900, None)),
        round_of(1, event("tool_result", 6.75), event("text", 7), event("text", 8)),
        round_of(2, event("user_message", 68), event("text", 70)),
    )
    assert trace.arrival_time_s.tolist() == [0, 6.75, 68]
    assert trace.recorded_e2e_s.tolist() == [5, 1.25, 2]
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, 1.5, 60])
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "tool", "human"]
    assert [WAIT_SOURCES[code] for code in trace.wait_source] == ["none", "recorded", "end_to_start"]
    assert (trace.input_tokens.tolist(), trace.recorded_cached_tokens.tolist()) == ([120] * 3, [100] * 3)
    assert trace.reasoning_tokens.tolist() == [-1] * 3
    assert trace.tool_names == ["Bash", "", ""]


def test_a_tool_without_latency_is_measured_by_the_clock():
    first = round_of(0, event("user_message", 0), event("tool_call", 5), wall_ms=(None,))
    trace = rounds(first, round_of(1, event("tool_result", 9), event("text", 10)))
    assert trace.wait_before_s[1] == 4
    assert WAIT_SOURCES[trace.wait_source[1]] == "end_to_start"


def test_repeated_rounds_stay_and_are_counted_and_sessions_differ_by_project():
    one = round_of(0, event("user_message", 0), event("text", 1))
    trace = rounds(one, one, one | {"project": "p"})
    assert (len(trace), sorted(trace.session_id.tolist())) == (3, [0, 0, 1])
    assert any("1 rows repeat the round_index" in line for line in trace.meta.warnings)


def test_rounds_without_times_or_prompt_are_dropped_by_name():
    good = round_of(0, event("user_message", 0), event("text", 1))
    trace = rounds(good, round_of(1), round_of(2, event("text", 3), prefix=0, new=0))
    assert trace.meta.drops == {"no_timestamp": 1, "zero_input_tokens": 1}


def test_parquet_gives_the_same_rounds(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        round_of(0, event("user_message", 0), event("text", 1)),
        round_of(1, event("user_message", 5), event("text", 6)),
    ]
    rows = json.loads(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t")
    trace = load(tmp_path / "t")
    assert (trace.meta.format, trace.arrival_time_s.tolist()) == ("tracelab", [0, 5])


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (round_of(1, {"event_type": "text", "timestamp": "noon"}), "a stamp must be"),
        (round_of(1, prefix=None), "missing required field prefix_tokens"),
        (round_of(1, new=-1), "newly_append_tokens: expected int >= 0"),
        (round_of(1) | {"tools": {}}, "tools: expected array, got object"),
    ],
)
def test_a_bad_round_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        rounds(round_of(0, event("user_message", 0), event("text", 1)), bad)
    assert caught.value.place == "t.jsonl:2"


def test_the_example_loads():
    assert len(tracelab.read(io.BytesIO(TRACELAB), "t")) == 3
