"""The memory budget: engines' own logs first, then the laws of the pool, then the command."""

import inspect
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvfold.analysis.cmd_list import list_
from kvfold.analysis.cmd_mem import mem
from kvfold.analysis.options import parse_bytes, parse_tokens
from kvfold.codec.sizes import FormatSizes, load_sizes
from kvfold.sim.errors import ConfigError, DoesNotFitError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import (
    ENGINE_VERSION,
    GIB,
    MAX_NUM_SEQS,
    bytes_of_sequence,
    kv_budget,
    kv_pool_bytes,
    max_sequences,
    output_tokens_left,
)
from kvfold.sim.model import load_model

BF16 = load_sizes()["bf16"]
PACKED = FormatSizes(
    name="packed",
    block_tokens=64,
    encoded_bits=11.0,
    slot_bits=11.5,
    raw_block_share=0.02,
    decode_int_ops_per_element=7.0,
    decode_overlap=0.0,
    source="a test",
    origin="modelled",
)
QWEN = load_model("qwen3-8b")
H100 = load_gpu("h100")


@pytest.mark.parametrize(
    ("weights_gib", "activation_gib", "non_torch_gib", "kv_gib"),
    [
        pytest.param(61.03, 5.64, 0.14, 4.45, id="qwen3-32b"),
        pytest.param(13.47, 7.38, 0.13, 50.28, id="gpt-oss-20b"),
        pytest.param(33.88, 4.84, 0.55, 32.00, id="llama-3.3-70b-fp8-tp2"),
    ],
)
def test_formula_gives_the_kv_memory_of_engine_logs(weights_gib, activation_gib, non_torch_gib, kv_gib):
    """vLLM on an H100 of 79.18 GiB at utilization 0.9, logs collected by llm-d-planner."""
    claims = [round(gib * GIB) for gib in (weights_gib, activation_gib, non_torch_gib)]
    assert kv_pool_bytes(H100.memory_bytes, 0.9, claims) / GIB == pytest.approx(kv_gib, abs=0.015)


@pytest.mark.parametrize(
    ("name", "weights", "tp", "activation_gib"),
    [
        ("qwen3-32b", "bf16", 1, 5.64),
        ("gpt-oss-20b", "bf16", 1, 7.38),
        ("llama-3.1-70b", "fp8", 2, 4.84),
    ],
)
def test_activation_rule_against_the_same_logs(name, weights, tp, activation_gib):
    """One factor per logit of 1,024 sequences holds for all three to 1.5 %."""
    budget = kv_budget(
        load_model(name),
        load_gpu("h200"),
        BF16,
        weights=weights,
        tp=tp,
        max_num_seqs=1024,
    )
    (row,) = (row for row in budget.rows if row.name == "activation peak")
    assert row.bytes / GIB == pytest.approx(activation_gib, rel=0.015)


@pytest.mark.parametrize(
    ("name", "weights", "tp", "kv_gib"), [("qwen3-32b", "bf16", 1, 4.45), ("llama-3.1-70b", "fp8", 2, 32.00)]
)
def test_waterfall_against_the_same_logs_from_end_to_end(name, weights, tp, kv_gib):
    model = load_model(name)
    budget = kv_budget(model, H100, BF16, weights=weights, tp=tp, max_num_seqs=1024, engine_version="0.20")
    assert budget.kv_budget_bytes / GIB == pytest.approx(kv_gib, rel=0.01)


def test_blocks_of_a_real_engine(shared_data):
    """vLLM 0.19, Llama-3.1-8B on an RTX 4090: 2,588 pages; no figure of the waterfall was fitted to it."""
    path = shared_data / "validation" / "llmservingsim-vllm" / "RTX4090_Llama-3.1-8B" / "meta.json"
    cache = json.loads(path.read_text())["kv_cache"]
    budget = kv_budget(load_model("llama-3.1-8b"), load_gpu("rtx-4090"), BF16, engine_version="0.19.0")
    assert budget.unit_tokens == cache["block_size"]
    assert budget.num_units == pytest.approx(cache["num_gpu_blocks"], rel=0.05)


def test_graphs_are_subtracted_from_version_0_21_on():
    def graphs(version: str) -> int:
        return next(
            row.bytes
            for row in kv_budget(QWEN, H100, BF16, engine_version=version).rows
            if row.name == "CUDA graphs"
        )

    assert graphs("0.19.0") == graphs("0.20.9") == 0
    assert graphs("0.21") == graphs("1.0") == round(1.03 * GIB)


