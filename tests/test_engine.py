"""The engine: laws on random loads, theory, and small cases worked out by hand."""

from dataclasses import fields, replace

import numpy as np
import pytest

from kvfold.analysis.metrics import metrics
from kvfold.analysis.slo import PRESETS
from kvfold.codec.sizes import load_sizes
from kvfold.sim import engine as engine_module
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.recorder import Recorder
from kvfold.sim.retention import parse_retention
from kvfold.sim.run import FS_PER_S, OUTCOMES
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.sessions import Load
from kvfold.sim.step import step_cost
from kvfold.sim.work import Chunk
from kvfold.traces.columns import Edges, assemble
from kvfold.traces.table import Meta

SIZES = load_sizes()
#: Models with full, sliding-window and hybrid layers, and the share of Llama's KV budget that makes each scarce.
MODELS = {"llama-3.1-8b": 1.0, "gpt-oss-20b": 0.25, "qwen3.5-35b-a3b": 0.7}
WIDE_WINDOW = "gemma-4-26b-a4b"  # 1,024 tokens, wider than a chunk of a small token budget


def scenario(trace, name="bf16", model="llama-3.1-8b", kv_budget_bytes=20 * 2**30, **changes):
    spec, gpu = load_model(model), load_gpu("h100")
    return Scenario(
        trace=trace,
        cost=step_cost(spec, gpu, SIZES[name], "w4a16"),
        budget=kv_budget(spec, gpu, SIZES[name], weights="w4a16", kv_budget_bytes=kv_budget_bytes),
        max_context_tokens=131_072,
        **changes,
    )


def calls_of(*rows, edges=(), sessions=None):
    """A trace of (arrival_s, input_tokens, output_tokens) rows and (child, parent, wait_s) edges."""
    links = Edges()
    for child, parent, wait_s in edges:
        links.add(child, parent, wait_s, 1)
    columns = {
        "arrival_time_s": [row[0] for row in rows],
        "input_tokens": [row[1] for row in rows],
        "output_tokens": [row[2] for row in rows],
    }
    if sessions is not None:
        columns["session_id"] = sessions
    return assemble(Meta("made", "made", "", "s", rows_read=len(rows), rows_kept=len(rows)), columns, links)


def assert_same(one, other):
    for column in fields(one.calls):
        left, right = getattr(one.calls, column.name), getattr(other.calls, column.name)
        assert left.tobytes() == right.tobytes(), column.name
    assert sorted(one.gap_s) == sorted(other.gap_s)
    assert (one.kv, one.busy_s) == (other.kv, other.busy_s)
    assert one.reject_reasons == other.reject_reasons


