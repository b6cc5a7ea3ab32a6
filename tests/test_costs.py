"""Cost tables: interpolation against functions that are known, and runs that use them."""

import csv
import random
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import pytest

from kvfold.analysis.deployment import cost_table
from kvfold.codec.sizes import load_sizes
from kvfold.sim.costs import line_at, load_costs
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.retention import parse_retention
from kvfold.sim.run import FS_PER_S
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.step import step_cost
from kvfold.sim.work import Chunk
from tests.test_engine import assert_same, check_laws

COLUMNS = (
    "device,op,format,batch,context_tokens,q_heads,kv_heads,head_dim,page_tokens,tokens,in_features,out_features,"
    "weights,median_us,p10_us,p90_us,bytes,energy_mj,sustained,kernel,torch,triton,driver,commit,date"
)
SIZES = load_sizes()
MODEL, GPU = load_model("qwen3-8b"), load_gpu("h200")
BATCHES, CONTEXTS = (1, 4, 32), (1024, 4096, 16_384)


def attend_us(batch, kv_tokens):
    """Made-up kernel: a launch, something per sequence, and the memory limit."""
    return 5.0 + 0.25 * batch + 0.0008 * kv_tokens


def attend_row(batch, context, time_us, name="bf16", sustained="0", kernel="made"):
    shape = "32,8,128,16"
    return f"h200,attend,{name},{batch},{context},{shape},,,,,{time_us},,,,,{sustained},{kernel},,,,,"


def linear_row(tokens, columns, rows, time_us, weights="bf16"):
    return f"h200,linear,,,,,,,,{tokens},{columns},{rows},{weights},{time_us},,,,,0,made,,,,,"


def write(path, rows):
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return load_costs(path)


@pytest.fixture
def table(tmp_path):
    rows = [attend_row(b, c, attend_us(b, b * c)) for b in BATCHES for c in CONTEXTS]
    # slower kernels and sustained rows for the same point do not count
    rows += [attend_row(1, 1024, 500.0, kernel="slow"), attend_row(1, 1024, 0.1, sustained="1")]
    for tokens in (1, 64, 2048):
        for columns, out in ((4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)):
            rows.append(linear_row(tokens, columns, out, 2.0 + columns * out * 2 / 4e6 + 0.01 * tokens))
    return write(tmp_path / "costs.csv", rows)


def test_a_linear_kernel_is_interpolated_exactly(table):
    cost = step_cost(MODEL, GPU, SIZES["bf16"], costs=table)
    for batch in (1, 2, 4, 17, 32):
        for kv_tokens in (batch * 1024, batch * 5000, batch * 16_000):
            segment = cost.attention(batch, kv_tokens)
            found_us = (segment.base_fs + segment.token_fs * kv_tokens) / FS_PER_S * 1e6 / MODEL.full_layers
            assert found_us == pytest.approx(attend_us(batch, kv_tokens), rel=1e-6)


def test_outside_the_grid_says_so(table):
    cost = step_cost(MODEL, GPU, SIZES["bf16"], costs=table)
    assert cost.attention(1, 2000).origin == "interpolated"
    assert cost.attention(4, 40_000).origin == "interpolated"
    for batch, kv_tokens in ((1, 900), (1, 17_000), (64, 300_000), (32, 600_000), (4, 4000)):
        assert cost.attention(batch, kv_tokens).origin == "extrapolated"
    other = step_cost(load_model("gpt-oss-20b"), GPU, SIZES["bf16"], costs=table)
    assert other.attention(1, 2000).origin == "extrapolated"  # another head shape, scaled by its bytes
    assert step_cost(MODEL, GPU, SIZES["gaac"], costs=table).attention(1, 2000).origin == "modelled"


def test_a_segment_ends_before_the_next_point(table):
    cost = step_cost(MODEL, GPU, SIZES["bf16"], costs=table)
    first = cost.attention(4, 4 * 1024)
    assert first.until_tokens == 4 * 4096 - 1
    assert cost.attention(4, first.until_tokens) == first
    assert (
        cost.attention(4, first.until_tokens + 1) != first
        or first.token_fs == cost.attention(4, 20_000).token_fs
    )


def test_lines():
    xs, ys = [10, 20, 40], [1.0, 3.0, 3.0]
    assert [line_at(xs, ys, x).base + line_at(xs, ys, x).slope * x for x in (10, 15, 20, 30, 80)] == [
        1,
        2,
        3,
        3,
        3,
    ]
    below = line_at(xs, ys, 5)  # the first line would be negative at 0
    assert (below.base, below.slope * 5, below.end) == (0.0, 0.5, 10)
    assert line_at([10], [2.0], 30).slope == pytest.approx(0.2)


