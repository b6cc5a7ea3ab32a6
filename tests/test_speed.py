"""Whole-process time and memory of the load that peers are compared on, and real traces in both modes."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.sessions import Load
from kvfold.traces.canonical import write
from kvfold.traces.load import load
from kvfold.traces.synth import poisson


@pytest.fixture(scope="module")
def poisson_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "poisson.jsonl"
    write(poisson(10_000, 8.0, 1000, 200, seed=42), path)
    return path


SAMPLE = Path(__file__).resolve().parent.parent / "traces" / "data" / "sample.jsonl"
MEASURE = (
    "import resource, subprocess, sys, time\n"
    "start = time.perf_counter()\n"
    "subprocess.run(sys.argv[1:], capture_output=True, check=True)\n"
    "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def test_ten_thousand_requests_within_two_seconds_and_400_mb(poisson_file):
    command = [sys.executable, "-m", "kvfold.analysis.cli", "replay", str(poisson_file), "--json"]
    command += ["--model", "llama-3.1-8b", "--gpu", "h100", "--max-num-seqs", "256"]
    command += ["--max-num-batched-tokens", "2048"]
    runs = [
        subprocess.run(
            [sys.executable, "-c", MEASURE, *command], capture_output=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert min(float(seconds) for seconds, _ in runs) <= 2.0, runs
    assert max(int(peak_kb) for _, peak_kb in runs) <= 400_000, runs


@pytest.mark.parametrize(
    ("path", "model", "name", "live", "gib"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", "qwen3-8b", "bf16", None, 8),
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", "qwen3-8b", "gaac", 64, 3),
        ("weka-claude-code-traces/traces", "qwen3.5-35b-a3b", "gaac", 12, 8),
    ],
)
def test_real_traces_give_the_same_records_step_by_step(shared_data, path, model, name, live, gib):
    check_both_modes(load(shared_data / "traces" / path), model, name, live, gib)


@pytest.mark.parametrize("name", ["bf16", "gaac", "fixed4", "esc2-2"])
@pytest.mark.parametrize("live", [None, 20])
def test_the_bundled_trace_gives_the_same_records_step_by_step(name, live):
    check_both_modes(load(SAMPLE), "qwen3-8b", name, live, 12)


def check_both_modes(trace, model, name, live, gib):
    deployment = deploy(model, "h200", kv_budget_bytes=gib * 2**30)
    sizes = format_sizes(name)
    setup = Scenario(
        trace=trace,
        cost=deployment.cost(sizes),
        budget=deployment.budget(sizes),
        max_context_tokens=deployment.max_context_tokens,
        load=Load(live_sessions=live),
    )
    fast, slow = run(setup), run(replace(setup, stepwise=True))
    for column in fields(fast.calls):
        left, right = getattr(fast.calls, column.name), getattr(slow.calls, column.name)
        assert left.tobytes() == right.tobytes(), column.name
    assert fast.kv == slow.kv