def test_three_packed_sequences_where_bf16_holds_two():
    """DGX Spark, Qwen3-8B, 64K tokens, 20 GiB of KV: published as 2 sequences in BF16 and 3 packed at 1/1.406."""
    spark, sizes = load_gpu("dgx-spark"), load_sizes()
    budgets = {
        name: kv_budget(QWEN, spark, sizes[name], weights="w4a16", kv_budget_bytes=20 * GIB)
        for name in ("bf16", "gaac")
    }
    assert {name: max_sequences(budget, 65_536) for name, budget in budgets.items()} == {"bf16": 2, "gaac": 3}
    assert output_tokens_left(budgets["gaac"], 65_536, 3) > 1000


def test_pages_are_rounded_up_and_codec_blocks_down():
    """15,049 tokens in blocks of 128 are 118 blocks; of a packed sequence the rest waits in the raw tail."""
    paged = kv_budget(QWEN, H100, BF16, page_tokens=128)
    assert bytes_of_sequence(paged, 15_049) == 118 * paged.unit_bytes == 118 * 128 * QWEN.kv_bytes_per_token()
    packed = kv_budget(QWEN, H100, PACKED)
    assert bytes_of_sequence(packed, 15_049) == 235 * packed.unit_bytes + packed.tail_bytes


def test_a_packed_unit_is_slots_and_what_stays_raw():
    budget = kv_budget(QWEN, H100, PACKED)
    elements = 64 * QWEN.kv_elements_per_token()
    assert budget.unit_bytes == pytest.approx(elements * (0.98 * 11.5 + 0.02 * 16) / 8, abs=1)
    assert budget.tail_bytes == 64 * QWEN.kv_bytes_per_token()
    assert not kv_budget(QWEN, H100, BF16).tail_bytes


@pytest.mark.parametrize("name", ["qwen3.5-27b", "gpt-oss-20b", "qwen3-8b"])
def test_state_and_windows_are_constant_per_sequence(name):
    model = load_model(name)
    budget = kv_budget(model, load_gpu("h200"), BF16)
    window = 2 * model.window_kv_elements_per_token() * model.window_tokens
    assert budget.sequence_bytes == model.state_bytes_per_sequence() + window
    minimum, _ = model.kv_bytes_bounds(4096)
    assert bytes_of_sequence(budget, 4096) == minimum + model.state_bytes_per_sequence()


def test_a_model_with_windows_only_holds_as_many_sequences_as_windows():
    model = replace(load_model("gpt-oss-20b"), full_layers=0)
    budget = kv_budget(model, load_gpu("h200"), BF16, kv_budget_bytes=GIB)
    window_bytes = 2 * 128 * model.window_kv_elements_per_token()
    assert max_sequences(budget, 1) == GIB // (window_bytes + 1)


@pytest.mark.parametrize("given_bytes", [None, 10 * GIB, 60 * GIB])
def test_waterfall_rows_add_up_to_the_device(given_bytes):
    budget = kv_budget(QWEN, H100, BF16, kv_budget_bytes=given_bytes)
    assert budget.rows[0].bytes == H100.memory_bytes == sum(row.bytes for row in budget.rows[1:])
    assert all(row.bytes >= 0 for row in budget.rows if row.name != "unassigned")
    assert all(row.origin and row.rule for row in budget.rows)


def test_explicit_beats_default():
    """--kv-budget beats --num-gpu-blocks beats the waterfall, and the origin says which."""
    modelled = kv_budget(QWEN, H100, BF16)
    blocks = kv_budget(QWEN, H100, BF16, num_gpu_blocks=1000)
    both = kv_budget(QWEN, H100, BF16, num_gpu_blocks=1000, kv_budget_bytes=3 * GIB)
    assert modelled.kv_budget_origin == "modelled: left by the memory waterfall"
    assert blocks.kv_budget_origin == "given: --num-gpu-blocks 1000"
    assert both.kv_budget_origin == "given: --kv-budget"
    assert both.kv_budget_bytes == 3 * GIB
    assert (blocks.num_units, blocks.kv_budget_bytes) == (1000, 1000 * 16 * QWEN.kv_bytes_per_token())