RANDOM = [
    # seed, sessions, model, format, budget GiB, max_num_seqs, token budget, live sessions
    (
        seed,
        seed % 3 != 0,
        list(MODELS)[seed % 3],
        ("bf16", "esc3", "gaac")[seed // 2 % 3],
        gib,
        seqs,
        tokens,
        live,
    )
    for seed, (gib, seqs, tokens, live) in enumerate(
        [
            (1.0, 256, 2048, None),
            (1.0, 64, 256, 5),
            (4.0, 16, 512, None),
            (60.0, 256, 2048, None),
            (1.0, 256, 2048, 40),
            (3.0, 4, 64, None),
            (3.0, 8, 2048, 12),
            (1.5, 256, 300, None),
            (5.0, 32, 1000, 30),
            (1.0, 128, 4096, None),
            (1.2, 64, 2048, 20),
            (40.0, 256, 8192, None),
        ]
    )
]


POLICIES = [
    {"retention": "keep"},
    {"retention": "drop"},
    {"retention": "ttl:2.5"},
    {"retention": "swap"},
    {"retention": "least-waste"},
    {"retention": "oracle"},
    {"limits": {"preemption": "swap"}},
    {"limits": {"order": "sessions-first"}},
    {"limits": {"queue_timeout_s": 1.5}},
    {"limits": {"max_queue": 3}},
    {"limits": {"worst_case_admission": True}},
    {"limits": {"max_preemptions": 0}},
    {"limits": {"order": "tenants:gold,silver", "max_preemptions": 0}},
    {"limits": {"order": "tenants:gold", "preemption": "swap"}, "retention": "keep"},
    {"replicas": 3, "router": "round-robin"},
    {"replicas": 2, "router": "least-outstanding"},
    {"replicas": 3, "router": "prefix-affinity"},
    {"replicas": 2, "router": "session-sticky", "retention": "keep"},
    {"retention": "swap", "limits": {"preemption": "swap", "order": "sessions-first"}},
]


def random_scenario(random_trace, case, changes):
    seed, sessions, model, name, gib, seqs, tokens, live = case
    trace = random_trace(150, seed, sessions=sessions, rate_per_s=(2.0, 8.0, 40.0)[seed % 3], longest=4000)
    tenants = np.random.default_rng(seed).choice(["gold", "silver", ""], len(trace)).tolist()
    trace, changes = replace(trace, tenant=tenants), dict(changes)
    limits = Limits(seqs, tokens, **changes.pop("limits", {}))
    retention = parse_retention(changes.pop("retention", "lru"))
    load = Load(live_sessions=live, rotation=seed)
    budget_bytes = int(gib * MODELS[model] * 2**30)
    return scenario(
        trace, name, model, budget_bytes, load=load, limits=limits, retention=retention, **changes
    )


def check_laws(result):
    calls, outcome = result.calls, result.calls.outcome
    done = outcome == OUTCOMES.index("completed")
    failed = outcome == OUTCOMES.index("failed")
    assert sum(result.reject_reasons.values()) == (outcome == OUTCOMES.index("rejected")).sum()
    assert sum(result.fail_reasons.values()) == failed.sum()
    gaps = int((result.stretches.steps * result.stretches.decode_seqs).sum()) + len(result.gap_s)
    assert gaps == int((calls.output_tokens[done] - 1).sum()) or (failed.any() and gaps > 0)
    prefilled = int((result.stretches.steps * result.stretches.prefill_tokens).sum())
    assert prefilled <= calls.prefilled_tokens.sum()
    assert calls.preemptions.sum() > 0 or prefilled == calls.prefilled_tokens.sum()
    assert result.kv["peak_bytes"] <= result.kv["capacity_bytes"]
    times = np.stack([calls.arrival_s, calls.scheduled_s, calls.first_token_s, calls.last_token_s])[:, done]
    assert (np.diff(times, axis=0) >= 0).all()
    assert (result.stretches.first_step_fs > 0).all()
    if done.any():
        last_s = calls.last_token_s[done].max()
        assert metrics(result, PRESETS["chat"])["makespan_s"] == last_s - np.nanmin(calls.arrival_s)


def run_checked(monkeypatch, setup):
    """A run that checks pool, clock and the count of requests in every step, and the books after the last."""
    schedule, take_down = engine_module.next_step, Recorder.stretch
    states, clock = {}, [0]

    def checked(state, now):
        assert now >= clock[0]
        states[id(state)], clock[0] = state, now
        step = schedule(state, now)
        state.pool.check()
        return step

    def counted(recorder, *step):
        if len(states) == setup.replicas:
            offered = np.count_nonzero(~np.isnan(recorder._arrival_s))
            completed = np.count_nonzero(~np.isnan(recorder._last_token_s))
            ended = completed + len(recorder._refusals) + len(recorder._timed_out) + len(recorder._failures)
            inside = sum(len(state.running) + len(state.waiting) for state in states.values())
            assert offered == ended + inside
        return take_down(recorder, *step)

    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "next_step", checked)
        patched.setattr(Recorder, "stretch", counted)
        result = run(setup)
    for state in states.values():
        state.pool.check()
        assert len(states) > 1 or state.host_bytes == 0
        assert (state.pool.private_bytes, state.pool.sequences, state.host_bytes >= 0) == (0, 0, True)
        assert not state.running
        assert not state.waiting
        assert state.decoding.count == state.decoding.kv_tokens == state.decoding.window_tokens == 0
    return result


@pytest.mark.parametrize(
    ("case", "changes"),
    [(case, {}) for case in RANDOM]
    + [(case, changes) for index, changes in enumerate(POLICIES) for case in RANDOM[index % 2 :: 2]],
    ids=str,
)
def test_coalesced_steps_give_the_records_of_single_steps(random_trace, monkeypatch, case, changes):
    setup = random_scenario(random_trace, case, changes)
    fast, slow = run_checked(monkeypatch, setup), run_checked(monkeypatch, replace(setup, stepwise=True))
    assert_same(fast, slow)
    assert metrics(fast, PRESETS["chat"]) == metrics(slow, PRESETS["chat"])
    assert len(fast.stretches.steps) <= len(slow.stretches.steps) == fast.stretches.steps.sum()
    check_laws(fast)


def test_windows_wider_than_a_chunk_are_coalesced_exactly(random_trace):
    trace = random_trace(60, 2, sessions=True, rate_per_s=8.0, longest=5000)
    setup = scenario(trace, model=WIDE_WINDOW, limits=Limits(64, 256))
    assert_same(run(setup), run(replace(setup, stepwise=True)))


