"""A user's own result as the reference: `vllm bench serve --save-detailed`, and overhead fitted to half of it."""

import json

import numpy as np
import pytest

from kvfold.analysis.deployment import deploy
from kvfold.analysis.validate_user import against, fit, load_truth, simulated
from kvfold.sim.errors import ConfigError
from kvfold.sim.scheduler import Limits
from kvfold.sim.work import MODELLED_OVERHEAD, Overhead
from kvfold.traces.columns import assemble
from kvfold.traces.table import Meta
from tests.test_validate import invoke

LIMITS = Limits(64, 2048)


@pytest.fixture(scope="module")
def deployment():
    return deploy("llama-3.1-8b", "h100", num_gpu_blocks=4000)


def result_of(path, deployment, overhead, requests=60):
    """A result as vLLM's bench writes it, with the latencies of our own replay at a known overhead."""
    rng = np.random.default_rng(3)
    start = np.cumsum(rng.exponential(0.2, requests))
    inputs, outputs = rng.integers(50, 1500, requests), rng.integers(5, 120, requests)
    columns = {"arrival_time_s": start - start[0], "input_tokens": inputs, "output_tokens": outputs}
    meta = Meta("made", "made", "", "s", rows_read=requests, rows_kept=requests)
    seen = simulated(assemble(meta, columns), deployment, LIMITS, overhead)
    gaps = [[seen["TPOT"][i]] * int(outputs[i] - 1) for i in range(requests)]
    path.write_text(
        json.dumps(
            {
                "model_id": "meta-llama/Llama-3.1-8B",
                "request_rate": "inf",
                "completed": requests,
                "input_lens": inputs.tolist(),
                "output_lens": outputs.tolist(),
                "ttfts": seen["TTFT"].tolist(),
                "itls": gaps,
                "start_times": (1000 + start).tolist(),
                "errors": [""] * requests,
                "generated_texts": [""] * requests,
            }
        )
    )
    return path


def test_a_result_of_our_own_replay_has_no_error(tmp_path, deployment):
    path = result_of(tmp_path / "result.json", deployment, MODELLED_OVERHEAD)
    for check in against(load_truth(path), deployment, LIMITS, "result"):
        assert check.error == pytest.approx(0, abs=1e-3), check.name


def test_a_fit_finds_the_overhead_and_is_tested_on_the_other_half(tmp_path, deployment):
    truth = Overhead(2e-3, 0.0, 20e-6)
    path = result_of(tmp_path / "result.json", deployment, truth)
    found = fit(load_truth(path), deployment, LIMITS, "result")
    assert found.requests == 30
    assert found.overhead.step_s == pytest.approx(2e-3, rel=0.1)
    for check in found.checks:
        assert check.name.startswith("half not fitted")
        assert abs(check.error) < 0.06, check.name
    before = against(load_truth(path), deployment, LIMITS, "result")
    assert max(abs(check.error) for check in before) > 0.2


def test_a_result_without_latencies_is_refused(tmp_path, deployment):
    path = result_of(tmp_path / "result.json", deployment, MODELLED_OVERHEAD)
    found = json.loads(path.read_text())
    found["ttfts"], found["itls"] = [0.0] * 60, [[] for _ in range(60)]
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="--save-detailed"):
        load_truth(path)


def test_the_command_replays_a_result(tmp_path, deployment):
    path = result_of(tmp_path / "result.json", deployment, MODELLED_OVERHEAD)
    options = ("--model", "llama-3.1-8b", "--gpu", "h100", "--num-gpu-blocks", 4000, "--max-num-seqs", 64)
    found = invoke("--vllm-result", path, *options, "--json")
    assert found.exit_code == 0
    report = json.loads(found.stdout)
    assert [check["name"] for check in report["checks"]][:2] == ["TTFT mean", "TTFT p50"]
    assert max(abs(check["error"]) for check in report["checks"]) < 1e-3


def test_the_command_needs_a_model_and_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="--model and --gpu"):
        invoke("--fit", tmp_path / "result.json")
