"""Public kernel times and Splitwise's, made up: what they become, and the checks on them."""

import pytest

from kvfold.analysis.validate_perfdb import DECODE, GEMM, PREFILL, perfdb_costs
from kvfold.analysis.validate_splitwise import splitwise
from kvfold.analysis.validate_tables import tables
from kvfold.sim.costs import prefill_table
from kvfold.sim.errors import ConfigError
from tests.engine_runs import write_csv

ATTENTION = "kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype"
ATTENTION += ",step,latency"


def make_perfdb(folder, system="h100_sxm"):
    """Decode 1 us + 1 ns a token (FP8: half), prefill 1e-8 ms a pair, products 1 us a MiB."""
    stem = f"{system}_vllm0.0.1"
    rows = []
    for heads, kv_heads in ((32, 8), (64, 8)):
        for batch in (1, 8):
            for context in (1024, 16_384, 65_536):
                for name, share in (("bfloat16", 1.0), ("fp8", 0.5)):
                    time_ms = 1e-3 + share * heads / 32 * batch * context * 1e-6
                    rows.append(
                        ("fa", batch, 1, heads, kv_heads, 128, "bfloat16", name, context - 1, time_ms)
                    )
    write_csv(folder / (stem + DECODE), ATTENTION.split(","), rows)
    rows = [
        (
            "fa",
            1,
            new,
            32,
            8,
            128,
            "bfloat16",
            "bfloat16",
            past,
            1e-8 * (new * (new + 1) / 2 + 2 * new * past),
        )
        for new in (512, 2048)
        for past in (0, 1024)
    ]
    write_csv(folder / (stem + PREFILL), ATTENTION.split(","), rows)
    sizes = ((1024, 1024), (4096, 4096), (16_384, 16_384))
    rows = [("linear", m, n, k, 2 * n * k / 2**20 * 1e-3) for m in (1, 128, 4096) for n, k in sizes]
    write_csv(folder / (stem + GEMM), ("kernel_source", "m", "n", "k", "latency"), rows)


def test_public_tables_become_a_cost_table(tmp_path):
    make_perfdb(tmp_path)
    found = perfdb_costs(tmp_path, "h100_sxm", 32, 8)
    starts, segments = found.attend["bf16"].segments(8, 1.0, True)
    place = [start for start in starts if start <= 8 * 20_000]
    segment = segments[len(place) - 1]
    assert (segment.base_fs + segment.token_fs * 160_000) / 1e9 == pytest.approx(1 + 160)
    assert set(found.attend) == {"bf16", "fp8-e4m3"}
    # a shape that the table lacks is interpolated by its bytes
    assert found.linear["bf16"].time_us(64, 2 * 28_672 * 4096)[0] == pytest.approx(2 * 28_672 * 4096 / 2**20)


def test_history_is_what_a_chunk_takes_more(tmp_path):
    make_perfdb(tmp_path)
    prefill = perfdb_costs(tmp_path, "h100_sxm", 32, 8).prefill
    assert prefill.pair_fs(512, False) == (pytest.approx(1e-8 * 1e12), "interpolated")
    assert prefill.pair_fs(2048, True) == (pytest.approx(2e-8 * 1e12), "interpolated")


def test_a_system_without_all_three_files_has_none(tmp_path):
    make_perfdb(tmp_path)
    next(tmp_path.glob(f"*{GEMM}")).unlink()
    assert perfdb_costs(tmp_path, "h100_sxm", 32, 8) is None
    found = tables(tmp_path)
    assert not found.checks
    assert len(found.skipped) == 3


def test_a_bad_latency_is_named_with_its_line(tmp_path):
    make_perfdb(tmp_path)
    path = next(tmp_path.glob(f"*{GEMM}"))
    path.write_text(path.read_text() + "linear,1,1,1,-3\n")
    with pytest.raises(ConfigError, match=r"gemm_bf16\.csv:11"):
        perfdb_costs(tmp_path, "h100_sxm", 32, 8)


def test_the_worst_point_is_named(tmp_path):
    make_perfdb(tmp_path, "h200_sxm")
    found = {check.name: check for check in tables(tmp_path).checks}
    gated = found["h200 decode attention, our table, same kernel: median"]
    assert gated.gate == 0.10
    assert not gated.passed  # the made-up GPU is far from an H200
    for reading in ("same kernel, timed as there", "fastest kernel"):
        assert found[f"h200 decode attention, our table, {reading}: median"].gate is None
    worst = found["h200 decode attention, our table, same kernel: worst"]
    batch, context = worst.note.replace(",", "").split(" x ")
    assert worst.reference == pytest.approx(1 + int(batch) * int(context) * 1e-3)


def test_prefill_rates_are_constant_beyond_the_measured_chunks():
    table = prefill_table({(32, 128): {(100, 0): 50.5, (200, 0): 402.0, (100, 1000): 10.0}})
    assert table.pair_fs(100, False) == (pytest.approx(50.5e9 / 5050), "interpolated")
    assert table.pair_fs(150, False)[0] == pytest.approx((50.5e9 / 5050 + 402e9 / 20_100) / 2)
    assert table.pair_fs(400, False) == (pytest.approx(402e9 / 20_100), "extrapolated")
    assert table.pair_fs(50, False) == (pytest.approx(50.5e9 / 5050), "extrapolated")
    assert table.pair_fs(100, True)[0] == pytest.approx(10e9 / 100_000)
    assert prefill_table({}) is None


@pytest.mark.parametrize("tokens", [4, 5, 9, 15, 16])
def test_a_prompt_chunk_that_costs_its_launch_costs_the_same_between_measured_ones(tokens):
    table = prefill_table({(32, 128): {(4, 0): 10.0, (16, 0): 10.0, (4096, 0): 400.0}})
    time_us = table.pair_fs(tokens, False)[0] * (tokens * (tokens + 1) // 2) / 1e9
    assert time_us == pytest.approx(10.0, rel=0.03)


@pytest.mark.parametrize("tokens", [2048, 3000, 5000, 8192])
def test_a_time_that_grows_with_the_pairs_does_so_between_measured_chunks(tokens):
    pairs = {n: n * (n + 1) // 2 for n in (2048, 8192, tokens)}
    table = prefill_table({(32, 128): {(n, 0): 1e-4 * pairs[n] for n in (2048, 8192)}})
    assert table.pair_fs(tokens, False)[0] == pytest.approx(1e5)


def make_splitwise(folder, scale=1.0):
    rows = []
    for hardware in ("a100-80gb", "h100-80gb"):
        for tp in (2, 4, 8):
            for prompt, batch in ((512, 1), (512, 16), (2048, 1)):
                power = (1.0, 0.7) if hardware.startswith("a100") else (0, 0)
                times = (prompt * 0.4, 50 + batch * scale, 0)
                rows.append(("llama2-70b", hardware, prompt, batch, 128, *power, *times, tp))
    columns = (
        "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time"
    )
    columns += ",e2e_time,tensor_parallel"
    write_csv(folder / "perf_model.csv", columns.split(","), rows)


def test_splitwise_trends_and_power(tmp_path):
    make_splitwise(tmp_path)
    found = splitwise(tmp_path)
    assert all(check.passed for check in found.checks if check.passed is not None)
    assert sum(check.name.startswith("power") for check in found.checks) == 3
    make_splitwise(tmp_path, scale=-0.01)
    falling = [check for check in splitwise(tmp_path).checks if "grows" in check.name]
    assert not any(check.passed for check in falling)