def test_the_random_cases_hold_what_they_are_for(random_trace):
    """Preemption, refusal, prefix hits and every policy all bite, or the test above proves little."""
    plain = [run(random_scenario(random_trace, case, {})) for case in RANDOM]
    assert sum(result.calls.preemptions.sum() for result in plain) >= 15
    assert sum(result.kv["prefix_hit_token_share"] > 0.3 for result in plain) > 3
    assert sum(result.kv["idle_cached_byte_s"] > 0 for result in plain) > 5
    for changes in POLICIES:
        results = [run(random_scenario(random_trace, case, changes)) for case in RANDOM]
        differ = [
            one.calls.last_token_s.tobytes() != other.calls.last_token_s.tobytes()
            for one, other in zip(plain, results, strict=True)
        ]
        assert sum(differ) >= 2, changes
        retention = changes.get("retention", "lru")
        if retention in ("keep", "ttl:2.5"):
            assert any(result.kv["idle_held_byte_s"] > 0 for result in results)
        if retention == "swap":
            assert any(result.kv["host_byte_s"] > 0 for result in results)


def test_one_request_alone_by_hand():
    setup = scenario(calls_of((3.0, 5000, 4)))
    cost = setup.cost
    prefill = 0
    for tokens, history in ((2048, 0), (2048, 2048), (904, 4096)):
        last = history == 4096
        prefill += cost.base_fs(0, tokens, int(last)) + cost.chunk_fs(Chunk(tokens, history, last))
    decode = [cost.decode_fs(1, context, 0) for context in (5001, 5002, 5003)]
    calls = run(setup).calls
    start = 3 * FS_PER_S
    assert calls.scheduled_s[0] == start / FS_PER_S
    assert calls.first_token_s[0] == (start + prefill) / FS_PER_S
    assert calls.last_token_s[0] == (start + prefill + sum(decode)) / FS_PER_S


def test_two_requests_share_the_steps_by_hand():
    """The second arrives during the first one's prefill and waits for the end of the step."""
    setup = scenario(calls_of((0.0, 1000, 3), (0.001, 500, 2)))
    cost = setup.cost
    t1 = cost.base_fs(0, 1000, 1) + cost.chunk_fs(Chunk(1000, 0, True))
    t2 = t1 + cost.base_fs(1, 500, 1) + cost.kv_token_fs * 1001 + cost.chunk_fs(Chunk(500, 0, True))
    t3 = t2 + cost.decode_fs(2, 1002 + 501, 0)
    calls = run(setup).calls
    assert calls.scheduled_s.tolist() == [0.0, t1 / FS_PER_S]
    assert calls.first_token_s.tolist() == [t1 / FS_PER_S, t2 / FS_PER_S]
    assert calls.last_token_s.tolist() == [t3 / FS_PER_S, t3 / FS_PER_S]


def test_a_call_that_arrives_as_a_step_ends_is_in_the_next_one():
    """Also when its arrival was put on the clock after the end of the step was."""
    cost = scenario(calls_of((0.0, 1000, 3))).cost
    step_end = cost.base_fs(0, 1000, 1) + cost.chunk_fs(Chunk(1000, 0, True))
    calls = run(scenario(calls_of((0.0, 1000, 3), (0.001, 100, 2), (step_end / FS_PER_S, 100, 2)))).calls
    assert calls.scheduled_s.tolist() == [0.0, step_end / FS_PER_S, step_end / FS_PER_S]


def test_a_child_arrives_when_its_last_parent_has_ended_and_the_wait_is_over():
    trace = calls_of(
        (0.0, 100, 50), (0.0, 200, 100), (9.0, 300, 5), edges=[(2, 0, 7.0), (2, 1, 1.5)], sessions=[0, 0, 0]
    )
    calls = run(scenario(trace)).calls
    expected = max(calls.last_token_s[0] + 7.0, calls.last_token_s[1] + 1.5)
    assert calls.arrival_s[2] == pytest.approx(expected, abs=1e-12)
    assert calls.wait_before_s[2] == 7.0


def test_open_loop_replays_recorded_arrivals_of_children():
    trace = calls_of((0.0, 100, 50), (0.25, 300, 5), edges=[(1, 0, 7.0)], sessions=[0, 0])
    assert run(scenario(trace, load=Load(open_loop=True))).calls.arrival_s[1] == 0.25


