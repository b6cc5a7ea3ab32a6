"""The searches find the edge of a known attainment curve, within their replays and bracket."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from kvfold.analysis.search import (
    ATTAINMENT,
    BRACKET,
    LOWEST,
    NEAR,
    Outcome,
    highest_load,
    largest_power_of_two,
)


def calls_lasting(seconds):
    return SimpleNamespace(arrival_s=np.array([0.0, np.nan]), last_token_s=np.array([seconds, np.nan]))


def served_up_to(edge, seen=None):
    def replay(load):
        if seen is not None:
            seen.append(load)
        return Outcome(load, SimpleNamespace(calls=calls_lasting(1000 / load)), 1.0 if load <= edge else 0.5)

    return replay


@pytest.mark.parametrize("edge", [0.0003, 0.01, 0.31, 0.99, 1.0, 1.7, 3.14, 9.9, 300.0])
def test_highest_load_brackets_the_edge(edge):
    found = highest_load(served_up_to(edge), 1.0, ATTAINMENT, whole=False)
    assert found.best.load <= edge < found.failed_load
    assert 0 < found.resolution <= BRACKET - 1
    assert found.failed.load == found.failed_load
    assert len(found.tried) <= 7 + abs(math.log2(edge))


@pytest.mark.parametrize("edge", [0.5, 0.9, 1.0, 1.02, 1.1, 1.25, 2.5])
def test_a_search_that_starts_near_needs_few_replays(edge):
    """Two for the same edge; strides grow, so a far one is found as well."""
    found = highest_load(served_up_to(edge), 1.0, ATTAINMENT, whole=False, stride=NEAR)
    assert found.best.load <= edge < found.failed_load <= BRACKET * found.best.load
    assert len(found.tried) <= 2 + 3 * abs(math.log2(abs(edge - 1) / 0.029 + 1))


@pytest.mark.parametrize("stride", [NEAR, 2.0])
@pytest.mark.parametrize("edge", [1, 2, 5, 24, 100])
def test_live_sessions_are_whole_numbers(edge, stride):
    seen = []
    found = highest_load(served_up_to(edge, seen), 16, ATTAINMENT, whole=True, stride=stride)
    assert all(load == int(load) >= 1 for load in seen)
    assert len(set(seen)) == len(seen)
    assert found.best.load <= edge < found.failed_load
    assert found.failed_load - found.best.load <= max(1, 0.03 * edge)


def test_a_trace_with_too_little_work_is_said():
    """Above 4 x the replay takes as long as its sessions, whatever the load."""

    def replay(load):
        return Outcome(load, SimpleNamespace(calls=calls_lasting(max(1000 / load, 250))), 1.0)

    found = highest_load(replay, 1.0, ATTAINMENT, whole=False)
    assert found.exhausted
    assert not found.is_limit
    assert found.best.load == 4
    assert [outcome.load for outcome in found.tried] == [1, 2, 4, 8]


@pytest.mark.parametrize("start", [1.0, 4.0])
def test_short_strides_alone_exhaust_no_trace(start):
    """3 % more load shortens a replay by less than 3 % long before the trace is exhausted."""

    def replay(load):
        return Outcome(load, SimpleNamespace(calls=calls_lasting(1000 / load + 100)), float(load <= 10))

    found = highest_load(replay, start, ATTAINMENT, whole=False, stride=NEAR)
    assert not found.exhausted
    assert found.best.load <= 10 < found.failed_load


def test_a_trace_of_which_nothing_runs_is_exhausted():
    def replay(load):
        return Outcome(load, SimpleNamespace(calls=calls_lasting(np.nan)), 1.0)

    assert highest_load(replay, 1.0, ATTAINMENT, whole=False).exhausted


def test_nothing_served_is_said():
    found = highest_load(served_up_to(0), 1.0, ATTAINMENT, whole=False)
    assert found.best is None
    assert found.lowest.load == LOWEST == found.failed_load
    assert math.isnan(found.resolution)
    assert highest_load(served_up_to(0), 4, ATTAINMENT, whole=True).best is None
    assert largest_power_of_two(served_up_to(0), 4, ATTAINMENT, 100).best is None


@pytest.mark.parametrize(
    ("edge", "most", "expected"), [(70, 1000, 64), (64, 1000, 64), (3, 1000, 2), (1e9, 100, 64)]
)
@pytest.mark.parametrize("start", [1, 16, 512])
def test_largest_power_of_two(edge, most, expected, start):
    found = largest_power_of_two(served_up_to(edge), start, ATTAINMENT, most)
    assert found.best.load == expected
    assert (found.failed_load is None) == (2 * expected > most and edge >= expected)
