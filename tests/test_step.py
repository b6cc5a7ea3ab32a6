"""Laws of the step cost, then the published operating point on a DGX Spark."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.codec.sizes import load_sizes
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.model import load_model
from kvfold.sim.run import FS_PER_S
from kvfold.sim.step import expected_experts, step_cost
from kvfold.sim.work import Chunk

SIZES = load_sizes()
PAIRS = [("qwen3-8b", "h200"), ("gpt-oss-20b", "h100"), ("qwen3.5-35b-a3b", "h200"), ("deepseek-v3", "h200")]


@pytest.mark.parametrize(("model", "gpu"), PAIRS)
@pytest.mark.parametrize("name", ["bf16", "gaac"])
def test_the_rows_of_the_table_add_up_to_the_step(model, gpu, name):
    cost = step_cost(load_model(model), load_gpu(gpu), SIZES[name])
    terms = cost.terms(17, 123_456, 17 * 128)
    total_fs = cost.decode_fs(17, 123_456, 17 * 128)
    assert sum(term.s for term in terms) == pytest.approx(total_fs / FS_PER_S, rel=1e-12)
    assert all(term.origin == "modelled" for term in terms)


@pytest.mark.parametrize(("model", "gpu"), PAIRS)
def test_nothing_is_faster_than_light(model, gpu):
    for name in ("bf16", "gaac"):
        for term in step_cost(load_model(model), load_gpu(gpu), SIZES[name]).terms(8, 80_000, 1024):
            assert term.s >= term.speed_of_light_s * (1 - 1e-9), term


def test_a_decode_step_is_linear_in_total_context():
    cost = step_cost(load_model("qwen3-8b"), load_gpu("h200"), SIZES["gaac"])
    at = [cost.decode_fs(8, tokens, 0) for tokens in (0, 10_000, 20_000, 70_000)]
    assert at[2] - at[1] == at[1] - at[0]
    assert at[3] - at[2] == 5 * (at[1] - at[0])


def test_splitting_a_prompt_into_chunks_computes_the_same_pairs():
    cost = step_cost(load_model("llama-3.1-8b"), load_gpu("h100"), SIZES["bf16"])
    whole = cost.chunk_fs(Chunk(6000, 0, True))
    parts = sum(cost.chunk_fs(Chunk(2000, history, False)) for history in (0, 2000, 4000))
    assert parts == whole == cost.pair_fs * 6000 * 6001 // 2


def test_prefill_over_packed_history_pays_for_unpacking():
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h100")
    plain, packed = (step_cost(model, gpu, SIZES[name]) for name in ("bf16", "gaac"))
    chunk = Chunk(512, 4096, False)
    assert packed.chunk_fs(chunk) - plain.chunk_fs(chunk) == 4096 * packed.unpack_token_fs > 0
    assert packed.chunk_fs(Chunk(512, 0, False)) == plain.chunk_fs(Chunk(512, 0, False))


def test_expected_experts_against_draws():
    rng = np.random.default_rng(7)
    draws = [
        len(np.unique(np.concatenate([rng.choice(64, 6, replace=False) for _ in range(20)])))
        for _ in range(400)
    ]
    standard_error = np.std(draws) / np.sqrt(len(draws))
    assert expected_experts(64, 6, 20) == pytest.approx(np.mean(draws), abs=4 * standard_error)
    assert expected_experts(64, 6, 1) == pytest.approx(6)
    assert expected_experts(64, 6, 10_000) == pytest.approx(64)


def systematic(rng, inclusion):
    """One draw of distinct items that takes item i with probability inclusion[i]; their sum is the draw's size."""
    order = rng.permutation(len(inclusion))
    ends = np.cumsum(inclusion[order])
    ticks = rng.random() + np.arange(round(float(ends[-1])))
    return order[np.searchsorted(ends, ticks)]


def test_expected_experts_of_unequal_shares_against_draws():
    """Fixed-size draws with unequal probabilities, tokens independent: what the formula says, to its noise."""
    rng = np.random.default_rng(8)
    shares = np.exp(-4.0 * np.arange(64) / 64)
    shares /= shares.sum()
    assert 6 * shares.max() < 1
    for tokens in (2, 3, 20):
        draws = [
            len(np.unique(np.concatenate([systematic(rng, 6 * shares) for _ in range(tokens)])))
            for _ in range(600)
        ]
        standard_error = np.std(draws) / np.sqrt(len(draws))
        expected = expected_experts(64, 6, tokens, shares)
        assert expected == pytest.approx(np.mean(draws), abs=4 * standard_error)
        assert expected < expected_experts(64, 6, tokens)
    assert expected_experts(64, 6, 1, shares) == pytest.approx(6)
    assert expected_experts(64, 6, 10_000, shares) == pytest.approx(64, abs=0.5)
    assert expected_experts(64, 6, 20, [1 / 64] * 64) == pytest.approx(expected_experts(64, 6, 20))


@pytest.mark.parametrize(("name", "sequences", "published_tok_s"), [("bf16", 2, 19.0), ("gaac", 3, 22.8)])
def test_dgx_spark_within_20_percent_of_the_preprint(name, sequences, published_tok_s):
    cost = step_cost(load_model("qwen3-8b"), load_gpu("dgx-spark"), SIZES[name], "w4a16")
    step_s = cost.decode_fs(sequences, sequences * 65_536, 0) / FS_PER_S
    assert sequences / step_s == pytest.approx(published_tok_s, rel=0.2)


def test_both_signs_of_the_kernels_account_are_in_the_table():
    model, gpu = load_model("qwen3-8b"), load_gpu("dgx-spark")
    rows = {
        name: {term.name: term.s for term in step_cost(model, gpu, SIZES[name]).terms(1, 65_536, 0)}
        for name in ("bf16", "gaac")
    }
    assert rows["gaac"]["attention: KV read"] < rows["bf16"]["attention: KV read"]
    assert rows["gaac"]["attention: decode work"] > rows["bf16"]["attention: decode work"] == 0


def test_overlap_hides_the_shorter_of_reading_and_decoding():
    model, gpu = load_model("qwen3-8b"), load_gpu("dgx-spark")
    added = step_cost(model, gpu, SIZES["gaac"]).kv_token_fs
    hidden = step_cost(model, gpu, replace(SIZES["gaac"], decode_overlap=1.0)).kv_token_fs
    free = step_cost(model, gpu, replace(SIZES["gaac"], decode_int_ops_per_element=0.0)).kv_token_fs
    assert hidden == free < added  # on this GPU decoding takes less time than reading


def test_an_unknown_figure_of_a_gpu_is_an_error_not_a_zero():
    with pytest.raises(ConfigError, match="bf16_flops_per_s of GPU m4 is unknown"):
        step_cost(load_model("qwen3-0.6b"), load_gpu("m4"), SIZES["bf16"])
