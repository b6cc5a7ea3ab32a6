"""`kvfold traces`: the JSON contract, tables that fit 80 columns, exit codes."""

import json

import pytest
from typer.testing import CliRunner

from kvfold.analysis.cmd_traces import app
from kvfold.analysis.trace_input import progress
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
        ("inspect", "flat.csv", "--format", "no-such"),
        ("validate", "flat.csv", "--format", "vidurr"),
        ("convert", "flat.csv", "x.txt"),
        ("convert", "flat.csv", "no/such/folder/x.jsonl"),
        ("convert", "flat.csv", "x.jsonl", "--to", "splitwise"),
        ("inspect", "flat.csv", "--columns", "when=ts"),
        ("inspect", "flat.csv", "--chars-per-token", "0"),
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


def test_convert_writes_the_file_and_says_what_it_does_not_hold(tmp_path, flat):
    out = tmp_path / "out.parquet"
    result = run("convert", flat, out, "--json")
    summary = json.loads(result.stdout)
    assert summary.keys() >= STABLE_KEYS | {"to", "not_held", "replay_command"}
    assert (summary["rows_kept"], summary["not_held"]) == (2, {})
    assert "wrote" in result.stderr
    assert load(out).input_tokens.tolist() == [10, 20]
    peers = run("convert", "traces/data/sample.jsonl", tmp_path / "v.jsonl", "--to", "vllm-bench")
    assert "What vllm-bench does not hold" in peers.stdout
    assert "--timed-trace-chunk-hash-size 64" in peers.stdout
    assert max(len(line) for line in peers.stdout.splitlines()) <= 80


@pytest.mark.parametrize("command", [("inspect",), ("validate",), ("convert", "out.jsonl")])
def test_every_command_refuses_a_bad_file_and_leaves_nothing(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(FLAT + "2,-5,1\n")
    result = run(command[0], "t.csv", *command[1:])
    assert isinstance(result.exception, BadTraceError)
    assert str(result.exception).startswith("t.csv:5: input_tokens: expected int >= 0")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_validate_names_the_laws_and_how_much_they_were_checked_on():
    shown = run("validate", "traces/data/sample.jsonl")
    assert shown.exit_code == 0
    assert "a block must be new once" in shown.stdout
    laws = json.loads(run("validate", "traces/data/sample.jsonl", "--json").stdout)["laws"]
    assert {law["name"]: law["checked"] for law in laws}["blocks = chain"] == 28_883


def test_validate_refuses_what_loads_and_breaks_a_law(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_time_s,input_tokens,output_tokens,recorded_cached_tokens\n0,10,5,11\n")
    assert run("inspect", path).exit_code == 0
    error = run("validate", path).exception
    assert isinstance(error, BadTraceError)
    assert str(error).startswith(f"{path}:2: recorded_cached_tokens must be at most input_tokens")


def test_a_format_can_be_forced(tmp_path, flat):
    assert json.loads(run("inspect", flat, "--format", "canonical", "--json").stdout)["rows_read"] == 3
    assert isinstance(run("inspect", flat, "--format", "azure").exception, BadTraceError)


def test_long_reading_is_told_on_stderr(monkeypatch, capsys):
    from kvfold.analysis import trace_input

    monkeypatch.setattr(trace_input, "_QUIET_S", 0.0)
    monkeypatch.setattr(trace_input, "_LINE_S", 0.0)
    with trace_input.progress() as report:
        report(25, 100)
    assert capsys.readouterr().err.startswith("read 25% of 100 bytes, about ")


def test_a_second_reading_has_an_estimate_of_its_own(monkeypatch, capsys):
    now_s = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    with progress() as report:
        for at_s, done in ((100.0, 50), (200.0, 100), (201.0, 1), (300.0, 50)):
            now_s[0] = at_s
            report(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "read 50% of 100 bytes, about 100 s to go"
    assert lines[-1] == "read 50% of 100 bytes, about 99 s to go"
    assert not any("read 1%" in line for line in lines)
