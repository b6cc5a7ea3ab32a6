"""Latency formulas, weighted quantiles, and the metrics of a run."""

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvfold.analysis.latency import call_latency, token_latency
from kvfold.analysis.metrics import cdf, itl, makespan_share_s, metrics, quantiles, summary, timeline
from kvfold.analysis.out import emit_json
from kvfold.analysis.slo import PRESETS
from kvfold.sim.run import Calls, Run, Stretches
from kvfold.traces.table import WAIT_KINDS

DOCS = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
COMPLETED, REJECTED, TIMED_OUT, FAILED = range(4)


def make_calls(arrival_s, scheduled_s, first_token_s, last_token_s, output_tokens, **columns):
    n = len(arrival_s)
    default = {
        "session_id": np.full(n, -1, np.int32),
        "input_tokens": np.full(n, 100, np.int64),
        "outcome": np.zeros(n, np.int8),
        "wait_before_s": np.full(n, np.nan),
        "wait_kind": np.zeros(n, np.int8),
    }
    return Calls(
        request_id=np.arange(n),
        output_tokens=np.array(output_tokens, np.int64),
        arrival_s=np.array(arrival_s, float),
        scheduled_s=np.array(scheduled_s, float),
        first_token_s=np.array(first_token_s, float),
        last_token_s=np.array(last_token_s, float),
        cached_tokens=np.zeros(n, np.int64),
        prefilled_tokens=np.full(n, 100, np.int64),
        preemptions=np.zeros(n, np.int64),
        replica=np.zeros(n, np.int64),
        **{name: np.asarray(columns.get(name, value), value.dtype) for name, value in default.items()},
    )


def make_stretches(rows=()):
    """Rows of (start_s, steps, first_step_s, growth_s, decode_seqs, waiting, used_bytes)."""
    table = np.array(rows, float).reshape(-1, 7)
    start, steps, first, growth, seqs, waiting, used = table.T
    none = np.zeros(len(table), np.int64)
    columns = (steps, first * 1e15, growth * 1e15, seqs, none, none, waiting, used, none)
    return Stretches(start, *(column.round().astype(np.int64) for column in columns))


def make_run(calls, stretches=None, gap_s=()):
    return Run(
        calls=calls,
        stretches=stretches or make_stretches(),
        gap_s=np.array(gap_s, float),
        reject_reasons={},
        kv={"peak_bytes": 1e9},
        busy_s=1.0,
        attention_origin_s={"modelled": 1.0},
        energy_j=50.0,
        energy_origin="modelled",
        idle_energy_j=7.0,
        notes=(),
    )


def toy_engine(rng, requests):
    """A scheduler so small that every token time is known: static batches, steps that grow by a constant.

    Returns the run as the simulator would coalesce it, and the token times of each request.
    """
    clock, rows, token_s, gap_s = 0.0, [], [], []
    arrival = np.sort(rng.uniform(0, 1, requests))
    for first in range(0, requests, 4):
        batch = range(first, min(first + 4, requests))
        clock = max(clock, arrival[batch[-1]]) + rng.uniform(0.01, 0.1)
        outputs = rng.integers(1, 12, len(batch))
        times = {r: [clock] for r in batch}
        live = dict(zip(batch, outputs - 1, strict=True))
        while live := {r: left for r, left in live.items() if left > 0}:
            steps, length = min(live.values()), rng.uniform(0.01, 0.05)
            growth = rng.choice([0.0, 1e-4])
            rows.append((clock, steps, length, growth, len(live), 0, 0))
            for step in range(steps):
                clock += length + step * growth
                for r in live:
                    times[r].append(clock)
            live = {r: left - steps for r, left in live.items()}
            if rng.random() < 0.2 and any(live.values()):
                # everybody preempted: the next token of each comes after a pause and no stretch has that gap
                pause = rng.uniform(0.2, 0.4)
                clock += pause
                for r, left in live.items():
                    if left > 0:
                        times[r].append(clock)
                        gap_s.append(pause)
                        live[r] -= 1
        token_s += times.values()
    calls = make_calls(
        arrival, arrival, [t[0] for t in token_s], [t[-1] for t in token_s], [len(t) for t in token_s]
    )
    return make_run(calls, make_stretches(rows), gap_s), token_s


