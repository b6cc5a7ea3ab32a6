"""The cost of a step from a profile: what is added up, and that stretches of steps equal single steps."""

import numpy as np
import pytest

from kvfold.analysis.deployment import format_sizes
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.profile import load_profile
from kvfold.sim.profile_cost import Link, ProfileCost
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.step import expected_experts
from kvfold.sim.work import Chunk, Overhead
from tests.engine_runs import TOKEN_US, even_us, make_profile

LLAMA = load_model("llama-3.1-8b")


def cost_of(path, model=LLAMA, **more):
    return ProfileCost(load_profile(path), model, load_gpu("rtx-4090"), format_sizes("bf16"), **more)


class Batch:
    """A decode set of given contexts."""

    def __init__(self, *contexts):
        self.contexts = sorted(contexts, reverse=True)
        self.count, self.kv_tokens = len(contexts), sum(contexts)

    def lengths(self):
        return self.contexts


def test_a_decode_step_is_every_layer_once_and_its_norms_twice(tmp_path):
    cost = cost_of(make_profile(tmp_path))
    layer = 10 + TOKEN_US * 4
    # per decoder layer: two norms, six other rows; once: embedding, final norm, LM head and sampler
    expected = 32 * (8 * layer + even_us(4, 500)) + 2 * layer + 2 * 104
    work = cost.work(Batch(500, 500, 500, 500), [])
    assert work.first_fs / 1e9 == pytest.approx(expected)
    assert work.origin == "interpolated"
    assert work.growth_fs == pytest.approx(cost.work(Batch(*[501] * 4), []).first_fs - work.first_fs, abs=1)


def test_uneven_contexts_cost_more_than_even_ones(tmp_path):
    cost = cost_of(make_profile(tmp_path))
    even, uneven = cost.work(Batch(*[640] * 4), []), cost.work(Batch(1024, 512, 512, 512), [])
    assert uneven.first_fs - even.first_fs == pytest.approx(32 * 0.01 * 512 * 1e9)


def test_chunks_of_several_prompts_cost_their_own_pairs(tmp_path):
    """Two prompts of 1,000 tokens have half the pairs of one of 2,000."""
    cost = cost_of(make_profile(tmp_path))
    two = cost.work(Batch(), [Chunk(1000, 0, True)] * 2)
    one = cost.work(Batch(), [Chunk(2000, 0, True)])
    sampled = 2 * 1e9  # LM head and sampler for one sequence more
    assert one.first_fs - two.first_fs == pytest.approx(32 * 1e-6 * 1000 * 1000 * 1e9 - sampled, rel=1e-3)


def test_a_step_is_padded_to_a_captured_graph(tmp_path):
    path = make_profile(tmp_path)
    padded = cost_of(path, graph_sizes=(1, 8, 512))
    assert padded.base_fs(3, 0, 0) - cost_of(path).base_fs(3, 0, 0) == pytest.approx(
        (32 * 8 + 2) * TOKEN_US * 5 * 1e9
    )
    assert padded.base_fs(0, 600, 1) == cost_of(path).base_fs(0, 600, 1)


def test_overhead_is_per_step_token_and_sequence(tmp_path):
    path = make_profile(tmp_path)
    more = cost_of(path, overhead=Overhead(1e-3, 1e-6, 1e-5)).base_fs(4, 100, 1)
    assert more - cost_of(path).base_fs(4, 100, 1) == pytest.approx((1e-3 + 104e-6 + 5e-5) * 1e15)


def test_two_gpus_reduce_twice_a_layer_and_once_more_and_gather_the_logits(tmp_path):
    path = make_profile(tmp_path, tp=2)
    link = Link(16e9, 2e-5, "made up")
    alone, group = cost_of(path), cost_of(path, link=link)
    reduce_s = 2 * (2e-5 + 2 * 64 * 4096 / 2 / 16e9)
    gather_s = 2e-5 + 2 * 65 * 128_256 / 2 / 16e9
    found_fs = group.base_fs(64, 0, 0) - alone.base_fs(64, 0, 0)
    assert found_fs == pytest.approx((65 * reduce_s + gather_s) * 1e15)


def test_ranks_share_the_experts(tmp_path):
    """Each of two ranks holds half of the experts and computes half of both ranks' pairs of token and expert."""
    model = load_model("qwen3-30b-a3b")
    path = make_profile(tmp_path, model="Qwen/Qwen3-30B-A3B", moe=True)
    alone, shared = cost_of(path, model), cost_of(path, model, data_parallel=2)
    before, after = expected_experts(128, 8, 16), expected_experts(128, 8, 32) / 2
    assert shared.base_fs(16, 0, 0) - alone.base_fs(16, 0, 0) == pytest.approx(
        48 * 0.5 * (after - before) * 1e9
    )


def test_what_ranks_compute_together_follows_the_tokens_of_all(tmp_path):
    """A step alone counts it as if the others had as many tokens; experts and exchange see the sum."""
    model, link = load_model("qwen3-30b-a3b"), Link(16e9, 2e-5, "made up")
    path = make_profile(tmp_path, model="Qwen/Qwen3-30B-A3B", moe=True)
    cost, apart = cost_of(path, model, data_parallel=2, link=link), cost_of(path, model, data_parallel=2)
    exchange_s = 2 * (2e-5 + 2 * 2048 * 40 / 2 / 16e9)
    assert cost.shared_fs(40) - apart.shared_fs(40) == pytest.approx(48 * exchange_s * 1e15)
    block_us = 5 + 0.02 * 20 + 0.5 * expected_experts(128, 8, 40) / 2
    assert apart.shared_fs(40) == pytest.approx(48 * block_us * 1e9)
    own_fs = [each.base_fs(20, 0, 0) - each.shared_fs(40) for each in (cost, apart)]
    assert own_fs[0] == pytest.approx(own_fs[1], abs=2)
    assert cost_of(make_profile(tmp_path / "dense"), data_parallel=2).shared_fs(40) == 0


def test_strict_costs_refuse_what_is_outside_of_the_grid(tmp_path):
    cost = cost_of(make_profile(tmp_path), strict=True)
    assert cost.work(Batch(20, 30), []).origin == "interpolated"
    with pytest.raises(ConfigError, match="--strict-costs"):
        cost.work(Batch(20_000, 30_000), [])


@pytest.mark.parametrize("seed", range(4))
def test_stretches_equal_single_steps(tmp_path, random_trace, seed):
    """Uneven contexts keep their differences while they grow, so the correction is a constant of a stretch."""
    cost = cost_of(make_profile(tmp_path))
    gpu, sizes = load_gpu("rtx-4090"), format_sizes("bf16")
    trace = random_trace(60, seed, sessions=False, longest=2000)
    budget = kv_budget(LLAMA, gpu, sizes, num_gpu_blocks=700)
    runs = [
        run(
            Scenario(
                trace=trace,
                cost=cost,
                budget=budget,
                max_context_tokens=100_000,
                limits=Limits(64, 2048),
                stepwise=stepwise,
            )
        )
        for stepwise in (False, True)
    ]
    for name in ("scheduled_s", "first_token_s", "last_token_s", "preemptions"):
        assert np.array_equal(*(getattr(each.calls, name) for each in runs), equal_nan=True), name
    assert len(runs[0].stretches.steps) < len(runs[1].stretches.steps)
