"""The canonical table on disk: what is written comes back, bit for bit, and bad rows are named."""

import csv
import dataclasses
import io
import json
import subprocess
import sys
from math import nan

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces import canonical, synth
from kvfold.traces.columns import Edges, assemble
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.prefix import Chains, chain_of
from kvfold.traces.table import Meta, Trace

HEADER = {"kvfold_trace": 1, "block_size_tokens": 64, "hash_scope": "global"}
SUFFIXES = (".jsonl", ".csv", ".parquet")


def assert_same_columns(a: Trace, b: Trace) -> None:
    for column in dataclasses.fields(Trace):
        x, y = getattr(a, column.name), getattr(b, column.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, column.name
            np.testing.assert_array_equal(x, y, err_msg=column.name)  # NaN equals NaN
        elif column.name != "meta":
            assert x == y, column.name


def read(*rows: dict | str) -> Trace:
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return canonical.read(io.BytesIO(lines.encode()), "c.jsonl")


def row(
    arrival_time_s: float | None = 0.0, input_tokens: int = 100, output_tokens: float = 5, **more
) -> dict:
    return {
        "arrival_time_s": arrival_time_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
    } | more


_text = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=6)
_seconds = st.one_of(st.just(nan), st.floats(0, 1e6, allow_subnormal=False))


@st.composite
def traces(draw) -> Trace:
    """A trace with every column in use: waits and joins, unknown values, shared prefixes, awkward texts."""
    rows = draw(st.integers(1, 8))
    edges, chains = Edges(), Chains()
    parents: list[int] = []
    built: list[list[int]] = []
    for at in range(rows):
        earlier = draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True)) if at else []
        parents.append(earlier[0] if earlier else -1)
        for parent in earlier:
            edges.add(at, parent, draw(_seconds), draw(st.integers(0, 5)))
        base = draw(st.sampled_from([[], *built]))
        built.append(
            base[: draw(st.integers(0, len(base)))] + [at * 10 + n for n in range(draw(st.integers(1, 3)))]
        )
        chains.add(built[-1], str(at))

    def each(values):
        return [draw(values) for _ in range(rows)]

    columns = chains.columns() | {
        "source_id": each(_text),
        "source_row": each(st.integers(-1, 2**62)),
        "session_id": each(st.integers(-1, 5)),
        "turn_index": list(range(rows)),
        "agent_id": each(st.integers(0, 3)),
        "parent_request_id": parents,
        "arrival_time_s": sorted(each(st.floats(0, 1e9, allow_subnormal=False))),
        "wait_before_s": each(_seconds),
        "wait_kind": each(st.integers(0, 5)),
        "wait_source": each(st.integers(0, 3)),
        "input_tokens": [64 * len(chain) + draw(st.integers(0, 63)) for chain in built],
        "output_tokens": each(st.integers(-1, 10**6)),
        "reasoning_tokens": each(st.integers(-1, 10)),
        "recorded_cached_tokens": each(st.integers(-1, 10)),
        "recorded_e2e_s": each(_seconds),
        "recorded_ttft_s": each(_seconds),
        "status": each(st.integers(0, 3)),
        "model": each(_text),
        "tenant": each(_text),
        "tool_names": each(_text),
    }
    meta = Meta(
        "canonical",
        "made",
        "",
        "s",
        block_size_tokens=64,
        hash_scope="global",
        rows_read=rows,
        rows_kept=rows,
    )
    return assemble(meta, columns, edges)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40, deadline=None)