def test_every_format_gets_the_same_bytes():
    for arguments in ({}, {"num_gpu_blocks": 1000}, {"kv_budget_bytes": 3 * GIB}):
        pools = {kv_budget(QWEN, H100, sizes, **arguments).kv_budget_bytes for sizes in (BF16, PACKED)}
        assert len(pools) == 1


@given(
    packed=st.booleans(),
    pool_bytes=st.integers(GIB, 60 * GIB),
    context_tokens=st.integers(1, 200_000),
)
def test_tokens_left_invert_max_sequences(packed, pool_bytes, context_tokens):
    """With all of them grown by `left` they still fit, with one token more they do not."""
    budget = kv_budget(QWEN, H100, PACKED if packed else BF16, kv_budget_bytes=pool_bytes)
    sequences = max_sequences(budget, context_tokens)
    assert sequences * bytes_of_sequence(budget, context_tokens) <= pool_bytes
    assert (sequences + 1) * bytes_of_sequence(budget, context_tokens) > pool_bytes
    if sequences:
        left = output_tokens_left(budget, context_tokens, sequences)
        assert left >= 0
        assert max_sequences(budget, context_tokens + left) == sequences
        assert max_sequences(budget, context_tokens + left + 1) < sequences
    with pytest.raises(DoesNotFitError, match="do not fit the KV pool"):
        output_tokens_left(budget, context_tokens, sequences + 1)


def test_concurrency_times_length_is_a_constant_only_without_constant_parts():
    """The product that engines print as capacity misleads for hybrid models (vllm#40691)."""
    dense = kv_budget(QWEN, H100, BF16)
    hybrid = kv_budget(load_model("qwen3.5-35b-a3b"), H100, BF16, weights="w4a16")
    for budget, is_constant in ((dense, True), (hybrid, False)):
        short, long = (max_sequences(budget, tokens) * tokens for tokens in (1024, 8192))
        assert (short == pytest.approx(long, rel=0.02)) == is_constant


def test_what_does_not_fit():
    with pytest.raises(
        DoesNotFitError, match=r"qwen3-32b in bf16 at --tp 1 has 61\.0\d GiB .* no room for KV"
    ):
        kv_budget(load_model("qwen3-32b"), load_gpu("rtx-4090"), BF16)
    with pytest.raises(DoesNotFitError, match=r"no room for a KV pool of 70\.00 GiB"):
        kv_budget(QWEN, H100, BF16, kv_budget_bytes=70 * GIB)
    with pytest.raises(DoesNotFitError, match="one sequence of 16 tokens of qwen3-8b takes 2359296 bytes"):
        kv_budget(QWEN, H100, BF16, kv_budget_bytes=2_359_295)
    assert kv_budget(QWEN, H100, BF16, kv_budget_bytes=2_359_296).num_units == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization must be above 0 and at most 1, got 0.0"),
        ({"gpu_memory_utilization": 1.01}, "--gpu-memory-utilization must be"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization must be .*, got nan"),
        ({"kv_budget_bytes": 0}, "--kv-budget must be at least 1, got 0"),
        ({"num_gpu_blocks": -1}, "--num-gpu-blocks must be at least 1, got -1"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1"),
        ({"engine_version": "latest"}, "--engine-version must be a vLLM version such as 0.24, got 'latest'"),
        ({"tp": 3}, "--tp must divide the 32 query heads of qwen3-8b, got 3"),
        ({"weights": "int3"}, "--weights must be one of"),
    ],
)
def test_values_out_of_range(arguments, message):
    with pytest.raises(ConfigError, match=message):
        kv_budget(QWEN, H100, BF16, **arguments)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * GIB),
        ("1.5gib", 3 * GIB // 2),
        ("64 KiB", 65_536),
        ("7", 7),
        ("1B", 1),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "count"), [("64K", 65_536), ("65536", 65_536), ("40,960", 40_960), ("1m", 2**20)]
)
def test_token_counts(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GB", "1e9", "nan", "0GB", "0.3B", "20GX", "9999999999TiB", "1" * 400]
)
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="a size must be"):
        parse_bytes(text)


@pytest.fixture(scope="module")
def run():
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("mem")(mem)
    app.command("list")(list_)

    def invoke(*arguments: str) -> SimpleNamespace:
        result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
        return SimpleNamespace(out=result.stdout, error=result.exception, code=result.exit_code)

    return invoke


