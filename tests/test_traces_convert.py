"""What is written is what was read, row by row or held; what a target cannot hold is counted."""

import dataclasses
import json

import numpy as np
import pytest

from kvfold.traces import canonical, synth
from kvfold.traces.columns import assemble
from kvfold.traces.convert import convert
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.table import Meta, Trace

MOONCAKE = "".join(
    json.dumps({"timestamp": at, "input_length": tokens, "output_length": 3, "hash_ids": ids}) + "\n"
    for at, tokens, ids in [(90, 700, [1, 2]), (50, 1100, [1, 3, 4]), (50, 0, []), (70, 512, [1])]
)


def assert_same(a: Trace, b: Trace, but=()):
    for column in dataclasses.fields(Trace):
        x, y = getattr(a, column.name), getattr(b, column.name)
        if column.name in ("meta", *but):
            continue
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y, err_msg=column.name)
        else:
            assert x == y, column.name


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(MOONCAKE)
    return path


@pytest.mark.parametrize("long_bytes", [0, 1 << 40])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_canonical_table_reads_back_exactly(tmp_path, mooncake, suffix, long_bytes):
    out = tmp_path / f"out{suffix}"
    for source in (mooncake, "traces/data/sample.jsonl"):
        before = load(source)
        summary = convert(str(source), out, long_bytes=long_bytes)
        after = load(out)
        assert_same(before, after)
        assert (summary["rows_kept"], summary["not_held"]) == (len(after), {})
    convert(str(mooncake), out, long_bytes=long_bytes)
    assert (
        load(out)
        .meta.warnings[0]
        .startswith(
            "converted from mooncake in.jsonl: 4 rows read, 3 kept, 1 dropped for zero_input_tokens, sha256 "
        )
    )


def test_mooncake_reads_back_exactly(shared_data, tmp_path):
    out = tmp_path / "out.jsonl"
    source = shared_data / "traces/mooncake-fast25/conversation_trace.jsonl"
    summary = convert(str(source), out, "mooncake")
    assert summary["not_held"] == {}
    assert_same(load(source), load(out))


def test_what_mooncake_cannot_hold_is_counted(tmp_path):
    columns = {
        "arrival_time_s": [0.0, 1.0005, 2.0, 3.0],
        "input_tokens": [1000, 600, 512, 5],
        "output_tokens": [5, 0, -1, 7],
        "session_id": [0, 0, -1, -1],
        "model": ["m", "", "", ""],
        "recorded_ttft_s": [0.5, np.nan, np.nan, np.nan],
    }
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    canonical.write(assemble(Meta("canonical", "made", "", "s", rows_read=4, rows_kept=4), columns), path)
    held = convert(str(path), out, "mooncake")["not_held"]
    assert held.pop("prompts whose sharing the source does not tell: nothing of them is shared") == 3
    assert held == {
        "session_id": 2,
        "model": 1,
        "recorded_ttft_s": 1,
        "arrivals rounded to 1 ms": 1,
        "calls left out: output_tokens unknown": 1,
    }
    assert [len(json.loads(line)["hash_ids"]) for line in out.read_text().splitlines()] == [2, 2, 1]
    assert load(out).shared_blocks.tolist() == [0, 0, 0]


def test_small_blocks_become_blocks_of_512_that_share_the_same_tokens(tmp_path):
    out = tmp_path / "out.jsonl"
    source = load("traces/data/sample.jsonl")
    convert("traces/data/sample.jsonl", out, "mooncake")
    made = load(out)
    np.testing.assert_array_equal(made.input_tokens, source.input_tokens)
    # the shared part of a prompt, cut to whole blocks of 512
    np.testing.assert_array_equal(made.shared_blocks, source.shared_blocks * 64 // 512)


def test_vllm_gets_seconds_an_id_for_every_token_and_the_command(tmp_path):
    out = tmp_path / "out.jsonl"
    summary = convert("traces/data/sample.jsonl", out, "vllm-bench")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    source = load("traces/data/sample.jsonl")
    assert [line["timestamp"] for line in lines] == source.arrival_time_s.tolist()
    for line in lines:
        assert 64 * (len(line["hash_ids"]) - 1) < line["input_length"] <= 64 * len(line["hash_ids"])
    assert (
        "--timed-trace-chunk-hash-size 64 --timed-trace-sec-multiplier 1 --self-timed"
        in summary["replay_command"]
    )
    seen: set[int] = set()
    for line, shared in zip(lines, source.shared_blocks.tolist(), strict=True):
        assert [block in seen for block in line["hash_ids"]] == [
            at < shared for at in range(len(line["hash_ids"]))
        ]
        seen |= set(line["hash_ids"])


@pytest.mark.parametrize(
    ("to", "name", "rule"),
    [
        ("vidur", "out.jsonl", "the target must be one of canonical, mooncake, vllm-bench"),
        ("mooncake", "out.csv", "a mooncake file end in .jsonl"),
        ("canonical", "out.json", "end in .jsonl, .csv, .parquet"),
    ],
)
def test_a_target_that_is_none_is_refused(tmp_path, mooncake, to, name, rule):
    with pytest.raises(ValueError, match=rule):
        convert(str(mooncake), tmp_path / name, to)
    assert not (tmp_path / name).exists()


def test_sessions_without_a_common_clock_cannot_be_replayed_by_time(shared_data, tmp_path):
    folder = str(shared_data / "traces/weka-claude-code-traces/traces")
    with pytest.raises(ValueError, match="each session of this trace has its own"):
        convert(folder, tmp_path / "out.jsonl", "mooncake")


@pytest.mark.parametrize("long_bytes", [0, 1 << 40])
def test_after_an_error_the_old_file_is_whole(tmp_path, mooncake, long_bytes):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    mooncake.write_text(MOONCAKE + '{"timestamp": 5}\n')
    with pytest.raises(BadTraceError, match=r"in.jsonl:5: object missing required field input_length"):
        convert(str(mooncake), out, long_bytes=long_bytes)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_file_may_be_converted_onto_itself(tmp_path, mooncake):
    before = load(mooncake)
    convert(str(mooncake), mooncake, long_bytes=0)
    assert_same(before, load(mooncake))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "text", ["=1+1", "+a", "-a", "@a", "'=a", "''-", "'a", "\t=a", "\r", "a=1", "'", "''"]
)
def test_formulas_are_no_formulas_in_csv_and_read_back(tmp_path, suffix, text):
    out = tmp_path / f"out{suffix}"
    columns = {"arrival_time_s": [0.0], "input_tokens": [1], "output_tokens": [1]}
    columns |= {name: [text] for name in ("source_id", "model", "tenant", "tool_names")}
    canonical.write(assemble(Meta("canonical", "made", "", "s", rows_read=1, rows_kept=1), columns), out)
    assert load(out).model == [text]
    if suffix == ".csv":
        cells = out.read_text().split("\n", 2)[2].replace('"', "").split(",")
        assert not any(cell[:1] in "=+-@\t\r" for cell in cells if cell and cell.strip())


def test_synthetic_load_survives_all_three(tmp_path):
    trace = synth.poisson(50, 8, 1000, 200, seed=42)
    canonical.write(trace, tmp_path / "a.jsonl")
    convert(str(tmp_path / "a.jsonl"), tmp_path / "b.csv")
    convert(str(tmp_path / "b.csv"), tmp_path / "c.parquet")
    convert(str(tmp_path / "c.parquet"), tmp_path / "d.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "d.jsonl").read_bytes()
