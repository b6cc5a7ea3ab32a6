"""WEKA sessions: what waits for what, and the faults that such files have."""

import json
import tarfile

import numpy as np
import pytest

from kvfold.traces import weka
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.prefix import prefix_hit_token_share
from kvfold.traces.stats import inspect
from kvfold.traces.table import WAIT_KINDS, Trace


def call(t: float, blocks: int = 2, first: int = 0, kind: str = "n", **more) -> dict:
    return {
        "t": t,
        "type": kind,
        "model": "m",
        "in": 64 * blocks + 5,
        "out": 10,
        "hash_ids": list(range(first, first + blocks)),
        "input_types": ["tool_result"],
        "stop": "tool_use",
        "api_time": 4.0,
        "think_time": 0.0,
    } | more


def without(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def agent(t: float, duration_s: float | None, *calls: dict, agent_id: str = "agent_001") -> dict:
    duration_ms = None if duration_s is None else duration_s * 1000
    return {
        "t": t,
        "type": "subagent",
        "agent_id": agent_id,
        "duration_ms": duration_ms,
        "requests": list(calls),
    }


def session(*requests: dict, **more) -> bytes:
    head = {"id": "made", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}
    return json.dumps(head | more).encode()


def read(*requests: dict) -> Trace:
    return weka.read([("made.json", session(*requests))], "made.json")


def edges(trace: Trace, child: int) -> list[tuple[int, float, str]]:
    at = trace.edge_child == child
    kinds = [WAIT_KINDS[kind] for kind in trace.edge_wait_kind[at]]
    return list(zip(trace.edge_parent[at].tolist(), trace.edge_wait_s[at].tolist(), kinds, strict=True))


def kinds(trace: Trace) -> list[str]:
    return [WAIT_KINDS[kind] for kind in trace.wait_kind]


def replayed(trace: Trace) -> np.ndarray:
    """Arrivals if every call takes its recorded service time; -inf for roots and where nothing is known."""
    end_s = trace.arrival_time_s + trace.recorded_e2e_s
    arrival_s = np.full(len(trace), -np.inf)
    ready_s = np.nan_to_num(end_s[trace.edge_parent] + trace.edge_wait_s, nan=-np.inf)
    np.maximum.at(arrival_s, trace.edge_child, ready_s)
    return arrival_s


def test_waits_are_end_to_start_by_what_arrived():
    trace = read(
        call(0, input_types=["text"]),
        call(12, think_time=8.0),
        call(76, think_time=60.0, input_types=["text"]),
        call(90, think_time=10.0, input_types=["text", "tool_result"]),
        call(100, think_time=6.0, input_types=[]),
    )
    assert kinds(trace) == ["none", "tool", "human", "mixed", "unknown"]
    assert edges(trace, 2) == [(1, 60.0, "human")]
    assert trace.parent_request_id.tolist() == [-1, 0, 1, 2, 3]
    assert replayed(trace)[1:].tolist() == [12, 76, 90, 100]
    assert (trace.meta.clock, trace.meta.hash_scope) == ("session", "session")


def test_no_wait_is_not_a_wait_of_zero():
    trace = read(call(0), call(4, think_time=0.0), without(call(9), "think_time"))
    assert trace.wait_before_s[1] == 0.0
    assert np.isnan(trace.wait_before_s[2])
    assert np.isnan(edges(trace, 2)[0][1])
    assert any("think_time unknown on 1 calls" in warning for warning in trace.meta.warnings)


def test_a_wait_counts_from_the_last_call_with_a_recorded_end():
    streaming = without(call(10, kind="s", think_time=6.0, stop=""), "api_time")
    trace = read(call(0), streaming, call(30, think_time=26.0, input_types=["text"]))
    assert edges(trace, 2) == [(0, 26.0, "human"), (1, 0.0, "none")]
    assert (trace.parent_request_id[2], trace.wait_before_s[2]) == (0, 26.0)
    assert replayed(trace)[2] == 30
    assert np.isnan(trace.recorded_e2e_s[1])
    assert trace.status.tolist() == [0, 3, 0]


def test_a_completed_sub_agent_starts_before_its_marker_and_is_joined():
    # the spawner ends at 4; two agents start at 4.5 and end at 44.5 and 24.5; the main thread goes on at 50
    trace = read(
        call(0),
        agent(25.0, 20.5, call(0, first=50), call(16, first=50, think_time=12.0)),
        agent(45.0, 40.5, call(0, first=50), call(36, first=50, think_time=32.0), agent_id="agent_002"),
        call(50, think_time=46.0),
    )
    assert trace.agent_id.tolist() == [0, 1, 1, 2, 2, 0]
    assert trace.arrival_time_s.tolist() == [0, 4.5, 20.5, 4.5, 40.5, 50]
    assert edges(trace, 1) == [(0, 0.5, "subagent")]
    assert edges(trace, 5) == [(0, 0.0, "subagent"), (2, 5.5, "subagent"), (4, 5.5, "subagent")]
    assert (trace.parent_request_id[5], trace.wait_before_s[5], kinds(trace)[5]) == (0, 46.0, "tool")
    np.testing.assert_allclose(replayed(trace)[1:], trace.arrival_time_s[1:])
    assert trace.source_id[4] == "made/agent_002"


def test_a_sub_agent_launched_asynchronously_joins_nothing():
    trace = read(call(0), agent(4.5, None, call(0, first=50), call(90, first=50)), call(10, think_time=6.0))
    assert trace.arrival_time_s.tolist() == [0, 4.5, 94.5, 10]
    assert edges(trace, 1) == [(0, 0.5, "subagent")]
    assert edges(trace, 3) == [(0, 6.0, "tool")]
    assert any("1 sub-agents have no recorded end" in warning for warning in trace.meta.warnings)


@pytest.mark.parametrize("marker", [4.5, 24.5])
def test_absolute_times_of_sub_agents_are_recognised(marker):
    trace = read(call(0), agent(24.5, 20.0, call(marker, first=50), call(marker + 10, first=50)), call(60))
    assert trace.arrival_time_s.tolist() == [0, marker, marker + 10, 60]
    assert any("1 sub-agents have absolute times" in warning for warning in trace.meta.warnings)


def test_a_sub_agent_time_that_is_neither_is_refused():
    with pytest.raises(BadTraceError, match=r"must be 0 or its start 4.5 s, got 12"):
        read(call(0), agent(24.5, 20.0, call(12, first=50)), call(60))


def test_ids_are_local_to_a_file():
    trace = weka.read([("a.json", session(call(0))), ("b.json", session(call(1)))], "made")
    assert trace.shared_blocks.tolist() == [0, 0]
    assert len(set(trace.block_ids.tolist())) == 4
    assert trace.session_id.tolist() == [0, 1]
    assert trace.turn_index.tolist() == [0, 0]


def test_prompts_may_shrink():
    trace = read(call(0, blocks=9), call(5, blocks=3), call(9, blocks=2))
    assert trace.shared_blocks.tolist() == [0, 3, 2]
    assert trace.new_blocks.tolist() == [9, 0, 0]


@pytest.mark.parametrize(("extra", "partial"), [(0, "dropped"), (1, "kept")])
def test_both_ways_to_treat_the_last_partial_block_are_read(extra, partial):
    row = call(0, blocks=2 + extra) | {"in": 133}
    assert read(row).meta.partial_last == partial


def test_repeated_files_are_kept_and_named():
    twin = session(call(0), call(9))
    trace = weka.read([("a.json", twin), ("b.json", session(call(0))), ("c.json", twin)], "made")
    assert len(trace) == 5
    assert "1 files repeat another file's requests, kept: c.json (= a.json)" in trace.meta.warnings


def test_a_dropped_call_leaves_the_wait_after_it_unknown():
    trace = read(call(0), call(5) | {"in": 0, "hash_ids": []}, call(20, think_time=11.0))
    assert (trace.meta.rows_read, trace.meta.drops) == (3, {"zero_input_tokens": 1})
    assert trace.parent_request_id.tolist() == [-1, 0]
    assert np.isnan(trace.wait_before_s[1])


def test_zero_outputs_stay():
    trace = read(call(0, out=0), call(5))
    assert trace.output_tokens.tolist() == [0, 10]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (without(call(0), "in"), r"requests\[1\]: object missing required field in"),
        (call(-1), r"requests\[1\].t: expected float >= 0.0, got -1"),
        (call(0, think_time=-1.0), r"think_time: expected float >= 0.0, got -1.0"),
        (call(0, kind="x"), r"requests\[1\].type: invalid value 'x'"),
        (call(0, hash_ids=[0]), "133 tokens in blocks of 64 must have 2 ids"),
        (call(0, hash_ids=[7, 0]), "a block id must always follow the same blocks, got 0"),
    ],
)
def test_a_bad_request_names_file_and_field(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(call(0), bad)
    assert caught.value.place.startswith("made.json:1")


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"block_size": 0}, "block_size: expected int >= 1, got 0"),
        ({"hash_id_scope": "global"}, "hash_id_scope"),
        ({"requests": []}, "must have calls"),
    ],
)
def test_a_bad_session_is_refused(more, rule):
    with pytest.raises(BadTraceError, match=rule):
        weka.read([("made.json", session(**({"requests": [call(0)]} | more)))], "made.json")


