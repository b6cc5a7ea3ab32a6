"""`kvfold traces synth`: files, summaries, the comparison with a real trace, and usage errors."""

import json

import pytest
from typer.testing import CliRunner

from kvfold.analysis.cli import app
from kvfold.traces.load import load


def run(*arguments):
    return CliRunner().invoke(app, ["traces", "synth", *map(str, arguments)])


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (("agent", "--sessions", 8, "--context-limit", "64K"), None),
        (("chat", "--requests", 300, "--system-tokens", 500, "--clients", 5), 300),
        (("rag", "--requests", 200, "--rate", 2), 200),
    ],
)
def test_a_file_and_its_summary(tmp_path, command, rows):
    out = tmp_path / "made.jsonl"
    result = run(*command, "--out", out, "--seed", 9, "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    trace = load(out)
    assert summary["rows_kept"] == len(trace) == (rows or len(trace))
    assert summary["hash_scope"] == "global"
    before = out.read_bytes()
    again = run(*command, "--out", out, "--seed", 9, "--json")
    assert (again.stdout, out.read_bytes()) == (result.stdout, before)
    assert run(*command, "--out", tmp_path / "other.jsonl", "--seed", 10).exit_code == 0
    assert (tmp_path / "other.jsonl").read_bytes() != before


def test_like_a_trace(tmp_path):
    source, out = tmp_path / "real.csv", tmp_path / "like.jsonl"
    rows = "".join(f"{0.5 * row + 0.1 * (row % 3)},{100 + row % 50},{10 + row % 7}\n" for row in range(2_000))
    source.write_text("arrival_time_s,input_tokens,output_tokens\n" + rows)
    result = run("--like", source, "--out", out, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    by_name = {row["name"]: row for row in found["comparison"]}
    assert by_name["input_tokens p50"]["real"] == 124.5
    assert abs(by_name["input_tokens p50"]["change"]) < 0.03
    assert by_name["rows_kept"]["synthetic"] == len(load(out)) == 2_000
    assert any("no prefix sharing" in note for note in found["notes"])
    table = run("--like", source, "--out", out)
    assert "Real and synthetic" in table.stdout
    assert "daily rhythm is not" in " ".join(table.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Commands"),
        (("--like", "x.csv"), "--out"),
        (("chat", "--out", "{tmp}/x.jsonl", "--rate", "0"), "must be a positive number"),
        (("chat", "--out", "{tmp}/x.jsonl", "--active-share", "2"), "above 0 and at most 1"),
        (("agent", "--out", "{tmp}/x.jsonl", "--context-limit", "20K"), "twice the system prompt"),
        (("agent", "--out", "{tmp}/x.jsonl", "--context-limit", "lots"), "a number of tokens"),
        (("rag", "--out", "{tmp}/x.txt"), "must end in"),
        (("--like", "{tmp}/x.csv", "--out", "{tmp}/y.jsonl", "--format", "mystery"), "must be one of"),
    ],
)
def test_usage_errors(tmp_path, arguments, message):
    result = run(*(each.replace("{tmp}", str(tmp_path)) for each in arguments))
    assert result.exit_code == 2 or (result.exception and "number of tokens" in str(result.exception))
    shown = " ".join((result.stdout + result.stderr + str(result.exception or "")).replace("│", " ").split())
    assert message in shown
    assert list(tmp_path.iterdir()) == []
