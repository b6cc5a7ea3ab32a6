"""`kvfold traces`: the JSON contract, tables that fit 80 columns, exit codes."""

import json

import pytest
from typer.testing import CliRunner

from kvfold.analysis.cmd_traces import app
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load

FLAT = "arrival_time_s,input_tokens,output_tokens\n0,10,5\n1,20,5\n1,0,5\n"


STABLE_KEYS = {
    *("format", "rows_read", "rows_kept", "drops", "span_s", "rate_per_s", "interarrival_cv", "input_tokens"),
    *("output_tokens", "sessions", "calls_per_session", "tool_wait_s", "human_wait_s", "block_size_tokens"),
    *("prefix_hit_token_share", "warnings"),
}


def run(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def flat(tmp_path):
    path = tmp_path / "flat.csv"
    path.write_text(FLAT)
    return path


def test_inspect_json_is_strict_and_repeatable(flat):
    first, second = run("inspect", flat, "--json"), run("inspect", flat, "--json")
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    summary = json.loads(first.stdout, parse_constant=pytest.fail)
    assert summary.keys() >= STABLE_KEYS | {"time_unit", "prompt_semantics", "clock", "hash_scope", "sha256"}
    assert (summary["rows_read"], summary["rows_kept"], summary["drops"]) == (3, 2, {"zero_input_tokens": 1})
    assert summary["prefix_hit_token_share"] is None
    assert summary["tool_wait_s"]["p50"] is None


def test_inspect_says_unit_block_size_semantics_drops_and_warnings(tmp_path):
    out = tmp_path / "sample.jsonl"
    made = run("synth", "sample", "--out", out)
    assert made.exit_code == 0
    shown = run("inspect", out)
    for text in (
        "unit of time",
        "64, last partial block dropped",
        "the whole prompt of each call",
        "rows dropped",
    ):
        assert text in shown.stdout
    assert "! synthetic: sessions drawn from published quantiles" in shown.stdout
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80


def test_dropped_rows_are_shown(flat):
    assert "1 zero_input_tokens" in run("inspect", flat).stdout


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_synth_poisson_writes_what_load_reads(tmp_path, suffix):
    out = tmp_path / f"load{suffix}"
    options = ("--requests", 50, "--rate", 8, "--input-tokens", 1000, "--output-tokens", 200, "--seed", 42)
    result = run("synth", "poisson", *options, "--out", out, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows_kept"] == len(load(out)) == 50
    assert "wrote" in result.stderr


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        run("synth", "sample", "--seed", 7, "--out", tmp_path / name)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "flat.csv", "--format", "vidur"),
        ("synth", "poisson", "--out", "x.txt"),
        ("synth", "poisson", "--out", "x.jsonl", "--rate", "0"),
        ("synth", "poisson", "--out", "x.jsonl", "--rate", "nan"),
        ("synth", "poisson", "--out", "x.jsonl", "--requests", "0"),
        ("synth", "sample", "--out", "no/such/folder/x.jsonl"),
        ("synth", "sample"),
    ],
)
def test_usage_errors_exit_2_and_write_nothing(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_raises_the_error_that_exits_5(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(FLAT + "nan,1,1\n")
    result = run("inspect", path)
    assert isinstance(result.exception, BadTraceError)
    assert result.exception.place == f"{path}:5"
