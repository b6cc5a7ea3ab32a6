"""The program as a user meets it: exit codes, one line per error, strict JSON, nothing half-written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
REPLAY = ("replay", "{file}", "--model", "qwen3-8b", "--gpu", "h200")
PLAN = ("plan", "--model", "qwen3-8b", "--gpu", "h200", "--trace", "{file}", "--report", "{folder}/plan.html")


def kvfold(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvfold.analysis.cli", *arguments], capture_output=True, text=True, check=False
    )


def write(folder: Path, content: bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(content)
    return path


BAD_FILES = {
    "empty": b"",
    "binary": bytes(range(256)) * 20,
    "header only": AZURE.encode(),
    "truncated row": (AZURE + ROW + "2023-11-16 18:15:50.9951690,39").encode(),
    "negative": (AZURE + ROW + "2023-11-16 18:15:50.9951690,-396,109\n").encode(),
    "NaN": (AZURE + ROW + "2023-11-16 18:15:50.9951690,nan,109\n").encode(),
    "NaN in JSON": b'{"timestamp": NaN, "input_length": 10, "output_length": 5, "hash_ids": [0]}\n',
    "1e999": b'{"timestamp": 1e999, "input_length": 10, "output_length": 5, "hash_ids": [0]}\n',
    "prose": b"not a trace at all\n",
}


@pytest.mark.parametrize("command", [REPLAY, PLAN, ("traces", "inspect", "{file}")], ids=lambda c: c[0])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_exit_5(tmp_path, name, command):
    path = write(tmp_path, BAD_FILES[name])
    result = kvfold(*(part.format(file=path, folder=tmp_path) for part in command))
    assert result.returncode == 5, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert str(path) in lines[0]
    assert "Traceback" not in result.stderr
    assert [found.name for found in tmp_path.iterdir()] == ["trace.csv"]


def test_a_bad_row_is_named_with_its_line(tmp_path):
    path = write(tmp_path, BAD_FILES["negative"])
    assert f"{path}:3" in kvfold("traces", "inspect", str(path)).stderr


def test_a_missing_file(tmp_path):
    result = kvfold("replay", str(tmp_path / "none.csv"), "--model", "qwen3-8b", "--gpu", "h200")
    assert result.returncode == 5
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--model", "qwen3-8bb", "--gpu", "h200"), 2, "did you mean qwen3-8b"),
        (("--model", "qwen3-8b", "--gpu", "h20"), 2, "did you mean"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--format", "gacc"), 2, "did you mean gaac"),
        (("--model", "llama-3.1-405b", "--gpu", "h100"), 4, "weights"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--kv-budget", "1KiB"), 4, "KV pool"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--kv-budget", "-1"), 2, "size"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--slo", "ttft=nan"), 2, "SLO"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--rate-scale", "0"), 2, "positive"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--concurrency", "0"), 2, ""),
        (("--model", "qwen3-8b", "--gpu", "h200", "--max-num-seqs", "0"), 2, "at least 1"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--retention", "magic"), 2, "least-waste or oracle"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--retention", "ttl:x"), 2, "from 0 up"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--router", "nearest"), 2, "round-robin"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--replicas", "0"), 2, "at least 1"),
        (("--model", "qwen3-8b", "--gpu", "h100", "--strict-costs"), 2, "cost table"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--strict-costs"), 2, "extrapolated"),
        (("--model", "qwen3-8b", "--gpu", "m4"), 2, "unknown"),
        (("--model", "qwen3-8b", "--gpu", "h200", "--no-such-option"), 2, "no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_arguments(tmp_path, arguments, code, text):
    path = write(tmp_path, (AZURE + ROW).encode())
    result = kvfold("replay", str(path), *arguments)
    assert result.returncode == code, result.stderr
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_replay_json_has_the_promised_keys(tmp_path):
    path = write(tmp_path, (AZURE + ROW * 3).encode())
    arguments = (
        "replay",
        str(path),
        "--model",
        "qwen3-8b",
        "--gpu",
        "h200",
        "--json",
        "--out",
        f"{tmp_path}/out",
    )
    one, other = kvfold(*arguments), kvfold(*arguments)
    assert one.returncode == 0, one.stderr
    assert one.stdout == other.stdout
    found = json.loads(one.stdout, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert set(found["counts"]) == {"offered", "completed", "rejected", "timed_out", "failed"}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        assert set(found["metrics"][name]) >= {"mean", "p50", "p90", "p95", "p99", "n"}
    assert set(found) >= {
        "output_tok_s",
        "total_tok_s",
        "makespan_s",
        "goodput_rps",
        "slo_attainment",
        "preemptions",
        "sessions",
        "energy_j_per_output_token",
    }
    assert set(found["kv"]) >= {
        "peak_bytes",
        "mean_bytes",
        "raw_block_share",
        "slot_waste_share",
        "prefix_hit_token_share",
    }
    records = (tmp_path / "out" / "calls.csv").read_text().splitlines()
    assert len(records) == 4
    assert records[0].startswith("request_id,session_id,input_tokens,output_tokens,arrival_s")


def test_stepwise_prints_the_same_json(tmp_path):
    path = write(tmp_path, (AZURE + ROW * 40).encode())
    arguments = ("replay", str(path), "--model", "qwen3-8b", "--gpu", "h200", "--json")
    assert kvfold(*arguments).stdout == kvfold(*arguments, "--stepwise").stdout


def test_step_json_has_the_promised_keys():
    result = kvfold(
        "step", "--model", "qwen3-8b", "--gpu", "h200", "--batch", "8", "--context", "16K", "--json"
    )
    found = json.loads(result.stdout)
    assert set(found) >= {
        "step_s",
        "baseline_step_s",
        "speedup",
        "attention_share",
        "attention_speedup",
        "amdahl_speedup",
        "rows",
    }
    assert set(found["rows"][0]) == {"name", "baseline_s", "s", "speed_of_light_s", "origin"}


def test_an_interrupt_exits_130(monkeypatch):
    from kvfold.analysis import cli

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


def test_version():
    assert kvfold("--version").stdout.strip() == "0.1.0"


@pytest.mark.parametrize("blocks", ["8", "40", "400"])
def test_a_tiny_pool_ends_with_few_words(blocks):
    """Livelock and floods of warnings are what others met here."""
    sample = Path(__file__).resolve().parent.parent / "traces" / "data" / "sample.jsonl"
    result = kvfold(
        "replay", str(sample), "--model", "qwen3-8b", "--gpu", "h200", "--num-gpu-blocks", blocks, "--json"
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) <= 20
    found = json.loads(result.stdout)
    counts = found["counts"]
    assert counts["offered"] == sum(counts[name] for name in counts if name != "offered")
    assert found["reject_reasons"]["larger_than_kv_pool"] == counts["rejected"] > 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("step --model llama-3.1-8b --gpu h200 --tp 0", "'--tp'"),
        ("step --modle x", "--modle"),
        ("steo", "steo"),
        ("replay", "TRACE"),
        ("kernels bench --op attent", "'attent'"),
        ("traces inspect", "argument"),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_help(run_kvfold, line, said):
    code, out, err = run_kvfold(*line.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("kvfold: ")
    assert said in err
    assert "--help shows the options" in err


@pytest.mark.parametrize("line", ["--help", "--version", "step --help", "list formats"])
def test_what_works_exits_0(run_kvfold, line):
    code, out, err = run_kvfold(*line.split())
    assert (code, err) == (0, "")
    assert out


def test_a_group_without_a_command_prints_its_help(run_kvfold):
    assert "Usage: kvfold kernels" in "".join(run_kvfold("kernels")[1:])
