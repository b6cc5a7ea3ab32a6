"""`kvfold validate`: recorded runs that load unchanged, gates that can be missed, what is skipped and drawn."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvfold.analysis.cli import app
from kvfold.analysis.validate import compared
from kvfold.analysis.validate_all import result, validate
from kvfold.analysis.validate_replay import checks_of, replay, trace_of
from kvfold.analysis.validate_report import render
from kvfold.analysis.validate_run import load_run
from kvfold.sim.errors import ConfigError
from kvfold.traces.errors import BadTraceError
from tests.engine_runs import make_profile, make_run

SHAPES = {
    "dense on two tensor-parallel GPUs": dict(model="Qwen/Qwen3-32B", hardware="RTXPRO6000", tp=2),
    "experts over two data-parallel ranks": dict(
        model="Qwen/Qwen3-30B-A3B-Instruct-2507", hardware="RTXPRO6000", data_parallel=2
    ),
    "one GPU": {},
    "one GPU, block count not recorded": dict(hardware="RTXPRO6000", blocks=None),
}


def quiet(_):
    pass


def invoke(*arguments):
    found = CliRunner().invoke(app, ["validate", *map(str, arguments)])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def write(folder, name="RUN", slower=1.0, **shape):
    profile = {key: shape[key] for key in ("model", "hardware", "tp") if key in shape}
    make_profile(folder / "profiles", moe=shape.get("data_parallel", 1) > 1, **profile)
    return make_run(folder, name, slower=slower, **shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_run_that_we_made_ourselves_has_no_error(tmp_path, shape):
    """Two clocks, a front end that adds up to 20 ms, one rank or two: what comes back is what was simulated."""
    found = validate(write(tmp_path, **shape).parent, ["engine"], quiet)
    latencies = [check for check in found["checks"] if check["unit"] == "s"]
    assert len(latencies) == 15
    for check in latencies:
        # wall times of 1.7e9 s are kept to 0.24 us
        assert check["error"] == pytest.approx(0, abs=1e-5), check["name"]


def test_a_slower_engine_shows_as_a_negative_error(tmp_path):
    found = replay(load_run(write(tmp_path, slower=1.25)), tmp_path / "profiles")
    for check in checks_of(found):
        assert check.error == pytest.approx(1 / 1.25 - 1, abs=1e-5)


def test_the_engines_blocks_less_its_null_block_are_the_pool(tmp_path):
    found = replay(load_run(write(tmp_path)), tmp_path / "profiles")
    assert found.budget.num_units == 399


def test_a_prompt_has_blocks_of_its_own_but_for_what_it_shares(tmp_path):
    recorded = load_run(write(tmp_path))
    alone = trace_of(recorded, {})
    assert np.array_equal(alone.new_blocks, alone.input_tokens // 16)
    trace = trace_of(recorded, {7: (3, 100)})
    assert (trace.shared_parent[7], trace.shared_blocks[7]) == (3, 6)
    assert trace.new_blocks[7] == trace.input_tokens[7] // 16 - 6


def test_shared_prefixes_shorten_the_wait(tmp_path):
    """The workload is not in the table of known ones, so nothing is shared unless it is said."""
    recorded, profiles = load_run(write(tmp_path)), tmp_path / "profiles"
    alone = replay(recorded, profiles)
    assert "shared prefixes unknown: the data has no token ids" in alone.notes
    both = replay(recorded, profiles, shared={row: (0, 96) for row in range(1, 40)})
    assert both.simulated.calls.cached_tokens.sum() > alone.simulated.calls.cached_tokens.sum()
    assert both.ours["latency"].mean() < alone.ours["latency"].mean()


def test_a_bad_row_is_named_with_its_line(tmp_path):
    path = write(tmp_path) / "requests.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = lines[4].replace('"input_toks": ', '"input_toks": -')
    path.write_text("\n".join(lines))
    with pytest.raises(BadTraceError, match=r"requests\.jsonl:5"):
        load_run(path.parent)


def test_settings_that_are_missing_are_one_line(tmp_path):
    path = write(tmp_path)
    (path / "cluster_config.json").write_text('{"nodes": []}')
    with pytest.raises(ConfigError, match="settings of the run"):
        load_run(path)


def rewrite(path, change):
    """A JSON file, or every line of one with several, changed."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("\n".join(json.dumps(change(json.loads(line))) for line in lines))


def without(*keys):
    return lambda found: {key: value for key, value in found.items() if key not in keys}


