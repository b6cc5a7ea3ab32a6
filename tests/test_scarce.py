"""What a run was short of: one load for each answer."""

import pytest

from kvfold.analysis.metrics import makespan_s
from kvfold.analysis.scarce import _memory_text, scarcity
from kvfold.sim.scenario import run
from kvfold.sim.scheduler import Limits
from kvfold.sim.sessions import Load
from tests.test_engine import calls_of, scenario


@pytest.mark.parametrize(
    ("what", "rows", "changes"),
    [
        ("nothing", [(0.5 * call, 500, 50) for call in range(40)], {}),
        ("memory", [(0.001 * call, 2000, 300) for call in range(60)], {"kv_budget_bytes": 2 * 2**30}),
        ("slots", [(0.001 * call, 200, 300) for call in range(60)], {"limits": Limits(max_num_seqs=4)}),
        ("compute", [(0.001 * call, 4000, 5) for call in range(200)], {"kv_budget_bytes": 60 * 2**30}),
    ],
)
def test_what_is_scarce(what, rows, changes):
    setup = scenario(calls_of(*rows), **changes)
    result = run(setup)
    found = scarcity(result, setup.limits.max_num_seqs, 1, makespan_s(result.calls))
    assert found["what"] == what, found
    assert found["text"].startswith((what, f"{what} is", f"{what} are"))
    assert 0 < found["busy_share"] <= 1
    assert found["full_share"] + found["capped_share"] <= found["waiting_share"] + 1e-9


def test_what_was_cached_and_had_to_be_computed_again_is_memory_too(random_trace):
    trace = random_trace(150, 8, sessions=True, rate_per_s=20.0, longest=3000)
    setup = scenario(trace, kv_budget_bytes=2**30, load=Load(live_sessions=4))
    result = run(setup)
    found = scarcity(result, 256, 1, makespan_s(result.calls))
    assert found["computed_again_share"] > 0.02
    assert found["what"] == "memory"


def test_memory_is_scarce_for_waiting_calls_or_for_cached_prefixes():
    only_evicted = _memory_text({"full_share": 0.1, "computed_again_share": 7.3})
    assert only_evicted == (
        "memory is scarce: 7.3 % of all prompt tokens were computed again, evicted from the cache or preempted"
    )
    only_full = _memory_text({"full_share": 40.0, "computed_again_share": 1.0})
    assert only_full == "memory is scarce: calls wait for a full pool in 40 % of the busy time"
    both = _memory_text({"full_share": 40.0, "computed_again_share": 3.0})
    assert "40 % of the busy time and 3.0 % of all prompt tokens" in both


def test_a_run_in_which_nothing_ran():
    result = run(scenario(calls_of((0.0, 200_000, 5))))
    found = scarcity(result, 256, 1, 0.0)
    assert (found["what"], found["busy_share"]) == ("nothing", 0.0)