@given(trace=traces())
def test_round_trip_is_exact(tmp_path_factory, suffix, trace):
    path = tmp_path_factory.getbasetemp() / f"round{suffix}"
    canonical.write(trace, path)
    back = load(path)
    assert_same_columns(trace, back)
    assert back.meta.warnings == trace.meta.warnings
    canonical.write(back, path)
    assert_same_columns(trace, load(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "name", ["azure-llm-2023/AzureLLMInferenceTrace_code.csv", "weka-claude-code-traces/traces"]
)
def test_round_trip_of_real_traces(shared_data, tmp_path, suffix, name):
    trace = load(shared_data / "traces" / name)
    path = tmp_path / f"real{suffix}"
    canonical.write(trace, path)
    back = load(path)
    assert_same_columns(trace, back)
    meta, kept = back.meta, trace.meta
    assert (meta.clock, meta.block_size_tokens, meta.hash_scope) == (
        kept.clock,
        kept.block_size_tokens,
        kept.hash_scope,
    )
    assert meta.partial_last == kept.partial_last
    assert back.meta.warnings[0].startswith(f"converted from {kept.format} ")
    assert kept.sha256 in back.meta.warnings[0]


def test_a_flat_file_needs_three_columns():
    trace = canonical.read(
        io.BytesIO(b"arrival_time_s,input_tokens,output_tokens\r\n0.5,10,-1\r\n1.5,20,7"), "f.csv"
    )
    assert trace.arrival_time_s.tolist() == [0.5, 1.5]
    assert trace.output_tokens.tolist() == [-1, 7]
    assert trace.source_row.tolist() == [2, 3]
    assert (trace.meta.hash_scope, trace.session_id.tolist()) == ("none", [-1, -1])
    assert any("output_tokens is unknown on 1 calls" in warning for warning in trace.meta.warnings)


def test_rows_are_sorted_stably_and_references_follow():
    trace = read(
        row(5.0, input_tokens=1),
        row(2.0, input_tokens=2, request_id=70),
        row(2.0, input_tokens=3, parents=["70:1.5:tool"], request_id=90),
    )
    assert trace.input_tokens.tolist() == [2, 3, 1]
    assert (trace.edge_child.tolist(), trace.edge_parent.tolist()) == ([1], [0])
    assert trace.edge_wait_s.tolist() == [1.5]
    assert trace.parent_request_id.tolist() == [-1, 0, -1]


def test_a_call_without_an_arrival_follows_its_parent():
    trace = read(row(9.0, input_tokens=1), row(3.0, input_tokens=2), row(None, 3, parent_request_id=1))
    assert trace.input_tokens.tolist() == [2, 3, 1]
    assert np.isnan(trace.arrival_time_s[1])
    assert np.isnan(trace.edge_wait_s[0])


def test_rows_may_carry_whole_chains():
    trace = read(
        HEADER,
        row(0, 128, new_block_ids=[1, 2]),
        row(1, 192, new_block_ids=[1, 2, 3]),
        row(2, 64, new_block_ids=[1]),
    )
    assert trace.shared_blocks.tolist() == [0, 2, 1]
    assert trace.block_ids.tolist() == [1, 2, 3]
    assert chain_of(trace, 1).tolist() == [1, 2, 3]


def test_whole_chains_of_two_sessions_do_not_meet():
    header = HEADER | {"hash_scope": "session"}
    trace = read(
        header,
        row(0, 64, session_id=0, new_block_ids=[1]),
        row(1, 64, session_id=1, new_block_ids=[1]),
        row(2, 128, session_id=0, new_block_ids=[1, 2]),
    )
    assert trace.shared_parent.tolist() == [-1, -1, 0]
    assert len(set(trace.block_ids.tolist())) == 3


def test_rows_without_a_prompt_are_dropped_by_name():
    trace = read(row(0), row(1, input_tokens=0), row(2))
    assert (trace.meta.rows_read, trace.meta.rows_kept, trace.meta.drops) == (3, 2, {"zero_input_tokens": 1})


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (row(-1.0), "arrival_time_s: expected float >= 0.0, got -1.0"),
        (row(None), "arrival_time_s may be left out only in a call that stands after its parent"),
        ('{"arrival_time_s": NaN, "input_tokens": 1, "output_tokens": 1}', "one whole JSON object"),
        (
            '{"arrival_time_s": 1e999, "input_tokens": 1, "output_tokens": 1}',
            "arrival_time_s: number out of range",
        ),
        (
            '{"arrival_time_s": 1e300, "input_tokens": 1, "output_tokens": 1}',
            "arrival_time_s: expected float <=",
        ),
        (row(input_tokens=-3), "input_tokens: expected int >= 0, got -3"),
        (row(output_tokens=-2), "output_tokens: expected int >= -1, got -2"),
        (row(output_tokens=1.5), "output_tokens: expected int, got float"),
        ({"arrival_time_s": 0, "output_tokens": 1}, "missing required field input_tokens"),
        (row(latency=3), "unknown field latency"),
        (row(wait_kind="tools"), "wait_kind: expected str matching regex .* got 'tools'"),
        (row(parents=["0:-1:tool"]), "a parent must be id:wait_s:kind"),
        (row(parents=["0:nan:tool"]), "a parent must be id:wait_s:kind"),
        (row(parents=["0:1"]), "a parent must be id:wait_s:kind"),
        (row(parents=["7:1:tool"]), "a parent must be an earlier call, but call 7 is not in the file"),
        (row(parents=["1:1:tool"]), "a parent must be an earlier call, but call 1 arrives later"),
        (
            row(parents=["0:1:tool"], parent_request_id=3),
            "parent_request_id must be the first of parents, got 3 and 0",
        ),
        (row(request_id=0), "request_id must be unique, got 0 here and in c.jsonl:2"),
        (
            row(shared_blocks=1, shared_parent=0),
            "shared_blocks must be at most the 0 blocks of shared_parent, got 1",
        ),
        (row(new_block_ids=[4, 4]), "a block id may stand once in a chain, got 4 twice"),
        (row(input_tokens=64, new_block_ids=[4, 5, 6]), "64 tokens in blocks of 64 must have 1 ids, got 3"),
        ('{"arrival_time_s": 1, "inp', "one whole JSON object"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(HEADER, row(0.0, input_tokens=1), bad)
    assert caught.value.place == "c.jsonl:3"
    assert caught.value.mend


def test_a_parent_that_was_dropped_is_named():
    with pytest.raises(BadTraceError, match="call 0 has no prompt"):
        read(row(0, input_tokens=0), row(1, parent_request_id=0))


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        ({"rows": 7}, "the file must have the 7 rows that its header states, got 1"),
        ({"kvfold_trace": 2}, "kvfold_trace"),
        ({"prompt_semantics": "delta"}, "prompt_semantics: invalid enum value 'delta'"),
        ({"hash_scope": "none"}, "block ids need block_size_tokens and hash_scope"),
        ({"hash_scope": "session"}, "session-scoped block ids need a session_id"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(header, rule):
    with pytest.raises(BadTraceError, match=rule):
        read(HEADER | header, row(0, 64, new_block_ids=[1]))


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("arrival_time_s,input_tokens\n1,2\n", "output_tokens is missing", 1),
        ("arrival_time_s,input_tokens,output_tokens\n1,2\n", "3 cells as the header has, got 2", 2),
        ("arrival_time_s,input_tokens,output_tokens\n1,2,3\nnan,2,3\n", "arrival_time_s: expected float", 3),
        ("arrival_time_s,input_tokens,output_tokens\ninf,2,3\n", "arrival_time_s: expected float", 2),
        ("arrival_time_s,input_tokens,output_tokens\n1,2 000,3\n", "input_tokens: expected int, got str", 2),
        ("arrival_time_s,input_tokens,output_tokens\n,2,3\n", "arrival_time_s may be left out only", 2),
        ('arrival_time_s,input_tokens,output_tokens\n1,2,"3\n', "valid CSV", 2),
        ("arrival_time_s,input_tokens,output_tokens\n1,2,\xff\n", "UTF-8", 2),
        ('# {"kvfold_trace":1,"rows":2}\narrival_time_s,input_tokens,output_tokens\n1,2,3\n', "2 rows", None),
        (
            '# {"kvfold_trace":1,"ro\narrival_time_s,input_tokens,output_tokens\n1,2,3\n',
            "whole JSON object",
            1,
        ),
        ('# {"kvfold_trace":1}\narrival_time_s,input_tokens,output_tokens\n1,-2,3\n', "input_tokens", 3),
    ],
)
def test_a_bad_csv_is_named(text, rule, line):
    with pytest.raises(BadTraceError, match=rule) as caught:
        canonical.read(io.BytesIO(text.encode("latin-1")), "c.csv")
    assert caught.value.place == ("c.csv" if line is None else f"c.csv:{line}")


def test_a_cut_off_parquet_file_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    canonical.write(synth.poisson(10, 1, 100, 5, seed=1), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadTraceError, match="a Parquet file must be whole"):
        load(path)


def test_parquet_rows_of_nothing_but_nulls_are_not_lost(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"arrival_time_s": pa.nulls(2, pa.float64()), "input_tokens": pa.nulls(2, pa.int64())}), path
    )
    with pytest.raises(BadTraceError, match="missing required field input_tokens") as caught:
        canonical.read(io.BytesIO(path.read_bytes()), "c.parquet")
    assert caught.value.place == "c.parquet:1"