def test_linear_layers_from_products_of_the_same_bytes(table):
    cost = step_cost(MODEL, GPU, SIZES["bf16"], costs=table)
    rows = {term.name: term for term in cost.terms(32, 100_000, 0)}
    parameters = MODEL.dense_params
    expected_us = MODEL.full_layers * 4 * (2.0 + 0.01 * 32) + parameters * 2 / 4e6
    assert rows["linear layers"].s * 1e6 == pytest.approx(expected_us, rel=1e-3)
    assert rows["linear layers"].origin == "interpolated"
    assert rows["attention: kernel"].origin == "interpolated"
    assert rows["LM head"].origin == "modelled"
    assert sum(term.s for term in rows.values()) * FS_PER_S == pytest.approx(cost.decode_fs(32, 100_000, 0))


def test_strict_costs_refuse_what_was_not_measured(table):
    cost = step_cost(MODEL, GPU, SIZES["bf16"], costs=table, strict=True)
    assert cost.decode_fs(4, 20_000, 0) > 0
    with pytest.raises(ConfigError, match="300,000 KV tokens in all is extrapolated"):
        cost.attention(64, 300_000)
    with pytest.raises(ConfigError, match="a batch of 1 with 1,000 KV tokens in all is modelled"):
        step_cost(MODEL, GPU, SIZES["gaac"], costs=table, strict=True).attention(1, 1000)


