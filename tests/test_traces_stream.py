"""A file read row by row has the summary of the same file held in memory, or says why it must be held."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces import canonical, spill, stats, stream, synth
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.stream import inspect


def assert_same(a, b, path=""):
    """Equal, floats to 1e-9: sums of many rows are added in another order."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys(), path
        for key in a.keys() - {"kv_occupancy", "warnings"}:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-9, nan_ok=True), path
    else:
        assert a == b, path


def both(path):
    held, passed = stats.inspect(load(path)), inspect(str(path), long_bytes=0)
    assert_same(held, passed)
    kept = [text for text in passed["warnings"] if not text.startswith("read row by row")]
    assert kept == held["warnings"]
    return passed


@pytest.fixture(params=[1 << 19, 1 << 10])
def runs(request, monkeypatch):
    """Everything in memory, or through runs of about 1,000 numbers on disk."""
    monkeypatch.setattr(spill, "_RUN", request.param)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_sessions_waits_and_shared_prefixes(tmp_path, runs, suffix):
    path = tmp_path / f"t{suffix}"
    canonical.write(synth.sample(3), path)
    both(path)


def test_single_calls(tmp_path, runs):
    path = tmp_path / "t.jsonl"
    canonical.write(synth.poisson(9000, 8, 500, 20, seed=3), path)
    both(path)


def test_the_bundled_sample(runs):
    assert "read row by row" in inspect("traces/data/sample.jsonl", long_bytes=0)["warnings"][-1]
    both("traces/data/sample.jsonl")


@pytest.mark.parametrize(
    "name",
    [
        "mooncake-fast25/conversation_trace.jsonl",
        "mooncake-arxiv-toolagent-slice/mooncake_trace_slice_93rows.jsonl",
    ],
)
def test_real_traces(shared_data, runs, name):
    both(shared_data / "traces" / name)


_rows = st.lists(
    st.fixed_dictionaries(
        {
            "timestamp": st.integers(0, 5000),
            "input_length": st.sampled_from([0, 100, 512, 700, 1024]),
            "output_length": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(rows=_rows)
def test_rows_out_of_order_without_a_prompt_and_with_partial_blocks(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    prompts = {100: [1], 512: [2], 700: [2, 3], 1024: [2, 4], 0: []}
    lines = [json.dumps(row | {"hash_ids": prompts[row["input_length"]]}) for row in rows]
    path.write_text("\n".join(lines))
    if not any(row["input_length"] for row in rows):
        with pytest.raises(BadTraceError, match="got none with a prompt"):
            inspect(str(path), long_bytes=0)
    else:
        assert_same(stats.inspect(load(path)), inspect(str(path), long_bytes=0))


HEADER = '{"kvfold_trace": 1, "block_size_tokens": 64, "hash_scope": "%s"}\n'


def row(arrival_s, **more):
    return json.dumps({"arrival_time_s": arrival_s, "input_tokens": 128, "output_tokens": 1} | more) + "\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (row(0, request_id=7) + row(1, parent_request_id=7), "numbered by request_id"),
        (row(1) + row(0) + row(2, parent_request_id=1), "not in order of arrival"),
        (row(0, input_tokens=0) + row(1) + row(2, parent_request_id=1), "some have no prompt"),
        (
            HEADER % "global"
            + row(1, new_block_ids=[1, 2])
            + row(0.5, new_block_ids=[3, 4])
            + row(2, shared_parent=0, shared_blocks=2),
            "not in order of arrival",
        ),
        (HEADER % "session" + row(0, session_id=0, new_block_ids=[1, 2]), "inside their session only"),
        (
            HEADER % "global"
            + row(0, new_block_ids=[1, 2])
            + row(1, shared_parent=0, shared_blocks=1, new_block_ids=[3])
            + row(2, new_block_ids=[1, 2]),
            "block ids come again beside shared_blocks",
        ),
    ],
)
def test_what_needs_the_whole_table_is_held_and_says_so(tmp_path, text, reason):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    summary = inspect(str(path), long_bytes=0)
    assert reason in summary["warnings"][-1]
    assert summary["rows_kept"] == len(load(path))


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (row(0) + row(None), "may be left out only in a call that stands after its parent", 2),
        (row(0) + row(1, parent_request_id=1), "a parent must be an earlier call", 2),
        (row(0) + row(1, parents=["9::tool"]), "a parent must be an earlier call", 2),
        (row(0) + row(-1), "arrival_time_s: expected float >= 0.0", 2),
        (row(0, new_block_ids=[1, 2]), "block ids need block_size_tokens", 1),
        (HEADER % "global" + row(0, new_block_ids=[1]), "must have 2 ids", 2),
        (
            HEADER % "global" + row(0, new_block_ids=[1, 2]) + row(1, shared_parent=0, shared_blocks=3),
            "shared_blocks must be at most the blocks|must have 2 ids",
            3,
        ),
        (HEADER % "global" + row(0, new_block_ids=[1, 2]) + row(1, new_block_ids=[2, 1]), "always follow", 3),
        (HEADER % "global" + row(0, new_block_ids=[1, 1]), "may stand once in a chain", 2),
        ('{"kvfold_trace": 1, "rows": 3}\n' + row(0), "must have the 3 rows", None),
    ],
)
def test_a_bad_row_is_named(tmp_path, text, rule, line):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BadTraceError, match=rule) as caught:
        inspect(str(path), long_bytes=0)
    assert caught.value.place == (f"{path}:{line}" if line else str(path))


def test_equal_gaps_are_remarked(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = synth.poisson(300, 8, 500, 20, seed=3)
    canonical.write(replace(trace, arrival_time_s=np.arange(300.0)), path)
    assert any("99 % of the gaps are 1 s" in text for text in both(path)["warnings"])


def test_short_files_and_other_formats_are_held(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00.0000000,7,1\n")
    assert inspect(str(path), long_bytes=0)["format"] == "azure"
    assert not math.isnan(inspect("traces/data/sample.jsonl")["kv_occupancy"]["waits_unknown"])
    assert set(stream.OPENERS) == {"canonical", "mooncake"}
