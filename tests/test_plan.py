"""Plans: the contract of the JSON, laws of the comparisons, and what the verdict says in each situation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfold.analysis import cli
from kvfold.analysis.deployment import deploy, format_sizes
from kvfold.analysis.plan import _burst_note, _loop_note, make_plan
from kvfold.analysis.search import Found, Outcome
from kvfold.analysis.slo import parse_slo
from kvfold.analysis.study import Question, sessions_of
from kvfold.sim.retention import Retention
from kvfold.sim.scheduler import Limits
from kvfold.traces.load import load
from kvfold.traces.stats import inspect
from tests.test_slo import make_calls

SAMPLE = Path(__file__).resolve().parent.parent / "traces" / "data" / "sample.jsonl"
ROW_KEYS = {"metric", "format", "unit", "baseline", "value", "change", "ci95", "n", "origin"}
ORIGINS = {"measured", "interpolated", "extrapolated", "modelled", "published"}


def question(trace, formats=("bf16", "gaac"), gpu="rtx-4090", **changes):
    asked = Question(
        deployment=deploy("qwen3-8b", gpu, weights="w4a16"),
        trace=trace,
        slo=parse_slo("agent"),
        formats=tuple(format_sizes(name) for name in formats),
        limits=Limits(),
        concurrency=4,
        retention=Retention(),
        prefix_caching=True,
        seed=0,
        seeds=1,
    )
    return replace(asked, **changes)


def plan(asked):
    return make_plan(asked, inspect(asked.trace), {"model": "qwen3-8b"}, lambda _: None)


@pytest.fixture(scope="module")
def sample():
    return load(SAMPLE)


@pytest.fixture(scope="module")
def sample_plan(sample):
    return plan(question(sample))


def value(found, study, metric):
    (row,) = [row for row in found[study]["rows"] if row["metric"] == metric]
    return row


def test_the_contract(sample_plan):
    verdict = sample_plan["verdict"]
    assert set(verdict) >= {"text", "slo_met", "format", "capacity_change", "step_speedup", "binding"}
    assert verdict["binding"] in {"memory", "bandwidth", "compute", "none"}
    for study in ("fixed_concurrency", "fixed_budget", "recorded_load"):
        assert sample_plan[study]["rows"], study
        for row in sample_plan[study]["rows"]:
            assert set(row) == ROW_KEYS
            assert row["origin"] in ORIGINS
            if row["change"] is not None:
                assert row["change"] == pytest.approx(row["value"] / row["baseline"] - 1)
            if row["ci95"] is not None:
                low, high = row["ci95"]
                assert low <= high
    assert sample_plan["fixed_concurrency"]["concurrency"] == 4


def test_notes_are_assumptions_and_limits_what_is_not_validated(sample_plan):
    assert any("blocks take their slot" in line for line in sample_plan["notes"])
    assert any("differences below a few percent" in line for line in sample_plan["limits"])
    assert not set(sample_plan["notes"]) & set(sample_plan["limits"])


def test_the_same_format_twice_changes_nothing(sample):
    same = replace(format_sizes("bf16"), name="bf16-again")
    asked = question(sample)
    found = plan(replace(asked, formats=(asked.baseline, same)))
    for study in ("fixed_concurrency", "fixed_budget", "recorded_load"):
        for row in found[study]["rows"]:
            assert row["change"] in (0, None), row
    assert found["verdict"]["capacity_change"] == 0
    assert found["verdict"]["step_speedup"] == 1


def test_a_format_without_decode_work_is_never_worse(sample):
    """Fewer bytes at no cost: at least as much load on the same bytes, and a step that is at least as fast."""
    free = replace(format_sizes("gaac"), decode_int_ops_per_element=0.0)
    asked = question(sample)
    found = plan(replace(asked, formats=(asked.baseline, free)))
    assert found["verdict"]["capacity_change"] > 0
    assert found["verdict"]["step_speedup"] > 1
    assert value(found, "fixed_concurrency", "TPOT, mean")["change"] < 0
    assert value(found, "fixed_concurrency", "KV held, peak")["change"] < 0
    assert all(line["context_tokens"] is not None for line in found["break_even"])


def test_more_memory_serves_more(sample):
    loads = []
    for gib in (8, 16):
        deployment = deploy("qwen3-8b", "rtx-4090", weights="w4a16", kv_budget_bytes=gib * 2**30 // 2)
        found = plan(question(sample, deployment=deployment))
        loads.append(value(found, "fixed_budget", "highest load within the SLO")["baseline"])
        assert found["fixed_budget"]["kv_budget_origin"].startswith("given")
    assert loads[1] > loads[0]


def test_memory_binds_on_a_small_gpu_and_the_text_says_so(sample_plan):
    assert sample_plan["verdict"]["binding_at_highest_load"] == "memory"
    assert "what binds there is memory" in sample_plan["verdict"]["text"]


def test_a_trace_too_small_for_the_gpu_is_no_limit(sample):
    found = plan(question(sample, deployment=deploy("qwen3-8b", "h200"), concurrency=8))
    assert found["verdict"]["capacity_change"] is None
    assert "too little work" in found["verdict"]["text"]
    assert value(found, "fixed_budget", "load served (trace exhausted)")["change"] is None


def test_requests_longer_than_the_context_are_named(sample):
    deployment = replace(deploy("qwen3-8b", "rtx-4090", weights="w4a16"), max_context_tokens=20_000)
    found = plan(question(sample, deployment=deployment))
    too_long = int((sample.input_tokens + sample.output_tokens > 20_000).sum())
    assert found["rejected"]["reasons"]["longer_than_model_context"] == too_long
    assert f"{too_long:,} requests" in found["verdict"]["text"]
    assert "longer than 20,000 tokens" in found["verdict"]["text"]


def test_several_seeds_give_an_interval(sample):
    found = plan(question(sample, seeds=3))
    row = value(found, "fixed_budget", "highest load within the SLO")
    assert row["n"] == 6
    assert row["ci95"][0] < row["change"] < row["ci95"][1]
    assert "rotations of the sessions" in found["ci_method"]
    assert "95 % CI" in found["verdict"]["text"]


def run_cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["kvfold", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    return code or 0, capsys.readouterr().out


ARGUMENTS = ("plan", "--model", "qwen3-8b", "--gpu", "rtx-4090", "--weights", "w4a16", "--trace", str(SAMPLE))


def test_json_is_the_same_twice_and_the_report_is_written_whole(monkeypatch, capsys, tmp_path):
    report = tmp_path / "plan.html"
    arguments = (*ARGUMENTS, "--slo", "agent", "--concurrency", "4", "--json", "--report", str(report))
    code, one = run_cli(monkeypatch, capsys, *arguments)
    first = report.read_bytes()
    assert run_cli(monkeypatch, capsys, *arguments) == (code, one)
    assert report.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    found = json.loads(one)
    assert code == (0 if found["verdict"]["slo_met"] else 3)


def test_an_slo_that_nothing_meets_exits_3_and_still_prints(monkeypatch, capsys):
    code, out = run_cli(monkeypatch, capsys, *ARGUMENTS, "--slo", "ttft=1ms", "--concurrency", "1")
    assert code == 3
    assert "NO format meets the SLO" in " ".join(out.split())


def test_a_lossy_format_is_compared_and_never_recommended_over_a_lossless_one(sample):
    asked = question(sample, formats=("bf16", "fixed4", "fp8-e4m3"))
    found = plan(asked)
    assert found["verdict"]["format"] == "fixed4"
    assert "fp8-e4m3 is lossy and left out of this line" in found["verdict"]["text"]
    assert any("fp8-e4m3 is lossy" in limit for limit in found["limits"])
    assert {row["format"] for row in found["fixed_budget"]["rows"]} == {"fixed4", "fp8-e4m3"}
    alone = plan(question(sample, formats=("bf16", "fp8-e4m3")))
    assert alone["verdict"]["format"] == "fp8-e4m3"
    assert "fp8-e4m3 is lossy" in alone["verdict"]["text"]


def test_goodput_is_the_same_number_in_the_chart_and_in_the_table(sample_plan):
    for name, format_name in (("baseline", "bf16"), ("value", "gaac")):
        load = value(sample_plan, "fixed_budget", "highest load within the SLO")[name]
        at = {"format": format_name, "load": load}
        points = [point for point in sample_plan["load_curve"] if at.items() <= point.items()]
        goodput = value(sample_plan, "fixed_budget", "goodput")[name]
        assert [point["goodput_rps"] for point in points] == [pytest.approx(goodput)] * len(points) != []


def test_the_load_curve_holds_the_recorded_load_of_every_format(sample_plan):
    recorded = question(load(SAMPLE)).unit_load
    at = [point["format"] for point in sample_plan["load_curve"] if point["load"] == recorded]
    assert at == ["bf16", "gaac"]


def test_sequences_that_the_batch_cap_keeps_out_are_no_gain(sample):
    asked = question(sample, limits=Limits(max_num_seqs=5))
    rows = [row["metric"] for row in plan(asked)["fixed_budget"]["rows"] if "that fit" in row["metric"]]
    assert rows == ["sequences of 19,743 tokens that fit (5 run at once)"]


@pytest.mark.parametrize(("last_s", "burst"), [(13.0, False), (40.0, True)])
def test_a_burst_that_drains_is_called_one(last_s, burst):
    """10 requests within 9 s; the last ends soon after them, or long after."""
    calls = make_calls([(call, call + 1, last_s, 11, "completed") for call in range(10)])
    served = Outcome(4.5, SimpleNamespace(calls=calls), 1.0)
    highest = {"bf16": (Found(served, 4.6, (served,)),), "gaac": (Found(None, 1.0, (served,)),)}
    asked = SimpleNamespace(has_clock=True, unit_load=2.0, load_unit="requests/s")
    note = _burst_note(asked, SimpleNamespace(highest=highest))
    assert note.startswith("a burst that drains afterwards") == burst
    if burst:
        assert "bf16 at 9 requests/s: all arrive within 9 s, the last ends after 40 s" in note
        assert "gaac" not in note


@pytest.mark.parametrize(("last_s", "said"), [(4.0, False), (1.6, True)])
def test_a_closed_loop_that_serves_far_more_is_named(sample, last_s, said):
    calls = make_calls([(0, 1, last_s, 11, "completed")])
    asked = SimpleNamespace(
        has_clock=True,
        unit_load=2.0,
        load_unit="requests/s",
        baseline=SimpleNamespace(name="bf16"),
        trace=sample,
    )
    sessions = len(sessions_of(sample))
    served = Outcome(sessions / 8, SimpleNamespace(), 1.0)
    highest = {"bf16": (Found(served, served.load, (served,)),)}
    run = SimpleNamespace(calls=calls)
    answers = SimpleNamespace(highest=highest, equal={"bf16": Outcome(2, run, 1.0)}, concurrency=2)
    note = _loop_note(asked, answers)
    assert note.startswith("bf16 serves 2 live in a closed loop at") == said
    assert bool(note) == said


def test_a_load_that_goes_on_is_no_burst(sample_plan):
    assert "burst" not in sample_plan["fixed_budget"]["note"]