def test_files_of_two_block_sizes_are_refused():
    with pytest.raises(BadTraceError, match="got 32 after 64"):
        weka.read([("a.json", session(call(0))), ("b.json", session(call(0), block_size=32))], "made")


def test_the_38_real_files(shared_data):
    trace = load(shared_data / "traces/weka-claude-code-traces/traces")
    assert (trace.meta.rows_read, len(trace), int(trace.session_id.max()) + 1) == (1_208, 1_208, 38)
    assert not any("repeat" in warning for warning in trace.meta.warnings)
    assert (trace.edge_parent < trace.edge_child).all()
    assert (trace.shared_parent < np.arange(len(trace))).all()


def test_the_whole_real_archive(shared_data):
    folder = shared_data / "traces/weka-claude-code-traces"
    trace = load(folder / "all710_original.tar.xz")
    assert (trace.meta.rows_read, len(trace), trace.meta.drops) == (49_334, 49_334, {})
    summary = inspect(trace)
    assert summary["sessions"] == 710
    tool, human = summary["tool_wait_s"], summary["human_wait_s"]
    assert (tool["n"], tool["p50"], tool["p90"]) == (41_422, 8, 67)
    assert (human["n"], human["p50"], round(human["p90"])) == (6_359, 127, 1_541)
    assert prefix_hit_token_share(trace) == pytest.approx(0.963, abs=0.0005)
    assert len(np.unique(trace.session_id.astype(np.int64) * 1000 + trace.agent_id)) == 773
    assert int((trace.output_tokens == 0).sum()) == 27

    (warning,) = [warning for warning in trace.meta.warnings if "repeat" in warning]
    groups = json.loads((folder / "derived/duplicate_groups.json").read_text())
    expected = {f"traces/{name} (= traces/{group[0]})" for group in groups for name in group[1:]}
    assert warning.startswith("18 files")
    assert set(warning.split("kept: ")[1].split(", ")) == expected

    # with recorded service, the edges give back the recorded arrivals: no span is counted twice
    known = np.isfinite(replayed(trace))
    off_s = np.abs(replayed(trace) - trace.arrival_time_s)[known]
    assert known.sum() > 48_000
    assert (off_s > 2).sum() <= 7


def test_a_folder_and_an_archive_of_it_are_the_same_trace(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "a.json").write_bytes(session(call(0), call(9)))
    (folder / "b.json").write_bytes(json.dumps(json.loads(session(call(0, blocks=5))), indent=2).encode())
    (folder / "README.md").write_text("about")
    for kind in ("", "gz", "xz"):
        path = tmp_path / "packed.bin"  # the name says nothing
        with tarfile.open(path, f"w:{kind}") as archive:
            for file in sorted(folder.iterdir(), key=lambda file: file.suffix):
                archive.add(file, file.name)
        packed, plain = load(path), load(folder)
        assert packed.input_tokens.tolist() == plain.input_tokens.tolist() == [133, 133, 325]
        assert packed.meta.warnings == plain.meta.warnings
        assert any("1 files are no traces, left out: README.md" in warning for warning in plain.meta.warnings)