def test_a_column_that_stands_twice_is_refused():
    text = b"arrival_time_s,input_tokens,output_tokens,input_tokens\n1,2,3,4\n"
    with pytest.raises(BadTraceError, match="a column may stand once, got 'input_tokens' twice"):
        canonical.read(io.BytesIO(text), "c.csv")


def test_csv_texts_are_quoted(tmp_path):
    path = tmp_path / "t.csv"
    meta = Meta("canonical", "made", "", "s", rows_read=1, rows_kept=1)
    canonical.write(assemble(meta, {"input_tokens": [1], "arrival_time_s": [0.0], "model": ['a,"b"']}), path)
    assert next(csv.DictReader(path.read_text().splitlines()[1:]))["model"] == 'a,"b"'


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    monkeypatch.setattr(canonical, "rows_of", lambda trace: iter([1 / 0]))
    with pytest.raises(ZeroDivisionError):
        canonical.write(synth.poisson(3, 1, 100, 5, seed=1), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .jsonl, .csv, .parquet, got t.txt"):
        canonical.write(synth.poisson(3, 1, 100, 5, seed=1), tmp_path / "t.txt")


def test_reading_jsonl_and_csv_needs_no_heavy_import(tmp_path):
    trace = synth.poisson(10, 1, 100, 5, seed=1)
    for suffix in (".jsonl", ".csv"):
        canonical.write(trace, tmp_path / f"t{suffix}")
    code = (
        "import sys; from kvfold.traces.load import load;"
        f"[load({str(tmp_path)!r} + '/t' + suffix) for suffix in ('.jsonl', '.csv')];"
        "print(sorted({'pandas', 'pyarrow', 'numba', 'scipy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
