"""Replicas that step together: equal ranks are one rank, unequal ones pay the longest, and none runs ahead."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvfold.analysis.deployment import format_sizes
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.run import OUTCOMES
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.work import Work
from kvfold.traces.columns import assemble
from kvfold.traces.table import Meta

MODEL, GPU, BF16 = load_model("llama-3.1-8b"), load_gpu("rtx-4090"), format_sizes("bf16")
MS = 10**12  # femtoseconds
#: A step of one rank: 3 ms and 0.2 ms a token of its own; together: 0.1 ms a token of all ranks.
OWN_FS, TOKEN_FS, SHARED_FS = 3 * MS, MS // 5, MS // 10


def shared_fs(tokens):
    return SHARED_FS * tokens


@dataclass(frozen=True)
class RankCost:
    """A rank's step alone: as if the others had as many tokens."""

    ranks: int = 2
    model: object = MODEL
    gpu: object = GPU
    sizes: object = BF16
    tp: int = 1

    def work(self, decoding, chunks):
        tokens = decoding.count + sum(chunk.tokens for chunk in chunks)
        return Work(OWN_FS + TOKEN_FS * tokens + shared_fs(self.ranks * tokens), 0, None, "modelled")


def scenario_of(trace, replicas, together=True, **more):
    return Scenario(
        trace=trace,
        cost=RankCost(replicas if together else 2),
        budget=kv_budget(MODEL, GPU, BF16, num_gpu_blocks=400),
        max_context_tokens=9_000,
        limits=Limits(16, 512),
        replicas=replicas,
        async_scheduling=True,
        lockstep_fs=shared_fs if together else None,
        **more,
    )


def calls_of(arrivals, inputs, outputs, replicas=2, **more):
    rows = len(arrivals)
    columns = {"arrival_time_s": arrivals, "input_tokens": inputs, "output_tokens": outputs}
    trace = assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns)
    return run(scenario_of(trace, replicas, **more)).calls


def test_equal_ranks_are_one_rank():
    """Every call twice, to each rank once: the times of one engine alone."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.05, 40)).round(6)
    inputs, outputs = rng.integers(1, 300, 40), rng.integers(1, 60, 40)
    one = calls_of(arrivals, inputs, outputs, replicas=1, together=False)
    both = calls_of(*(np.repeat(each, 2) for each in (arrivals, inputs, outputs)), router="round-robin")
    for name in ("scheduled_s", "first_token_s", "last_token_s"):
        for rank in range(2):
            assert np.array_equal(getattr(both, name)[rank::2], getattr(one, name)), name


def test_both_ranks_pay_the_longest_and_what_all_tokens_cost():
    """Prompts of 100 and 10 tokens: 3 ms + 20 ms of the longer one, 11 ms for 110 tokens; then one token each."""
    calls = calls_of([0.0, 0.0], [100, 10], [2, 2])
    assert calls.first_token_s == pytest.approx([0.034, 0.034])
    assert calls.last_token_s == pytest.approx([0.0374, 0.0374])


def test_a_rank_without_work_adds_one_token():
    calls = calls_of([0.0], [100], [2])
    assert calls.first_token_s == pytest.approx([0.0231 + 0.01])
    assert calls.last_token_s - calls.first_token_s == pytest.approx([0.0034])


def test_a_call_to_a_rank_at_rest_waits_for_the_others_step():
    """The step from 0 to 33.1 ms has no room for the call of 5 ms, which then goes to the rank without work."""
    calls = calls_of([0.0, 0.005], [100, 10], [9, 1])
    assert calls.replica.tolist() == [0, 1]
    assert calls.scheduled_s[1] == pytest.approx(0.0331)
    apart = calls_of([0.0, 0.005], [100, 10], [9, 1], together=False)
    assert apart.scheduled_s[1] == pytest.approx(0.005)


def test_ranks_at_rest_start_again_with_the_next_call():
    calls = calls_of([0.0, 1.0], [100, 100], [1, 1])
    assert calls.scheduled_s.tolist() == [0.0, 1.0]
    assert calls.last_token_s - calls.arrival_s == pytest.approx([0.0331, 0.0331])


@pytest.mark.parametrize("seed", range(4))
def test_steps_begin_and_end_together_under_any_load(random_trace, seed):
    trace = random_trace(60, seed, sessions=seed % 2 == 0, longest=1500)
    found = run(scenario_of(trace, 3, router="fewest-calls"))
    steps = found.stretches
    order = np.argsort(steps.start_s, kind="stable")
    starts, lengths = steps.start_s[order], steps.first_step_fs[order] / 1e15
    together = np.diff(starts) < 1e-12
    assert together.any()
    assert (np.abs(np.diff(lengths)[together]) < 1e-12).all()
    assert (np.diff(starts)[~together] >= lengths[:-1][~together] - 1e-9).all()
    calls = found.calls
    done = calls.outcome == OUTCOMES.index("completed")
    assert (done | (calls.outcome == OUTCOMES.index("rejected"))).all()
    assert len(set(calls.replica[done].tolist())) == 3


def test_steps_put_together_late_are_not_modelled_in_groups(random_trace):
    with pytest.raises(ConfigError, match="step together"):
        Scenario(
            trace=random_trace(5, 0, sessions=False),
            cost=RankCost(),
            budget=kv_budget(MODEL, GPU, BF16),
            max_context_tokens=100,
            lockstep_fs=shared_fs,
        )
