"""Synthetic traces: the bundled file byte for byte, the stated quantiles, and the shape of its sessions."""

from pathlib import Path

import numpy as np
import pytest

from kvfold.traces import canonical, synth
from kvfold.traces.load import load
from kvfold.traces.prefix import chain_of
from kvfold.traces.stats import inspect
from kvfold.traces.table import WAIT_KINDS, Trace

SAMPLE = Path(__file__).resolve().parent.parent / "traces/data/sample.jsonl"


@pytest.fixture(scope="module")
def sample() -> Trace:
    return synth.sample(42)


def kind(name: str) -> int:
    return WAIT_KINDS.index(name)


def test_the_bundled_sample_is_what_the_generator_makes(tmp_path, sample):
    path = tmp_path / "sample.jsonl"
    canonical.write(sample, path)
    assert path.read_bytes() == SAMPLE.read_bytes()
    assert SAMPLE.stat().st_size <= 400_000


def test_a_seed_decides_everything():
    again, other = synth.sample(42), synth.sample(43)
    assert again.arrival_time_s.tolist() == synth.sample(42).arrival_time_s.tolist()
    assert again.arrival_time_s.tolist() != other.arrival_time_s.tolist()
    assert (
        synth.poisson(9, 8, 10, 5, 1).arrival_time_s == synth.poisson(9, 8, 10, 5, 1).arrival_time_s
    ).all()


def test_sessions_of_the_sample(sample):
    summary = inspect(load(SAMPLE))
    assert 120 <= summary["sessions"] <= 200
    assert 1_000 <= summary["rows_kept"] <= 1_500
    roots = sample.parent_request_id < 0
    assert int(roots.sum()) == summary["sessions"]
    assert 600 <= sample.arrival_time_s[roots].max() <= 1_200
    assert (sample.input_tokens + sample.output_tokens).max() <= 40_960
    assert sample.input_tokens.min() > 1_000
    assert sample.output_tokens.min() > 0


@pytest.mark.parametrize("seed", [42, 1, 2])
def test_calls_stand_after_what_they_need(seed):
    trace = synth.sample(seed)
    assert (np.diff(trace.arrival_time_s) >= 0).all()
    assert (trace.edge_parent < trace.edge_child).all()
    assert (trace.arrival_time_s[trace.edge_parent] < trace.arrival_time_s[trace.edge_child]).all()
    assert (trace.session_id[trace.edge_parent] == trace.session_id[trace.edge_child]).all()
    np.testing.assert_array_equal(
        trace.shared_blocks + trace.new_blocks, trace.input_tokens // synth.BLOCK_TOKENS
    )


def test_agents_fork_join_and_compact(sample):
    joins = np.flatnonzero(np.bincount(sample.edge_child, minlength=len(sample)) > 1)
    assert len(joins) >= 5
    assert (sample.wait_kind[joins] == kind("tool")).all()
    for child in joins:
        at = sample.edge_child == child
        assert (sample.edge_wait_kind[at] == kind("subagent")).all()
        assert sample.agent_id[sample.edge_parent[at]].tolist()[0] == 0
        assert min(sample.agent_id[sample.edge_parent[at]].tolist()[1:]) > 0
    chained = sample.parent_request_id >= 0
    shrunk = sample.input_tokens[chained] < sample.input_tokens[sample.parent_request_id[chained]]
    same_agent = sample.agent_id[chained] == sample.agent_id[sample.parent_request_id[chained]]
    assert int((shrunk & same_agent).sum()) >= 10


def test_system_prompts_are_shared_between_sessions(sample):
    roots = np.flatnonzero(sample.parent_request_id < 0)
    first_blocks = {int(chain_of(sample, int(row))[0]) for row in roots}
    assert len(first_blocks) == 2


@pytest.mark.parametrize(
    ("table", "quantiles"),
    [
        (synth.TOOL_WAIT_S, {0.05: 3, 0.25: 5, 0.5: 8, 0.75: 19, 0.9: 67, 0.95: 137, 0.99: 606}),
        (synth.HUMAN_WAIT_S, {0.25: 40, 0.5: 127, 0.75: 408, 0.9: 1541, 0.95: 3087, 0.99: 6854}),
        (synth.AGENT_OUTPUT_TOKENS, {0.5: 216, 0.9: 898, 0.99: 3686}),
        (synth.CHAT_OUTPUT_TOKENS, {0.5: 350, 0.9: 597, 0.99: 1119}),
    ],
)
def test_tables_hold_the_published_quantiles(table, quantiles):
    assert {share: value for share, value in table if share in quantiles} == quantiles


def test_the_tail_of_tool_waits_carries_most_of_the_time():
    """WEKA: mean 42.6 s, 11 % of the waits are longer than 60 s and carry 76 % of the time; human mean 614 s."""
    shares = (np.arange(200_000) + 0.5) / 200_000

    def values(table):
        known, knots = zip(*table, strict=True)
        return np.exp(np.interp(shares, known, np.log(knots)))

    tool = values(synth.TOOL_WAIT_S)
    assert tool.mean() == pytest.approx(42.6, rel=0.01)
    assert (tool > 60).mean() == pytest.approx(0.11, abs=0.005)
    assert tool[tool > 60].sum() / tool.sum() == pytest.approx(0.76, abs=0.01)
    assert values(synth.HUMAN_WAIT_S).mean() == pytest.approx(614, rel=0.01)


def test_kv_is_held_longer_for_tools_than_for_generation():
    """WEKA: token-seconds of context held while a tool runs are 3.4 times those held while generating."""
    held = generated = 0.0
    for seed in range(8):
        trace = synth.sample(seed)
        context = trace.input_tokens + trace.output_tokens
        generated += float((context * (2.5 + 0.02 * trace.output_tokens)).sum())
        tool = trace.wait_kind == kind("tool")
        held += float((context[trace.parent_request_id[tool]] * trace.wait_before_s[tool]).sum())
    assert held / generated == pytest.approx(3.4, abs=0.7)


def test_poisson_is_the_load_that_was_asked_for():
    trace = synth.poisson(10_000, 8.0, 1_000, 200, seed=42)
    assert (len(trace), set(trace.input_tokens.tolist()), set(trace.output_tokens.tolist())) == (
        10_000,
        {1_000},
        {200},
    )
    assert (trace.arrival_time_s > 0).all()
    # the 10,000th arrival of a Poisson stream is 1,250 s +- 12.5 s (one standard deviation)
    assert trace.arrival_time_s[-1] == pytest.approx(1_250, abs=50)


@pytest.mark.parametrize(
    "bad", [(0, 8.0, 10, 5), (5, 0.0, 10, 5), (5, float("inf"), 10, 5), (5, 8.0, 0, 5), (5, 8.0, 10, 0)]
)
def test_poisson_refuses_what_is_not_positive(bad):
    with pytest.raises(ValueError, match="must be positive"):
        synth.poisson(*bad, seed=1)