@pytest.mark.parametrize("seed", range(5))
def test_gaps_are_one_fewer_than_tokens_and_equal_the_token_times(seed):
    run, token_s = toy_engine(np.random.default_rng(seed), requests=150)
    values, weights = itl(run)
    exact = token_latency(run.calls.arrival_s, run.calls.scheduled_s, token_s)
    assert weights.sum() == (run.calls.output_tokens - 1).sum() == len(exact.itl_s)
    np.testing.assert_allclose(np.sort(np.repeat(values, weights)), np.sort(exact.itl_s), rtol=1e-9)
    found, truth = metrics(run, PRESETS["offline"])["metrics"], summary(exact.itl_s)
    assert found["itl_s"] == pytest.approx(truth, rel=1e-9)
    assert found["tpot_s"] == pytest.approx(summary(exact.requests.tpot_s), rel=1e-12)


floats = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(
    hnp.arrays(float, st.integers(1, 60), elements=floats).flatmap(
        lambda values: st.tuples(
            st.just(values),
            hnp.arrays(np.int64, len(values), elements=st.integers(0, 5)).filter(lambda w: w.sum() > 0),
        )
    ),
    hnp.arrays(float, 5, elements=st.floats(0, 1)),
)
def test_weighted_quantiles_are_numpys_on_the_expanded_sample(sample, at):
    values, weights = sample
    at[:2] = 0, 1
    kept = weights > 0
    found = quantiles(values[kept], at, weights[kept])
    assert np.array_equal(found, np.quantile(np.repeat(values, weights), at))


def test_summary_is_null_where_the_sample_is_too_small():
    empty = {"mean": None, "p50": None, "p90": None, "p95": None, "p99": None, "n": 0, "p99_flagged": True}
    assert (
        summary(np.empty(0))
        == summary(np.full(3, np.nan))
        == summary(np.ones(2), np.zeros(2, np.int64))
        == empty
    )
    assert summary(np.ones(99))["p99"] is None
    assert summary(np.ones(100))["p99"] == 1.0
    assert summary(np.ones(999))["p99_flagged"]
    assert not summary(np.ones(1000))["p99_flagged"]
    with_hole = summary(np.array([1.0, np.nan, 3.0]))
    assert (with_hole["mean"], with_hole["n"]) == (2.0, 2)


