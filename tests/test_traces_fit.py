"""Generators fitted to real traces: what they give back, and what they say that they do not."""

import numpy as np
import pytest

from kvfold.traces import synth
from kvfold.traces.arrivals import Clients
from kvfold.traces.columns import KIND, assemble
from kvfold.traces.draws import Quantiles
from kvfold.traces.fit import compared, like
from kvfold.traces.fit_agents import agents_like
from kvfold.traces.load import load
from kvfold.traces.published import AGENT, AGENT_STARTS
from kvfold.traces.synth_agent import agents
from kvfold.traces.synth_chat import Requests, Size, chat
from kvfold.traces.table import Meta
from kvfold.traces.turns import infer_turns


def changes(pair):
    return {name: synthetic / real - 1 for name, real, synthetic in compared(pair) if real}


def check(found, names, within):
    assert {name: found[name] for name in names if not abs(found[name]) <= within} == {}


def marks(*names):
    return [f"{name} {mark}" for name in names for mark in ("p50", "p90", "p99", "mean")]


def test_like_azure(shared_data):
    pair = like(load(shared_data / "traces/azure-llm-2023/AzureLLMInferenceTrace_conv.csv"), 1)
    found = changes(pair)
    check(found, marks("input_tokens", "output_tokens"), 0.05)
    check(found, ["rows_kept", "rate_per_s"], 0.001)
    check(found, ["interarrival_cv"], 0.1)
    assert any("no prefix sharing" in note for note in pair.notes)
    assert any("windows of 1 s and 60 s, 1.39 and 20.6" in note for note in pair.notes)


def test_like_mooncake(shared_data):
    pair = like(load(shared_data / "traces/mooncake-fast25/conversation_trace.jsonl"), 1)
    found = changes(pair)
    check(found, marks("input_tokens", "output_tokens"), 0.1)
    check(found, ["prefix_hit_token_share", "interarrival_cv", "dispersion_1_s"], 0.1)
    assert pair.synthetic.meta.block_size_tokens == 512
    assert any("arrivals that share an instant were spread" in note for note in pair.notes)


def test_like_a_folder_of_weka_sessions(shared_data):
    pair = like(load(shared_data / "traces/weka-claude-code-traces/traces"), 1)
    found = changes(pair)
    assert found["sessions"] == 0
    # 38 sessions: two draws of that size differ by as much as this
    check(found, ["input_tokens p50", "output_tokens p50", "tool_wait_s p50", "calls_per_session p50"], 0.25)
    check(found, ["kv_occupancy tool 60_s", "kv_occupancy tool unlimited"], 0.35)
    assert any("no common clock" in note for note in pair.notes)
    assert any("sub-agents are left out" in note for note in pair.notes)


def test_like_inferred_sessions_of_mooncake(shared_data):
    trace, _ = infer_turns(load(shared_data / "traces/mooncake-fast25/conversation_trace.jsonl"))
    pair = like(trace, 1)
    found = changes(pair)
    check(found, ["sessions", "calls_per_session p99", "prefix_hit_token_share"], 0.05)
    check(found, marks("wait_s", "output_tokens"), 0.15)
    check(found, marks("input_tokens"), 0.2)
    assert any("where the real trace ends and cuts its sessions" in note for note in pair.notes)
    assert np.isnan(pair.synthetic.recorded_e2e_s).all()  # unknown in the real one


def test_sessions_whose_prompts_do_not_grow_are_single_requests(shared_data):
    pair = like(load(shared_data / "traces/ragpulse/0_trace.jsonl"), 1)
    check(changes(pair), marks("input_tokens", "output_tokens"), 0.05)
    assert (pair.synthetic.session_id < 0).all()
    assert any("do not hold the ones before" in note for note in pair.notes)


def test_shared_prefixes_come_back():
    size = Size(
        1.0, Quantiles(((0, 1_000), (1, 9_000))), Quantiles.constant(50), 0.5, Quantiles.constant(0.6)
    )
    real = chat(Requests((size,), 300, Quantiles.constant(20)), 3_000, Clients(5.0), 2)
    found = changes(like(real, 1))
    check(found, ["prefix_hit_token_share"], 0.15)
    check(found, marks("input_tokens", "output_tokens"), 0.05)


def test_prompts_that_start_anew_make_no_sessions():
    rows = 400
    columns = {
        "arrival_time_s": np.arange(rows) * 7.0,
        "input_tokens": np.full(rows, 3_000),
        "output_tokens": np.full(rows, 200),
        "session_id": np.arange(rows) // 4,
        "wait_before_s": np.where(np.arange(rows) % 4, 5.0, np.nan),
        "wait_kind": np.where(np.arange(rows) % 4, KIND["human"], KIND["none"]),
    }
    pair = like(assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns), 1)
    assert (pair.synthetic.session_id < 0).all()
    assert any("do not hold the ones before" in note for note in pair.notes)


def test_an_agent_model_fitted_to_its_own_trace_comes_back():
    model = agents_like(agents(AGENT, 600, AGENT_STARTS, 1))
    assert (model.first_token_s, model.token_s) == pytest.approx(
        (AGENT.first_token_s, AGENT.token_s), rel=1e-3
    )
    assert model.tool_steps.mean() == pytest.approx(AGENT.tool_steps.mean(), rel=0.15)
    assert model.first_steps.mean() == pytest.approx(AGENT.first_steps.mean(), rel=0.15)
    for share in (0.25, 0.5):
        assert model.limit_tokens.value(share) == pytest.approx(AGENT.limit_tokens.value(share), rel=0.1)
    human = next(each for each in model.returns if each.kind == "human")
    assert human.share == pytest.approx(0.907, abs=0.02)


def test_poisson_stays_poisson():
    pair = like(synth.poisson(20_000, 8.0, 1_000, 200, seed=3), 4)
    assert set(pair.synthetic.input_tokens.tolist()) == {1_000}
    assert set(pair.synthetic.output_tokens.tolist()) == {200}
    check(changes(pair), ["dispersion_1_s", "interarrival_cv"], 0.1)


def test_too_little_to_fit():
    meta = Meta("made", "made", "", "s", rows_read=1, rows_kept=1)
    one = assemble(meta, {"arrival_time_s": [0.0], "input_tokens": [5], "output_tokens": [5]})
    with pytest.raises(ValueError, match="at least two calls"):
        like(one, 1)
    meta = Meta("made", "made", "", "s", rows_read=2, rows_kept=2)
    columns = {"arrival_time_s": np.array([0.0, 4.0]), "input_tokens": [5, 6], "output_tokens": [5, -1]}
    pair = like(assemble(meta, columns), 1)
    assert pair.synthetic.output_tokens.tolist() == [5, 5]  # what is unknown is in no table
    assert any("1 calls of unknown output" in note for note in pair.notes)
    with pytest.raises(ValueError, match="no output tokens are known"):
        like(assemble(meta, columns | {"output_tokens": [-1, -1]}), 1)
    assert any("too short" in note for note in pair.notes)
