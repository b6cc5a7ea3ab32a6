"""The searches find the edge of a known attainment curve, within their replays and bracket."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from kvfold.analysis.search import (
    ATTAINMENT,
    BRACKET,
    MAX_REPLAYS,
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


@pytest.mark.parametrize("edge", [0.31, 0.99, 1.0, 1.7, 3.14, 9.9])
def test_highest_load_brackets_the_edge(edge):
    found = highest_load(served_up_to(edge), 1.0, ATTAINMENT, whole=False)
    assert found.best.load <= edge < found.failed_load
    assert len(found.tried) <= MAX_REPLAYS
    assert found.failed_load / found.best.load <= BRACKET or len(found.tried) == MAX_REPLAYS


@pytest.mark.parametrize("edge", [1, 2, 5, 24, 100])
def test_live_sessions_are_whole_numbers(edge):
    seen = []
    found = highest_load(served_up_to(edge, seen), 16, ATTAINMENT, whole=True)
    assert all(load == int(load) >= 1 for load in seen)
    assert len(set(seen)) == len(seen) <= MAX_REPLAYS
    assert found.best.load <= edge
    assert found.best.load == edge or found.failed_load - found.best.load <= math.ceil(0.03 * edge) + 1


def test_a_trace_with_too_little_work_is_said():
    """Above 4 x the replay takes as long as its sessions, whatever the load."""

    def replay(load):
        return Outcome(load, SimpleNamespace(calls=calls_lasting(max(1000 / load, 250))), 1.0)

    found = highest_load(replay, 1.0, ATTAINMENT, whole=False)
    assert found.exhausted
    assert not found.is_limit
    assert found.best.load == 4
    assert [outcome.load for outcome in found.tried] == [1, 2, 4, 8]


def test_nothing_served_is_said():
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
