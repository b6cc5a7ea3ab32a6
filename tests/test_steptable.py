"""The step table: Amdahl, break-even and the published operating point beside ours."""

import pytest

from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.analysis.steptable import (
    break_even,
    break_even_text,
    compare,
    fixed_budget,
    heatmap,
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
    assert {line["context_tokens"] for line in break_even(cost, base, 131_072)} == {None}


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


def test_strict_costs_refuses_modelled_ones():
    with pytest.raises(ConfigError, match="needs a measured cost table for h100"):
        deploy("qwen3-8b", "h100", strict_costs=True)


def test_unknown_formats_get_a_suggestion():
    with pytest.raises(ConfigError, match="unknown KV format 'gacc'; did you mean gaac"):
        format_sizes("gacc")


def test_break_even_in_words():
    def lines(*contexts):
        return [
            {"batch": batch, "context_tokens": context}
            for batch, context in zip((1, 4, 8), contexts, strict=True)
        ]

    assert (
        break_even_text(lines(1024, 1024, 1024))
        == "from 1,024 tokens of context on at every batch from 1 to 8"
    )
    assert break_even_text(lines(None, None, None)) == "at no batch from 1 to 8"
    mixed = "at batch 1 never; from 2,048 tokens of context on at batch 4, 8"
    assert break_even_text(lines(None, 2048, 2048)) == mixed


def test_the_measured_h200_is_used_where_it_was_measured():
    """Attention over fixed4 pages at 8 x 64K ran 1.31 times as fast as the best BF16 kernel of its run."""
    deployment = deploy("qwen3-8b", "h200")
    found = compare(deployment.cost(format_sizes("fixed4")), deployment.cost(format_sizes("bf16")), 8, 65_536)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["attention: kernel"]["origin"] == "interpolated"
    kernel = rows["attention: kernel"]
    assert kernel["baseline_s"] / kernel["s"] == pytest.approx(1.31, abs=0.03)
    assert found["speedup"] > 1.15
