"""The step table: Amdahl, break-even and the published operating point beside ours."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvfold.analysis import cli
from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.analysis.steptable import (
    break_even,
    break_even_text,
    compare,
    fixed_budget,
    heatmap,
    origins_text,
    step_s,
)
from kvfold.sim.errors import ConfigError


@pytest.fixture(scope="module")
def spark():
    return deploy("qwen3-8b", "dgx-spark", weights="w4a16", kv_budget_bytes=20 * 2**30)


def costs(deployment):
    return deployment.cost(format_sizes("gaac")), deployment.cost(format_sizes("bf16"))


def test_amdahl_holds_where_only_attention_changes(spark):
    found = compare(*costs(spark), 3, 65_536)
    share, gain = found["attention_share"], found["attention_speedup"]
    assert found["amdahl_speedup"] == pytest.approx(1 / (1 - share + share / gain))
    # packing is the only other difference, a few microseconds of a step of 0.14 s
    assert found["speedup"] == pytest.approx(found["amdahl_speedup"], rel=1e-3)
    assert found["speedup"] < found["amdahl_speedup"]
    assert sum(row["s"] for row in found["rows"]) == pytest.approx(found["step_s"])
    assert sum(row["baseline_s"] for row in found["rows"]) == pytest.approx(found["baseline_step_s"])


def test_a_format_against_itself_changes_nothing(spark):
    cost = spark.cost(format_sizes("bf16"))
    found = compare(cost, cost, 4, 8192)
    assert found["speedup"] == found["attention_speedup"] == found["amdahl_speedup"] == 1


def test_break_even_is_the_edge_of_the_heatmap(spark):
    cost, base = costs(spark)
    grid = heatmap(cost, base, 131_072)
    for line in break_even(cost, base, 131_072):
        speedups = grid["speedup"][grid["batches"].index(line["batch"])]
        pays = [context for context, speedup in zip(grid["contexts"], speedups, strict=True) if speedup > 1]
        assert line["context_tokens"] == (min(pays) if pays else None)


def test_decoding_that_takes_longer_than_reading_never_pays():
    """An H200 has 7 integer operations per element read, GAAC takes about 8 and hides none of them."""
    deployment = deploy("qwen3-8b", "h200")
    cost, base = costs(deployment)
    assert step_s(cost, 32, 65_536) > step_s(base, 32, 65_536)
    for line in break_even(cost, base, 131_072):
        assert line["context_tokens"] is None
        assert line["origins"]["gaac"] == ["modelled"]
        assert line["origin"] == "modelled"


def test_break_even_lists_every_context_at_which_a_step_is_shorter():
    """Short contexts too, where measured launches lose against a model without them."""
    deployment = deploy("llama-3.1-8b", "h200")
    cost, base = costs(deployment)
    rows = break_even(cost, base, 131_072)
    assert rows[0]["stretches"], "at batch 1 and 4K GAAC is shorter by 4 %"
    for line in rows:
        for context in heatmap(cost, base, 131_072)["contexts"]:
            shorter = step_s(cost, line["batch"], context) < step_s(base, line["batch"], context)
            assert shorter == any(first <= context <= last for first, last in line["stretches"])


def test_break_even_never_asks_for_points_that_strict_costs_refuse():
    deployment = deploy("llama-3.1-8b", "h200", strict_costs=True)
    strict = break_even(*(deployment.cost(format_sizes(name)) for name in ("fixed3", "bf16")), 131_072)
    missing = sum(line["not_measured"] for line in strict)
    assert 0 < missing < sum(line["tried"] for line in strict)
    assert {line["origin"] for line in strict} <= {"measured", "interpolated"}
    unmeasured = break_even(*costs(deployment), 131_072)
    assert all(line["not_measured"] == line["tried"] for line in unmeasured)


def test_fixed_budget_on_a_dgx_spark(spark):
    bf16, gaac = fixed_budget(spark, [format_sizes("bf16"), format_sizes("gaac")], 65_536)
    assert (bf16["sequences"], gaac["sequences"]) == (2, 3)
    assert bf16["output_tokens_left"] > gaac["output_tokens_left"] > 0
    for row in (bf16, gaac):
        assert row["published"]["sequences"] == row["sequences"]
        assert row["output_tok_s"] == pytest.approx(row["published"]["tok_s"], rel=0.2)
    assert gaac["output_tok_s"] > bf16["output_tok_s"]
    assert gaac["output_tok_s_per_sequence"] < bf16["output_tok_s_per_sequence"]
    bytes_alone = gaac["bytes_only_output_tok_s"] / bf16["bytes_only_output_tok_s"]
    assert bytes_alone == pytest.approx(1.4, abs=0.03)
    assert bf16["origin"] == gaac["origin"] == "modelled"


def bytes_only(deployment, *formats, context_tokens=65_536):
    rows = fixed_budget(deployment, [format_sizes(name) for name in formats], context_tokens)
    return [row["bytes_only_output_tok_s"] for row in rows]


@pytest.mark.parametrize("gpu", ["h200", "h100", "dgx-spark"])
@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.1-8b"])
@pytest.mark.parametrize("weights", ["bf16", "w4a16"])
def test_fewer_bytes_alone_never_lose(model, gpu, weights):
    deployment = deploy(model, gpu, weights=weights, kv_budget_bytes=40 * 2**30)
    before, *after = bytes_only(deployment, "bf16", "fixed4", "gaac", "fp8-e4m3")
    assert before < after[0] < after[1] < after[2], "each has fewer bytes than the one before"


@pytest.mark.parametrize("context_tokens", [512, 65_536])
def test_bytes_alone_follow_the_bandwidth_and_nothing_measured(context_tokens):
    """512 tokens: so many sequences that arithmetic would bound the linear layers, and still it does not enter."""
    measured = deploy("qwen3-8b", "h200", kv_budget_bytes=40 * 2**30)
    assert measured.costs is not None
    formats = ("bf16", "gaac", "fixed4")
    found = bytes_only(measured, *formats, context_tokens=context_tokens)
    assert found == bytes_only(replace(measured, costs=None), *formats, context_tokens=context_tokens)
    slower = deploy("qwen3-8b", "h100", kv_budget_bytes=40 * 2**30)
    bandwidths = measured.gpu.bandwidth_bytes_per_s / slower.gpu.bandwidth_bytes_per_s
    others = bytes_only(slower, *formats, context_tokens=context_tokens)
    assert found == pytest.approx([bandwidths * each for each in others])


def test_a_fixed_budget_says_where_its_attention_comes_from():
    deployment = deploy("qwen3-8b", "h200", kv_budget_bytes=40 * 2**30)
    rows = fixed_budget(deployment, [format_sizes(name) for name in ("bf16", "gaac", "fixed4")], 65_536)
    assert [row["origin"] for row in rows] == ["interpolated", "modelled", "interpolated"]


def test_strict_costs_refuses_modelled_ones():
    with pytest.raises(ConfigError, match="needs a measured cost table for h100"):
        deploy("qwen3-8b", "h100", strict_costs=True)


def test_unknown_formats_get_a_suggestion():
    with pytest.raises(ConfigError, match="unknown KV format 'gacc'; did you mean gaac"):
        format_sizes("gacc")


def lines(*stretches, tried=(1024, 8192), missing=0, **origins):
    """Rows of a break-even, one per batch, from the stretches of contexts at which each is shorter."""
    return [
        {
            "batch": batch,
            "stretches": each,
            "tried_tokens": list(tried),
            "tried": 4,
            "not_measured": missing,
            "origins": origins or {"bf16": ["modelled"], "gaac": ["modelled"]},
        }
        for batch, each in zip((1, 4, 8), stretches, strict=True)
    ]


def test_break_even_in_words():
    everywhere = [[1024, 8192]]
    assert (
        break_even_text(lines(everywhere, everywhere, everywhere))
        == "from 1,024 tokens of context (the smallest tried) on at every batch from 1 to 8"
    )
    assert break_even_text(lines([], [], [])) == "at no batch from 1 to 8"
    assert break_even_text(lines([], [[2048, 8192]], [[2048, 8192]])) == (
        "at batch 1 never; from 2,048 tokens of context on at batch 4, 8"
    )
    assert break_even_text(lines([[1024, 4096]], [[2048, 4096]], [[1024, 1024], [4096, 8192]])) == (
        "up to 4,096 tokens of context at batch 1; from 2,048 to 4,096 tokens of context at batch 4; "
        "up to 1,024 tokens of context and from 4,096 tokens of context on at batch 8"
    )


def test_break_even_in_words_counts_what_is_not_measured():
    text = break_even_text(lines([[2048, 4096]], [], [], tried=(1024, 4096), missing=1))
    assert text == (
        "from 2,048 tokens of context to 4,096 (the largest measured) at batch 1; at batch 4, 8 never; "
        "3 of 12 points tried are not measured"
    )
    assert break_even_text(lines([], [], [], tried=(), missing=4)).startswith("at contexts unknown")


def test_break_even_in_words_warns_of_sides_of_different_origins():
    small = "do not trust a small difference"
    assert small in break_even_text(lines([], [], [], bf16=["interpolated"], gaac=["modelled"]))
    assert small in break_even_text(lines([], [], [], bf16=["modelled"], gaac=["extrapolated"]))
    assert small not in break_even_text(lines([], [], [], bf16=["interpolated"], gaac=["extrapolated"]))
    assert small not in break_even_text(lines([], [], []))


def test_origins_in_words():
    assert origins_text({"bf16": ["modelled"], "gaac": ["modelled"]}) == "modelled"
    assert origins_text({"bf16": ["interpolated"], "gaac": ["interpolated"]}) == "with attention interpolated"
    assert origins_text({"bf16": ["extrapolated", "interpolated"], "gaac": ["modelled"]}) == (
        "with attention of bf16 extrapolated and interpolated, of gaac modelled"
    )


def test_the_measured_h200_is_used_where_it_was_measured():
    """Attention over fixed4 pages at 8 x 64K ran 1.31 times as fast as the best BF16 kernel of its run."""
    deployment = deploy("qwen3-8b", "h200")
    found = compare(deployment.cost(format_sizes("fixed4")), deployment.cost(format_sizes("bf16")), 8, 65_536)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["attention: kernel"]["origin"] == "interpolated"
    kernel = rows["attention: kernel"]
    assert kernel["baseline_s"] / kernel["s"] == pytest.approx(1.31, abs=0.03)
    assert found["speedup"] > 1.15


@pytest.fixture
def step(monkeypatch, capsys):
    """Runs `kvfold step` as a user does: exit code, stdout with its lines joined, and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvfold", "step", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(
            code=ended.value.code, out=" ".join(printed.out.split()), raw=printed.out, err=printed.err
        )

    return run