def test_runs_with_a_table_agree_step_by_step(table, random_trace):
    for seed in range(4):
        trace = random_trace(120, seed, sessions=bool(seed % 2), rate_per_s=10.0, longest=4000)
        setup = Scenario(
            trace=trace,
            cost=step_cost(MODEL, GPU, SIZES["bf16"], costs=table),
            budget=kv_budget(MODEL, GPU, SIZES["bf16"], kv_budget_bytes=(2 + 8 * (seed > 1)) * 2**30),
            max_context_tokens=40_960,
        )
        fast = run(setup)
        assert_same(fast, run(replace(setup, stepwise=True)))
        check_laws(fast)
        assert set(fast.attention_origin_s) == {"interpolated", "extrapolated"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (attend_row(1, 1024, "nan"), ":2: .*positive number"),
        (attend_row(1, 1024, "-3"), ":2: .*positive number"),
        (attend_row(1, "x", "3"), ":2: "),
        (linear_row(1, 10, 10, 3.0, weights="int3"), ":2: .*int3"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "costs.csv", [row])


def test_a_step_without_sequences_has_no_attention(table):
    for strict in (False, True):
        cost = step_cost(MODEL, GPU, SIZES["bf16"], costs=table, strict=strict)
        nothing = cost.attention(0, 0)
        assert (nothing.base_fs, nothing.token_fs) == (0, 0)
    assert step_cost(MODEL, GPU, SIZES["bf16"], costs=table).decode_fs(0, 0, 0) > 0


@pytest.mark.parametrize("policy", ["least-waste", "oracle", "swap", "keep"])
def test_every_retention_policy_runs_with_a_table(table, random_trace, policy):
    setup = Scenario(
        trace=random_trace(80, 5, sessions=True, longest=3000),
        cost=step_cost(MODEL, GPU, SIZES["bf16"], costs=table),
        budget=kv_budget(MODEL, GPU, SIZES["bf16"], kv_budget_bytes=3 * 2**30),
        max_context_tokens=40_960,
        retention=parse_retention(policy),
    )
    assert_same(run(setup), run(replace(setup, stepwise=True)))


def test_prefill_attention_is_what_was_measured_on_an_h200():
    """A prompt of 8,192 tokens takes the measured 885.02 us a layer; history adds what it added there."""
    llama, h200 = load_model("llama-3.1-8b"), load_gpu("h200")
    cost = step_cost(llama, h200, load_sizes()["bf16"], "bf16", 1, cost_table("h200"))
    assert cost.chunk_fs(Chunk(8192, 0, True)) == pytest.approx(32 * 885.02e9, rel=1e-6)
    more_fs = cost.chunk_fs(Chunk(2048, 8192, True)) - cost.chunk_fs(Chunk(2048, 0, True))
    # 415.04 us over 8,192 and 1,694.24 us over 32,768 tokens, 24,576 more
    assert more_fs == pytest.approx(32 * (1694.24 - 415.04) / 3 * 1e9, rel=1e-6)


def test_a_short_chunk_over_a_long_history_takes_what_was_measured():
    """Twice the launch is in neither; the modelled floor of reading the history is 20 % above one token's."""
    llama, h200 = load_model("llama-3.1-8b"), load_gpu("h200")
    cost = step_cost(llama, h200, load_sizes()["bf16"], "bf16", 1, cost_table("h200"))
    with (resources.files("kvfold.kernels") / "data" / "costs_h200.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["op"] == "prefill"]
    points = [(int(row["tokens"]), int(row["context_tokens"]), float(row["median_us"])) for row in rows]
    assert {history for tokens, history, _ in points if history > tokens} == {8192, 32_768}
    for tokens, history, time_us in points:
        if history >= 32 * tokens:
            assert cost.chunk_fs(Chunk(tokens, history, True)) == pytest.approx(32e9 * time_us, rel=0.15)


NOTHING = SimpleNamespace(count=0, window_tokens=0)  # that decodes


def prompts_fs(cost, chunks):
    """What prefill attention of a step of these chunks takes."""
    tokens, ending = sum(chunk.tokens for chunk in chunks), sum(chunk.last for chunk in chunks)
    return cost.work(NOTHING, chunks).first_fs - cost.base_fs(0, tokens, ending)


def test_prompts_of_one_step_share_its_launch():
    llama, h200 = load_model("llama-3.1-8b"), load_gpu("h200")
    cost = step_cost(llama, h200, load_sizes()["bf16"], "bf16", 1, cost_table("h200"))
    short = Chunk(8, 0, True)
    assert prompts_fs(cost, [short] * 256) < 1.1 * cost.chunk_fs(short)
    assert prompts_fs(cost, [Chunk(64, 0, True)] * 32) < prompts_fs(cost, [Chunk(2048, 0, True)])


@pytest.mark.parametrize("gpu", ["h200", "h100"])  # with a cost table and without
@pytest.mark.parametrize("seed", range(10))
def test_a_step_of_several_chunks_lies_between_the_longest_and_their_sum(gpu, seed):
    rng = random.Random(seed)
    llama, sizes = load_model("llama-3.1-8b"), load_sizes()["fixed4"]
    cost = step_cost(llama, load_gpu(gpu), sizes, "bf16", 1, cost_table(gpu))
    chunks = [
        Chunk(rng.choice((1, 7, 100, 2048)), rng.choice((0, 500, 30_000)), True)
        for _ in range(rng.randint(2, 9))
    ]
    alone = [prompts_fs(cost, [chunk]) for chunk in chunks]
    assert alone == [cost.chunk_fs(chunk) for chunk in chunks]
    together = prompts_fs(cost, chunks)
    assert max(alone) <= together <= sum(alone)
    assert together == prompts_fs(cost, chunks[::-1]) >= prompts_fs(cost, chunks[1:])
    assert (together < sum(alone)) == (gpu == "h200")


@pytest.mark.parametrize("name", ["bf16", "fixed4"])
def test_every_measured_point_is_met_and_is_no_extrapolation(name):
    llama, h200, costs = load_model("llama-3.1-8b"), load_gpu("h200"), cost_table("h200")
    cost = step_cost(llama, h200, load_sizes()[name], "bf16", 1, costs, strict=True)
    table = costs.attend[name]
    for batch, contexts, times_us in zip(table.batches, table.contexts, table.times_us, strict=True):
        for context, time_us in zip(contexts, times_us, strict=True):
            found = cost.attention(batch, batch * context)
            assert found.base_fs + found.token_fs * batch * context == pytest.approx(32e9 * time_us, rel=1e-6)
        with pytest.raises(ConfigError, match="is extrapolated"):
            cost.attention(batch, batch * contexts[-1] + 1)


def test_prefill_of_another_head_size_stays_modelled():
    model, h200 = load_model("qwen3.5-27b"), load_gpu("h200")
    costs = cost_table("h200")
    measured = step_cost(model, h200, load_sizes()["bf16"], "bf16", 1, costs)
    modelled = step_cost(model, h200, load_sizes()["bf16"], "bf16", 1)
    assert measured.chunk_fs(Chunk(2048, 4096, True)) == modelled.chunk_fs(Chunk(2048, 4096, True))


def test_strict_costs_refuse_prompts_outside_the_measured_chunks():
    llama, h200, costs = load_model("llama-3.1-8b"), load_gpu("h200"), cost_table("h200")
    cost = step_cost(llama, h200, load_sizes()["bf16"], "bf16", 1, costs, strict=True)
    assert cost.chunk_fs(Chunk(2048, 4096, True)) > 0
    assert cost.chunk_fs(Chunk(1, 4096, True)) > 0
    with pytest.raises(ConfigError, match="chunk of 40,000 tokens is extrapolated"):
        cost.chunk_fs(Chunk(40_000, 0, True))
    other = step_cost(load_model("qwen3.5-27b"), h200, load_sizes()["bf16"], "bf16", 1, costs, strict=True)
    with pytest.raises(ConfigError, match="chunk of 2,048 tokens is modelled"):
        other.chunk_fs(Chunk(2048, 0, True))
