"""Who goes first: priorities, ties in order of arrival, bounded retries, worst-case admission."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.sim.errors import ConfigError
from kvfold.sim.model import load_model
from kvfold.sim.run import OUTCOMES
from kvfold.sim.scenario import run
from kvfold.sim.scheduler import Limits
from kvfold.sim.waiting import Queue, Waiting, priorities_of
from tests.test_engine import SIZES, calls_of, scenario

PAGE_BYTES = 16 * load_model("llama-3.1-8b").kv_bytes_per_token()


def with_tenants(trace, *tenants):
    return replace(trace, tenant=list(tenants))


def test_the_queue_is_in_order_of_priority_then_arrival():
    rng = np.random.default_rng(1)
    calls = [Waiting(call, 1, 1, int(rng.integers(3)), rank=call) for call in range(200)]
    queue = Queue()
    for place in rng.permutation(200).tolist():
        queue.push(calls[place])
    assert queue.give_up(17) is calls[17]
    assert queue.give_up(17) is None
    expected = sorted(set(calls) - {calls[17]}, key=lambda each: (each.priority, each.rank))
    assert queue.in_order() == expected
    assert [queue.take() for _ in range(len(queue))] == expected


def test_a_call_that_was_preempted_is_not_given_up():
    queue = Queue()
    queue.push(Waiting(3, 1, 1, preemptions=1))
    assert queue.give_up(3) is None
    assert len(queue) == 1


def test_priorities():
    trace = calls_of(*[(0.0, 10, 5)] * 4, edges=[(1, 0, 0.0)], sessions=[0, 0, -1, -1])
    trace = with_tenants(trace, "a", "a", "b", "c")
    assert priorities_of("fcfs", trace) == [0, 0, 0, 0]
    assert priorities_of("sessions-first", trace) == [1, 0, 1, 1]
    assert priorities_of("tenants:b,a", trace) == [1, 1, 0, 2]


@pytest.mark.parametrize("order", ["", "lifo", "tenants", "tenants:", "tenants:a,,b", "fcfs:1"])
def test_bad_orders(order):
    with pytest.raises(ConfigError, match="--scheduler must be fcfs, sessions-first or tenants:NAME"):
        Limits(order=order)


def test_a_tenant_that_the_trace_does_not_know_is_no_order():
    trace = with_tenants(calls_of((0.0, 10, 5)), "gold")
    with pytest.raises(ConfigError, match="no call of tenant 'lead'; the trace has gold"):
        run(scenario(trace, limits=Limits(order="tenants:lead")))


@pytest.mark.parametrize(("order", "starts"), [("fcfs", [0, 1, 2, 3]), ("tenants:gold,silver", [0, 3, 2, 1])])
def test_lower_numbers_go_first_and_ties_as_they_came(order, starts):
    """One slot: the first call runs when the others come."""
    trace = calls_of((0.0, 500, 5), (0.001, 500, 5), (0.002, 500, 5), (0.003, 500, 5))
    trace = with_tenants(trace, "", "", "silver", "gold")
    result = run(scenario(trace, limits=Limits(max_num_seqs=1, order=order)))
    assert result.calls.scheduled_s.argsort().argsort().tolist() == [starts.index(call) for call in range(4)]


@pytest.mark.parametrize(("order", "preempted"), [("fcfs", 1), ("tenants:gold", 0)])
def test_the_lowest_priority_is_preempted_and_of_equals_the_youngest(order, preempted):
    """Ten pages for two calls of 64 + 40 tokens, which need seven each."""
    trace = with_tenants(calls_of((0.0, 64, 40), (0.0, 64, 40)), "", "gold")
    result = run(scenario(trace, kv_budget_bytes=10 * PAGE_BYTES, limits=Limits(order=order)))
    assert result.calls.preemptions.tolist() == [int(call == preempted) for call in range(2)]
    assert result.calls.last_token_s[preempted] == result.calls.last_token_s.max()


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_calls_are_given_up_after_so_many_preemptions_and_counted(most, preemption):
    trace = calls_of(*[(0.0, 900, 600) for _ in range(12)])
    limits = Limits(max_preemptions=most, preemption=preemption)
    setup = scenario(trace, kv_budget_bytes=700 * 2**20, limits=limits)
    result = run(setup)
    failed = result.calls.outcome == OUTCOMES.index("failed")
    assert result.fail_reasons == ({"preempted_too_often": int(failed.sum())} if failed.any() else {})
    assert (result.calls.preemptions[failed] == most + 1).all()
    assert (result.calls.preemptions[~failed] <= most).all()
    assert failed.any() == (most < 3)
    assert (result.calls.output_tokens[failed] == 0).all()
    without = run(replace(setup, limits=Limits(preemption=preemption)))
    assert not without.fail_reasons
    assert (without.calls.outcome == OUTCOMES.index("completed")).all()


@pytest.mark.parametrize("order", ["fcfs", "tenants:b,a", "sessions-first"])
@pytest.mark.parametrize("blocks", [17, 20, 33])
def test_a_pool_of_a_few_blocks_makes_progress_until_all_are_done(order, blocks):
    """No call is preempted for ever: the oldest of the highest priority always goes on, alone if need be."""
    rows = [(0.01 * call, 60 + 7 * call % 50, 80 + 11 * call % 70) for call in range(40)]
    trace = with_tenants(calls_of(*rows), *"abcab" * 8)
    result = run(scenario(trace, kv_budget_bytes=blocks * PAGE_BYTES, limits=Limits(order=order)))
    assert (result.calls.outcome == OUTCOMES.index("completed")).all()
    assert 0 < result.calls.preemptions.sum() < 40 * 40


def test_worst_case_admission_lets_in_what_would_fit_raw():
    """Calls of ten blocks, as large as seven raw ones, in a pool of 22: the third asks for ten and finds eight."""
    rows = [(0.0, 640, 30)] * 4
    trace, sizes = calls_of(*rows), SIZES["esc3"]
    setup = scenario(trace, "esc3")
    raw_bytes, tail_bytes = setup.units.raw_bytes, setup.budget.tail_bytes
    assert raw_bytes == 64 * load_model("llama-3.1-8b").kv_bytes_per_token()
    pool_bytes = 22 * raw_bytes + 4 * tail_bytes
    together = {}
    for worst_case in (False, True):
        limits = Limits(worst_case_admission=worst_case)
        result = run(scenario(trace, "esc3", kv_budget_bytes=pool_bytes, limits=limits))
        together[worst_case] = int((result.calls.scheduled_s == 0.0).sum())
        assert (result.calls.outcome == OUTCOMES.index("completed")).all()
    assert sizes.resident_bits / 16 == pytest.approx(0.7, abs=0.01)
    assert together == {False: 3, True: 2}


def test_what_could_never_fit_raw_is_refused_with_its_own_reason():
    trace = calls_of((0.0, 2000, 100), (0.0, 300, 100))
    raw_bytes = scenario(trace, "esc3").units.raw_bytes
    for worst_case, reasons in ((False, {}), (True, {"larger_than_kv_pool_if_raw": 1})):
        limits = Limits(worst_case_admission=worst_case)
        result = run(scenario(trace, "esc3", kv_budget_bytes=28 * raw_bytes, limits=limits))
        assert result.reject_reasons == reasons