SPARK = ("mem", "--model", "qwen3-8b", "--gpu", "dgx-spark", "--weights", "w4a16", "--context", "64K")


def test_mem_prints_one_json_object(run):
    result = run(*SPARK, "--kv-budget", "20GiB", "--format", "gaac", "--json")
    found = json.loads(result.out)
    assert result.code == 0
    assert found["max_sequences"] == 3
    assert found["baseline"]["max_sequences"] == 2
    assert found["kv_budget_bytes"] == 20 * GIB
    assert found["num_blocks"] == 20 * GIB // found["block_bytes"]
    assert found["kv_bytes_per_sequence"] == found["tail_bytes"] == 64 * 147_456
    assert found["waterfall"][0]["bytes"] == sum(row["bytes"] for row in found["waterfall"][1:])
    assert run(*SPARK, "--kv-budget", "20GiB", "--format", "gaac", "--json").out == result.out


def test_mem_prints_tables_for_people(run):
    out = run(*SPARK, "--kv-budget", "20GiB", "--format", "gaac", "--tp", "2").out
    assert max(map(len, out.splitlines())) <= 80
    assert "2 GPUs" in out
    assert "KV pool: --kv-budget" in out
    assert "note: beyond the native 40,960 tokens the model needs YaRN" in out
    assert out.splitlines()[-1].startswith("bf16: 4 sequences of 65,536 tokens, room for ")


def test_mem_per_gpu_and_in_total(run):
    found = json.loads(run("mem", "--model", "qwen3-32b", "--gpu", "h100", "--tp", "4", "--json").out)
    assert found["kv_bytes_per_token"] == 65_536
    for key in ("kv_bytes_per_token", "weights_bytes", "kv_budget_bytes"):
        assert found[f"{key}_total"] == 4 * found[key]


def test_mem_defaults_are_those_of_the_library():
    parameters = inspect.signature(mem).parameters
    assert parameters["engine_version"].default == ENGINE_VERSION
    assert parameters["max_num_seqs"].default == MAX_NUM_SEQS
    assert parameters["format_name"].default == "bf16"


def test_mem_without_a_context(run):
    found = json.loads(run("mem", "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--json").out)
    assert found["context_tokens"] == 8192
    assert found["longest_sequence_tokens"] == 16 * found["num_blocks"]


def test_mem_says_when_nothing_fits(run):
    result = run(*SPARK, "--kv-budget", "5GiB", "--json")
    assert json.loads(result.out)["max_sequences"] == 0
    assert json.loads(result.out)["output_tokens_left"] is None
    assert isinstance(result.error, DoesNotFitError)
    assert "one sequence of 65536 tokens takes 9663676416 bytes" in str(result.error)


def test_mem_options(run):
    assert run(*SPARK, "--kv-budget", "20XB").code == 2
    strict = run(*SPARK, "--strict-costs")
    assert isinstance(strict.error, ConfigError)
    assert run(*SPARK, "--strict-costs", "--kv-budget", "20GiB").code == 0
    warned = json.loads(run(*SPARK, "--max-context", "50K", "--json").out)["warnings"]
    assert warned == ["65,536 tokens exceed the 51,200 that qwen3-8b takes at most"]


@pytest.mark.parametrize("topic", ["models", "gpus", "formats", "slos"])
def test_list(run, topic):
    found = json.loads(run("list", topic, "--json").out)
    assert list(found) == [topic]
    text = run("list", topic).out
    assert all(len(line) <= 80 for line in text.splitlines() if "gpus.toml" not in line)
    for row in found[topic]:
        assert row["name"] in text


def test_list_everything(run):
    assert set(json.loads(run("list", "--json").out)) == {"models", "gpus", "formats", "slos"}
    assert run("list", "nothing").code == 2


def test_list_marks_what_is_unknown_or_not_checked(run):
    lines = {line.split()[0]: line.split() for line in run("list", "gpus").out.splitlines() if line.strip()}
    assert lines["m4"][1:] == ["32.0?", "0.120", "?", "?", "?", "?"]
    assert lines["h100"][1:] == ["79.2", "3.350", "989", "700", "450", "10"]
    assert lines["dgx-spark"][1:] == ["119.7", "0.273", "125?", "140", "25?", "113?"]
    assert any(name.endswith("gpus.toml") for name in lines)
