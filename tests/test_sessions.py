"""When calls arrive: a call that follows another needs no arrival of its own, one that follows none does."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.codec.sizes import load_sizes
from kvfold.sim.errors import ConfigError
from kvfold.sim.gpu import load_gpu
from kvfold.sim.memory import kv_budget
from kvfold.sim.model import load_model
from kvfold.sim.scenario import Scenario, run
from kvfold.sim.sessions import Load
from kvfold.sim.step import step_cost
from kvfold.traces.calls import Calls


def session_of_two(first_s: float = 0.0):
    calls = Calls("made")
    for at in calls.reading(range(2)):
        calls.add(f"made:{at}", at, np.nan if at else first_s, 100, 5, session="a")
    calls.link(1, 0, 3.0, "tool", "recorded")
    return calls.trace("made", "s")


def scenario(trace, **load):
    spec, gpu, sizes = load_model("llama-3.1-8b"), load_gpu("h100"), load_sizes()["bf16"]
    return Scenario(
        trace=trace,
        cost=step_cost(spec, gpu, sizes, "w4a16"),
        budget=kv_budget(spec, gpu, sizes, weights="w4a16", kv_budget_bytes=20 * 2**30),
        max_context_tokens=131_072,
        load=Load(**load),
    )


def test_a_call_without_arrival_comes_its_wait_after_its_parent():
    calls = run(scenario(session_of_two())).calls
    assert calls.arrival_s[1] - calls.last_token_s[0] == pytest.approx(3.0)


def test_unknown_outputs_are_said_not_taken_in_silence():
    trace = session_of_two()
    unknown = replace(trace, output_tokens=np.array([5, -1]))
    assert "1 calls of unknown output were simulated with one token" in run(scenario(unknown)).notes
    assert not any("unknown output" in note for note in run(scenario(trace)).notes)


def test_open_loop_needs_the_arrival_of_every_call():
    with pytest.raises(ConfigError, match="every call that follows no other needs an arrival time"):
        run(scenario(session_of_two(), open_loop=True))


def test_a_first_call_needs_an_arrival():
    trace = session_of_two()
    unknown = replace(trace, arrival_time_s=np.full(2, np.nan))
    with pytest.raises(ConfigError, match="every call that follows no other"):
        run(scenario(unknown))