def test_the_worked_example_of_the_docs():
    token_s = [[2.10, 2.14, 2.14, 2.14, 2.18], [0.10], 0.20 + 0.05 * np.arange(100)]
    example = token_latency([0, 0, 0], [2.0, 0, 0], token_s)
    requests = example.requests
    results_ms = 1e3 * np.array(
        [
            example.icl_s.mean(),
            np.nanmean(requests.tpot_s),
            example.itl_s.mean(),
            np.nan_to_num(requests.tpot_s).mean(),
            requests.e2e_s.sum() / example.output_tokens.sum(),
            requests.norm_latency_s.mean(),
            requests.ttft_s.mean(),
            requests.ttft_from_schedule_s.mean(),
        ]
    )
    published = [49.80, 35.00, 48.83, 23.33, 70.09, 195.83, 800.0, 133.33]
    np.testing.assert_allclose(results_ms, published, atol=0.005)
    printed = re.findall(r"\| ([0-9.]+) ms \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert printed == [f"{value:.2f}" for value in results_ms]
    # the same requests as a simulated run, where one step is one token: the headline numbers do not change
    calls = make_calls([0, 0, 0], [2.0, 0, 0], [2.10, 0.10, 0.20], [2.18, 0.10, 5.15], [5, 1, 100])
    found = metrics(make_run(calls), PRESETS["chat"])["metrics"]
    assert found["tpot_s"]["mean"] == pytest.approx(0.035)
    assert (found["tpot_s"]["n"], found["e2e_s"]["n"]) == (2, 3)
    assert found["ttft_s"]["mean"] == pytest.approx(0.8)


def test_token_times_need_a_token():
    with pytest.raises(ValueError, match="at least one token time"):
        token_latency([0], [0], [[]])


def mixed_run():
    """Two completed calls, one rejected, one timed out, one failed; three calls are one session."""
    nan = float("nan")
    calls = make_calls(
        [1.0, 2.0, 3.0, 4.0, 5.0],
        [1.5, 2.0, nan, 4.0, nan],
        [2.0, 5.0, nan, 4.5, nan],
        [3.0, 5.0, nan, 6.0, nan],
        [11, 1, 0, 5, 0],
        outcome=[COMPLETED, COMPLETED, REJECTED, TIMED_OUT, FAILED],
        session_id=[7, 7, -1, 9, -1],
        wait_before_s=[nan, 0.25, nan, 2.0, nan],
        wait_kind=[WAIT_KINDS.index(kind) for kind in ("none", "tool", "none", "human", "none")],
    )
    return replace(make_run(calls), reject_reasons={"too_long": 1})


def test_every_offered_call_is_counted_once_and_bad_unless_it_completed():
    found = metrics(mixed_run(), PRESETS["chat"])
    assert found["counts"] == {"offered": 5, "completed": 2, "rejected": 1, "timed_out": 1, "failed": 1}
    assert found["slo_attainment"] == 1 / 5  # the second completed call has a TTFT of 3 s
    assert metrics(mixed_run(), PRESETS["offline"])["slo_attainment"] == 2 / 5
    assert found["makespan_s"] == 4.0
    assert found["output_tok_s"] == 12 / 4.0
    assert found["total_tok_s"] == 212 / 4.0
    assert found["goodput_rps"] == 1 / 4.0
    assert found["metrics"]["ttft_s"]["n"] == 2
    assert found["metrics"]["queue_s"]["mean"] == pytest.approx(0.25)
    assert found["energy_j_per_output_token"] == 50 / 12
    assert found["reject_reasons"] == {"too_long": 1}


def test_sessions_are_whole_or_not_completed():
    found = metrics(mixed_run(), PRESETS["chat"])["sessions"]
    assert (found["count"], found["completed"]) == (2, 1)
    assert found["task_completion_s"]["mean"] == 4.0
    assert (found["tool_wait_s"], found["human_wait_s"], found["other_wait_s"]) == (0.25, 2.0, 0.0)
    assert found["llm_s"] == found["queue_s"] + found["prefill_s"] + found["decode_s"] == 5.0
    # with the failed call in it, session 7 is no longer whole
    run = mixed_run()
    run = replace(run, calls=replace(run.calls, session_id=np.array([7, 7, -1, 9, 7], np.int32)))
    found = metrics(run, PRESETS["chat"])["sessions"]
    assert (found["count"], found["completed"], found["task_completion_s"]["n"]) == (2, 0, 0)


@pytest.mark.parametrize("grouped", [False, True])
def test_makespan_shares_sum_to_the_makespan(grouped):
    run, _ = toy_engine(np.random.default_rng(1), requests=31)
    if grouped:
        run = replace(run, calls=replace(run.calls, session_id=np.arange(31, dtype=np.int32) // 4 - 1))
    share = makespan_share_s(run.calls)
    assert (share >= 0).all()
    assert share.sum() == pytest.approx(metrics(run, PRESETS["chat"])["makespan_s"], rel=1e-12)


def test_instants_are_shared_by_those_alive():
    # alone 0-1, both 1-3, the second alone 3-4, nobody 4-6, the third alone 6-7
    calls = make_calls([0.0, 1.0, 6.0], [0.0, 1.0, 6.0], [1, 2, 7], [3.0, 4.0, 7.0], [2, 2, 1])
    assert makespan_share_s(calls).tolist() == [2.0, 2.0, 3.0]
    # the first and the last as one session with a wait: alive 0-7
    calls = replace(calls, session_id=np.array([5, -1, 5], np.int32))
    assert makespan_share_s(calls).tolist() == [5.5, 1.5, 0.0]
    # a session alive from 1 to 5 (its second call timed out later), the rejected call has no part
    assert makespan_share_s(mixed_run().calls).tolist() == [4.0, 0, 0, 0, 0]


@pytest.mark.parametrize("offered", [0, 3])
def test_a_run_in_which_nothing_completed_gives_nulls_and_strict_json(offered, capsys):
    nan = [float("nan")] * offered
    calls = make_calls(list(range(offered)), nan, nan, nan, [0] * offered, outcome=[REJECTED] * offered)
    found = metrics(make_run(calls), PRESETS["chat"])
    emit_json(found)  # raises on NaN
    assert capsys.readouterr().out.startswith("{")
    assert found["slo_attainment"] == (0.0 if offered else None)
    for name in ("output_tok_s", "total_tok_s", "makespan_s", "goodput_rps", "energy_j_per_output_token"):
        assert found[name] is None, name
    assert found["metrics"]["itl_s"]["mean"] is None
    assert found["sessions"]["count"] == 0
    assert cdf(call_latency(calls).ttft_s) == {"q": [], "v": []}
    assert timeline(make_stretches())["t_s"] == []


def test_timeline_keeps_the_largest_value_of_each_part_and_0_in_pauses():
    # 1 s of 4 sequences, 2 s of nothing, 1 s with a burst of 10 ms inside
    rows = [
        (0.0, 10, 0.1, 0.0, 4, 2, 400),
        (3.0, 4, 0.1, 0.0, 1, 0, 100),
        (3.4, 1, 0.01, 0.0, 9, 5, 900),
        (3.41, 5, 0.118, 0.0, 1, 0, 100),
    ]
    found = timeline(make_stretches(rows), bins=8)
    assert found["t_s"] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert found["running"] == [4, 4, 0, 0, 0, 0, 9, 1]
    assert found["waiting"] == [2, 2, 0, 0, 0, 0, 5, 0]
    assert found["used_bytes"] == [400, 400, 0, 0, 0, 0, 900, 100]


def test_cdf_rises_to_the_largest_value():
    curve = cdf(np.arange(1001.0), np.full(1001, 2))
    assert curve["q"][0] == 0
    assert curve["q"][-1] == 1
    assert curve["v"][-1] == 1000
    assert np.all(np.diff(curve["v"]) >= 0)


def test_ten_thousand_requests_take_at_most_50_ms():
    rng = np.random.default_rng(0)
    n = 10_000
    arrival = np.sort(rng.uniform(0, 1250, n))
    scheduled = arrival + rng.exponential(0.1, n)
    first = scheduled + rng.exponential(0.2, n)
    output = rng.integers(1, 400, n)
    calls = make_calls(
        arrival, scheduled, first, first + 0.02 * (output - 1), output, session_id=rng.integers(0, 900, n)
    )
    steps = rng.integers(1, 9, 20_000)
    rows = np.column_stack(
        [
            np.linspace(0, 1250, 20_000),
            steps,
            rng.uniform(0.01, 0.03, 20_000),
            np.full(20_000, 1e-6),
            rng.integers(1, 90, 20_000),
            steps * 0,
            steps,
        ]
    )
    run = make_run(calls, make_stretches(rows.tolist()))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        metrics(run, PRESETS["chat"])
        taken.append(time.perf_counter() - start)
    # the best of five, because the machine is shared with other work
    assert min(taken) <= 0.05


def test_large_samples_are_counted_into_buckets_exactly(monkeypatch):
    """The bucketed way gives the bits of the sorted one, also where most values are equal."""
    rng = np.random.default_rng(5)
    for values in (
        rng.lognormal(0, 1, 50_000),
        np.round(rng.lognormal(0, 1, 50_000), 1),
        np.full(30_000, 0.25),
    ):
        weights = rng.integers(1, 40, len(values))
        at = np.array([0.0, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0])
        whole = quantiles(values, at, weights)
        with monkeypatch.context() as patched:
            patched.setattr("kvfold.analysis.metrics._BUCKETED_VALUES", 1000)
            assert quantiles(values, at, weights).tobytes() == whole.tobytes()