def test_live_sessions_never_exceed_their_number(random_trace):
    trace = random_trace(200, 4, sessions=True)
    calls = run(scenario(trace, load=Load(live_sessions=3))).calls
    starts = np.array([calls.arrival_s[calls.session_id == s].min() for s in np.unique(calls.session_id)])
    ends = np.array([calls.last_token_s[calls.session_id == s].max() for s in np.unique(calls.session_id)])
    live = [int(((starts <= start) & (ends > start)).sum()) for start in starts]
    assert max(live) == 3


def test_rate_scale_moves_arrivals_and_not_waits():
    trace = calls_of((0.0, 10, 5), (10.0, 10, 5), (1.0, 10, 5), edges=[(2, 0, 4.0)], sessions=[0, 1, 0])
    calls = run(scenario(trace, load=Load(rate_scale=2.0))).calls
    assert calls.arrival_s[1] == 5.0
    assert calls.arrival_s[2] - calls.last_token_s[0] == pytest.approx(4.0, abs=1e-12)


def test_refusals_have_reasons_and_their_children_go_on():
    deep = 3000
    rows = [(0.0, 200_000, 10)] * deep + [(0.0, 100, 5), (0.0, 60_000, 5)]
    edges = [(call, call - 1, 0.0) for call in range(1, deep + 1)]
    setup = scenario(calls_of(*rows, edges=edges, sessions=[0] * (deep + 2)), kv_budget_bytes=2**30)
    result = run(setup)
    assert result.reject_reasons == {"longer_than_model_context": deep, "larger_than_kv_pool": 1}
    assert result.calls.outcome[deep] == OUTCOMES.index("completed")
    assert np.isnan(result.calls.scheduled_s[0])
    assert run(replace(setup, load=Load(live_sessions=1))).reject_reasons == result.reject_reasons
    assert result.calls.output_tokens[0] == 0


def test_a_tiny_pool_preempts_and_still_ends():
    trace = calls_of(*[(0.0, 900, 600) for _ in range(12)])
    result = run(scenario(trace, kv_budget_bytes=700 * 2**20))
    assert result.calls.preemptions.sum() > 0
    assert (result.calls.outcome == OUTCOMES.index("completed")).all()
    assert len(result.gap_s) > 0
    assert result.calls.prefilled_tokens.sum() > 12 * 900
    # the youngest goes first, the oldest never
    assert result.calls.preemptions[0] == 0


def test_unknown_waits_and_silent_calls_are_said():
    trace = calls_of((0.0, 10, 0), (0.0, 10, 5), edges=[(1, 0, float("nan"))], sessions=[0, 0])
    notes = " ".join(run(scenario(trace)).notes)
    assert "1 waits that the trace does not know" in notes
    assert "1 calls without output" in notes


def test_littles_law():
    rng = np.random.default_rng(2)
    rows = [
        (at, int(rng.integers(10, 3000)), int(rng.integers(1, 200)))
        for at in np.cumsum(rng.exponential(0.3, 500))
    ]
    calls = run(scenario(calls_of(*rows))).calls
    span_s = calls.last_token_s.max() - calls.arrival_s.min()
    events = np.sort(np.concatenate([calls.arrival_s, calls.last_token_s]))
    counts = np.searchsorted(np.sort(calls.arrival_s), events, "right") - np.searchsorted(
        np.sort(calls.last_token_s), events, "right"
    )
    mean_number = float((counts[:-1] * np.diff(events)).sum()) / span_s
    assert mean_number == pytest.approx((calls.last_token_s - calls.arrival_s).sum() / span_s, rel=1e-9)


def test_the_same_scenario_gives_the_same_bytes(random_trace):
    setup = scenario(random_trace(200, 5, sessions=True), "gaac", kv_budget_bytes=3 * 2**30)
    assert_same(run(setup), run(setup))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_batched_tokens": 128}, r"\(128\) must be at least --max-num-seqs \(256\)"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0"),
        ({"order": "lifo"}, "--scheduler must be fcfs, sessions-first or tenants:NAME,NAME,..., got 'lifo'"),
        ({"preemption": "kill"}, "--preemption must be one of recompute, swap, got 'kill'"),
        ({"max_queue": -1}, "--max-queue must be at least 0, got -1"),
        ({"queue_timeout_s": float("nan")}, "--queue-timeout must be a positive number"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(ConfigError, match=message):
        Limits(**limits)


def test_a_trace_without_a_clock_needs_live_sessions():
    trace = calls_of((0.0, 10, 5))
    clockless = replace(trace, meta=replace(trace.meta, clock="session"))
    with pytest.raises(ConfigError, match="give --concurrency N"):
        run(scenario(clockless))
    assert run(scenario(clockless, load=Load(live_sessions=1))).calls.outcome.tolist() == [0]