def test_step_says_where_a_format_pays_and_how_that_is_known(step):
    found = step("--model", "llama-3.1-8b", "--gpu", "h200", "--batch", "1", "--context", "4K")
    assert found.code == 0, found.err
    assert "a step with gaac is shorter up to 8,192 tokens of context at batch 1;" in found.out
    assert "of gaac modelled)" in found.out
    assert "this GPU has" in found.out
    assert ";  " not in found.raw, "sentences hold no double blank"


def test_step_gives_a_gain_from_bytes_on_a_measured_gpu(step):
    at = ("--context", "64K", "--batch", "4", "--kv-budget", "40GiB")
    found = step("--model", "qwen3-8b", "--gpu", "h200", *at)
    gain = found.out.partition("gain: ")[2]
    assert gain == (
        "-37 % with attention of bf16 interpolated, of gaac modelled; +43 % from bytes and bandwidth alone"
    )


def test_step_takes_strict_costs_at_a_measured_point(step):
    at = (
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h200",
        "--format",
        "fixed3",
        "--batch",
        "8",
        "--context",
        "64K",
    )
    found = step(*at, "--strict-costs")
    assert found.code == 0, found.err
    assert "of 48 points tried are not measured" in found.out
    assert json.loads(step(*at, "--strict-costs", "--json").raw)["break_even"][0]["tried"] == 8
    refused = step(*at[:-1], "100", "--strict-costs")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1


def test_step_names_the_kernels_of_quantized_weights(step):
    at = ("--model", "llama-3.1-8b", "--gpu", "h200", "--context", "1K", "--batch", "32")
    found = step(*at, "--weights", "w4a16")
    assert "kvfold w4a16; kvfold w4a16 unpack, then torch matmul; torch _weight_int4pack_mm" in found.out
    assert "Marlin" in found.out
    assert "Marlin" not in step(*at).out
    modelled = step(*at[:3], "h100", *at[4:], "--weights", "w4a16")
    assert modelled.code == 0
    assert "linear layers:" not in modelled.out


def test_step_refuses_a_batch_of_none_in_one_line(step):
    found = step("--model", "qwen3-8b", "--gpu", "h200", "--batch", "0")
    assert (found.code, found.err) == (2, "kvfold: --batch must be at least 1, got 0\n")
