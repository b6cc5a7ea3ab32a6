"""Scheduling a step ahead: what a step does not know yet, by hand and by law."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvfold.analysis.deployment import format_sizes
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.retention import parse_retention
from kvfold.sim.run import OUTCOMES
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.scheduler import Limits
from kvfold.sim.step import step_cost
from kvfold.sim.work import Work
from kvfold.traces.columns import assemble
from kvfold.traces.table import Meta

MODEL, GPU, BF16 = load_model("llama-3.1-8b"), load_gpu("rtx-4090"), format_sizes("bf16")
STEP_S = 0.01


@dataclass(frozen=True)
class FlatCost:
    """Every step takes 10 ms."""

    model: object = MODEL
    gpu: object = GPU
    sizes: object = BF16
    tp: int = 1

    def work(self, decoding, chunks):
        return Work(10**13, 0, None, "modelled")


def calls_of(arrivals, inputs, outputs, ahead=True, seqs=8, blocks=1000):
    rows = len(arrivals)
    columns = {"arrival_time_s": arrivals, "input_tokens": inputs, "output_tokens": outputs}
    trace = assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns)
    return run(
        Scenario(
            trace=trace,
            cost=FlatCost(),
            budget=kv_budget(MODEL, GPU, BF16, num_gpu_blocks=blocks),
            max_context_tokens=10_000,
            limits=Limits(seqs, 2048),
            async_scheduling=ahead,
        )
    ).calls


def test_a_call_to_an_engine_at_rest_starts_at_once():
    calls = calls_of([0.0, 1.0], [10, 10], [3, 3])
    assert calls.scheduled_s.tolist() == [0.0, 1.0]
    assert calls.last_token_s == pytest.approx([0.03, 1.03])


def test_a_call_that_arrives_while_a_step_runs_misses_the_next_one():
    """The step from 10 to 20 ms was put together before the call came at 5 ms."""
    calls = calls_of([0.0, 0.005], [10, 10], [9, 1])
    assert calls.scheduled_s[1] == pytest.approx(0.02)
    assert calls.first_token_s[1] == pytest.approx(0.03)
    at_once = calls_of([0.0, 0.005], [10, 10], [9, 1], ahead=False)
    assert at_once.first_token_s[1] == pytest.approx(0.02)


def test_room_of_an_ended_call_is_seen_a_step_later():
    """One slot is free at 20 ms; the step that begins then was put together without it."""
    calls = calls_of([0.0, 0.0, 0.0], [10, 10, 10], [2, 9, 1], seqs=2)
    assert calls.last_token_s[0] == pytest.approx(0.02)
    assert calls.scheduled_s[2] == pytest.approx(0.03)
    at_once = calls_of([0.0, 0.0, 0.0], [10, 10, 10], [2, 9, 1], seqs=2, ahead=False)
    assert at_once.scheduled_s[2] == pytest.approx(0.02)


def test_an_ended_call_is_not_preempted():
    """At 20 ms the youngest call is over, its page not yet free, and the second one needs a page: it has to go."""
    calls = calls_of([0.0] * 3, [16, 15, 15], [20, 20, 2], blocks=4)
    assert calls.preemptions.tolist() == [
        0,
        2,
        0,
    ]  # once at 20 ms, once when the first call needs a third page
    assert calls.last_token_s[2] == pytest.approx(0.02)
    assert (calls.outcome == OUTCOMES.index("completed")).all()


@pytest.mark.parametrize("seed", range(6))
def test_every_call_of_a_random_load_ends_in_a_small_pool(random_trace, seed):
    trace = random_trace(80, seed, sessions=seed % 2 == 0, longest=1500)
    found = run(
        Scenario(
            trace=trace,
            cost=step_cost(MODEL, GPU, BF16),
            budget=kv_budget(MODEL, GPU, BF16, num_gpu_blocks=600),
            max_context_tokens=9_000,
            limits=Limits(16, 512),
            async_scheduling=True,
        )
    )
    calls = found.calls
    done = calls.outcome == OUTCOMES.index("completed")
    assert (done | (calls.outcome == OUTCOMES.index("rejected"))).all()
    assert done.any()
    assert (calls.arrival_s <= calls.scheduled_s)[done].all()
    assert (calls.scheduled_s < calls.first_token_s)[done].all()
    assert found.stretches.used_bytes.max() <= 600 * 16 * MODEL.kv_bytes_per_token()
    assert np.all(found.stretches.steps == 1)


def test_retention_is_not_modelled_with_it(random_trace):
    with pytest.raises(ConfigError, match="asynchronous"):
        Scenario(
            trace=random_trace(5, 0, sessions=True),
            cost=FlatCost(),
            budget=kv_budget(MODEL, GPU, BF16),
            max_context_tokens=100,
            retention=parse_retention("keep"),
            async_scheduling=True,
        )