ODD = {
    "more keys": lambda path: [
        rewrite(path / name, lambda found: found | {"new": {"a": [1]}, "other": None})
        for name in ("requests.jsonl", "meta.json", "cluster_config.json")
    ],
    "numbers as ids": lambda path: rewrite(path / "requests.jsonl", lambda row: row | {"request_id": 7}),
    "no ids": lambda path: rewrite(path / "requests.jsonl", without("request_id")),
    "no KV in the log": lambda path: (path / "timeseries.csv").write_text("t,running,waiting\n1.0,5,1\n"),
    "a log without what we draw": lambda path: (path / "timeseries.csv").write_text("time\n1.0\n"),
    "an empty log": lambda path: (path / "timeseries.csv").write_text(""),
    "no log": lambda path: (path / "timeseries.csv").unlink(),
    "rows in another order": lambda path: (path / "requests.jsonl").write_text(
        "\n".join(reversed((path / "requests.jsonl").read_text().splitlines()))
    ),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("shape", [{}, SHAPES["experts over two data-parallel ranks"]], ids=("one", "two"))
def test_odd_but_plausible_files_load_alike(tmp_path, shape, odd):
    path = write(tmp_path, **shape)
    before = replay(load_run(path), tmp_path / "profiles")
    odd(path)
    after = validate(tmp_path, ["engine"], quiet)
    found = [check["value"] for check in after["checks"] if check["unit"] == "s"]
    assert found == [check.value for check in checks_of(before)]


def test_rows_of_several_ranks_are_one_log(tmp_path):
    path = write(tmp_path, **SHAPES["experts over two data-parallel ranks"])
    (path / "timeseries.csv").write_text(
        "t,engine,running,waiting,kv_cache_pct\n1.0,rank 0,5,1,40\n1.0,rank 1,7,0,20\n2.0,rank 0,4,0,10\n"
    )
    log = load_run(path).log
    assert {name: values.tolist() for name, values in log.items()} == {
        "t": [1.0, 2.0],
        "running": [12.0, 4.0],
        "waiting": [1.0, 0.0],
        "kv_cache_pct": [30.0, 10.0],
    }


def test_blocks_are_the_sum_over_ranks(tmp_path):
    path = write(tmp_path, **SHAPES["experts over two data-parallel ranks"])
    assert replay(load_run(path), tmp_path / "profiles").budget.num_units == 400 // 2 - 1


def test_a_rank_holds_its_share_of_the_experts(tmp_path):
    """29 of 30.5 billion parameters are in experts: half of those on each of two ranks leave room for more KV."""
    path = write(tmp_path, blocks=None, **SHAPES["experts over two data-parallel ranks"])
    recorded, profiles = load_run(path), tmp_path / "profiles"
    shared = replay(recorded, profiles).budget
    whole = replay(dataclasses.replace(recorded, expert_parallel=False), profiles).budget
    assert whole.weights_bytes - shared.weights_bytes == 2 * 48 * 128 * 3 * 2048 * 768 // 2
    assert shared.kv_budget_bytes - whole.kv_budget_bytes == whole.weights_bytes - shared.weights_bytes


def test_the_slowest_dimension_of_the_network_counts(tmp_path):
    path = write(tmp_path, **SHAPES["dense on two tensor-parallel GPUs"])
    assert load_run(path).link_bytes_per_s is None
    several = {"link_bw": [64, 16], "link_latency": [1000, 20_000]}
    rewrite(path / "cluster_config.json", lambda found: found | several)
    recorded = load_run(path)
    assert (recorded.link_bytes_per_s, recorded.link_latency_s) == (16e9, 2e-5)
    rewrite(path / "cluster_config.json", lambda found: found | {"link_bw": 0})
    with pytest.raises(ConfigError, match="link_bw must be above 0"):
        load_run(path)


def test_experts_need_their_table(tmp_path):
    path = write(tmp_path, **SHAPES["experts over two data-parallel ranks"])
    (table,) = tmp_path.rglob("moe.csv")
    table.unlink()
    with pytest.raises(ConfigError, match=r"no moe\.csv"):
        replay(load_run(path), tmp_path / "profiles")


def test_profiles_may_lie_in_folders_of_folders(tmp_path):
    path = write(tmp_path, **SHAPES["dense on two tensor-parallel GPUs"])
    (flat,) = (tmp_path / "profiles").iterdir()
    nested = tmp_path / "profiles" / "RTXPRO6000" / "Qwen" / "Qwen3-32B" / "bf16" / "tp2"
    nested.parent.mkdir(parents=True)
    flat.rename(nested)
    assert replay(load_run(path), tmp_path / "profiles").simulated.calls.last_token_s.min() > 0


def test_a_run_without_its_profile_says_which_there_are(tmp_path):
    path = write(tmp_path)
    other = tmp_path / "elsewhere"
    make_profile(other, hardware="RTXPRO6000")
    with pytest.raises(ConfigError, match="RTXPRO6000_meta-llama"):
        replay(load_run(path), other)


def test_a_missed_gate_is_exit_code_3(tmp_path):
    write(tmp_path, "RTX4090_Llama-3.1-8B", slower=1.1)
    found = invoke("--only", "engine", "--data", tmp_path, "--json")
    assert found.exit_code == 3
    report = json.loads(found.stdout)
    assert report["counts"]["missed"] == 12
    check = report["checks"][0]
    assert {"name", "source", "reference", "value", "error", "gate", "passed"} <= set(check)
    assert not check["passed"]
    assert check["gate"] == 0.02
    assert check["error"] == pytest.approx(1 / 1.1 - 1, abs=1e-5)


def test_a_gate_passes_at_its_limit_and_not_beyond():
    assert compared("f", "n", "s", 100.0, 102.0, 0.02).passed
    assert not compared("f", "n", "s", 100.0, 102.1, 0.02).passed
    assert not compared("f", "n", "s", 100.0, None, 0.02).passed
    assert compared("f", "n", "s", 100.0, 150.0).passed is None


def test_missing_data_is_skipped_counted_and_named(tmp_path):
    found = invoke("--only", "engine,tables,splitwise,memory", "--data", tmp_path, "--json")
    assert found.exit_code == 0
    report = json.loads(found.stdout)
    assert {check["family"] for check in report["checks"]} == {"memory"}
    assert report["counts"]["skipped"] == 5 == len(report["skipped"])
    assert any("perf_model.csv" in reason for reason in report["skipped"])


def test_a_family_that_is_not_known_has_a_close_match():
    with pytest.raises(ConfigError, match="did you mean queueing"):
        validate(None, ["queuing"], quiet)


def test_an_absent_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        validate(tmp_path / "nowhere", [], quiet)


def test_strict_costs_refuse_a_profile_of_short_contexts(tmp_path):
    write(tmp_path)
    table = next((tmp_path / "profiles").rglob("attention.csv"))
    rows = table.read_text().splitlines()
    table.write_text("\n".join(row for row in rows if row.split(",")[3] not in ("1024", "4096", "16384")))
    meta = table.with_name("meta.json")
    meta.write_text(meta.read_text().replace('"enabled": true', '"enabled": false'))
    assert validate(tmp_path, ["engine"], quiet)["runs"][0]["extrapolated_share"] > 0
    with pytest.raises(ConfigError, match="--strict-costs"):
        validate(tmp_path, ["engine"], quiet, strict=True)


def test_checks_that_need_no_data_all_pass():
    found = validate(None, ["gaac", "memory", "codec"], quiet)
    assert found["missed"] == []
    assert found["counts"]["gated"] >= 20


def test_the_fp8_report_is_met_without_tables():
    found = validate(None, ["fp8"], quiet)
    level = found["checks"][0]
    assert level["gate"] == 0.15
    assert level["passed"]
    assert found["skipped"]


def test_the_page_shows_both_sides_and_escapes_names(tmp_path):
    path = write(tmp_path)
    path.rename(path.with_name("<script>alert(1)</script>".replace("/", "_")))
    page = render(validate(tmp_path, ["engine"], quiet))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    for title in (
        "Distribution of TTFT",
        "Distribution of TPOT",
        "Calls waiting over time",
        "KV pool in use",
    ):
        assert title in page
    assert page.count('class="line s0') >= 6
    assert page.count('class="line s1') >= 6
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_the_page_is_the_same_for_the_same_result(tmp_path):
    found = result([compared("f", "n", "s", 1.0, 1.5, 0.1)], ["f: nothing"])
    assert render(found) == render(found)
    assert "missed: n" in render(found)


def test_the_report_is_a_file(tmp_path):
    target = tmp_path / "page.html"
    found = invoke("--only", "memory", "--report", target)
    assert found.exit_code == 0
    assert "KV pool, Qwen3-32B" in target.read_text()
    assert "0 missed" in found.stdout


def test_real_runs_meet_their_gates(shared_data):
    found = validate(shared_data / "validation", ["engine", "tables", "fp8", "splitwise"], quiet)
    assert found["missed"] == []
    assert found["skipped"] == []
    assert found["counts"]["gated"] >= 25
