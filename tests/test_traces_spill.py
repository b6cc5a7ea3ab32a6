"""More numbers than memory should hold: sorted, counted and cut at quantiles as NumPy would."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.traces import spill
from kvfold.traces.spill import Spill


@pytest.fixture(autouse=True)
def tiny_runs(monkeypatch):
    """Runs of 8 numbers, read 2 at a time, so that a short list goes through many of them."""
    monkeypatch.setattr(spill, "_RUN", 8)
    monkeypatch.setattr(spill, "_LEAST_PIECE", 2)


def filled(parts, kind):
    values = Spill(kind)
    for part in parts:
        values.add(np.array(part, kind))
    return values


_ints = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=20), max_size=12)
_floats = st.lists(st.lists(st.floats(allow_nan=False) | st.integers(0, 3), max_size=20), max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.one_of(
        _ints.map(lambda parts: (parts, np.int64)), _floats.map(lambda parts: (parts, np.float64))
    )
)
def test_numbers_come_out_sorted(parts):
    values = filled(*parts)
    pieces = [keys for keys, _ in values.pieces()]
    every = np.concatenate([np.empty(0, parts[1]), *(np.array(part, parts[1]) for part in parts[0])])
    np.testing.assert_array_equal(np.concatenate([np.empty(0, parts[1]), *pieces]), np.sort(every))
    assert values.count == every.size
    assert all(piece.size <= 8 * (1 + len(every) // 8) for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(0, 1e9), min_size=1, max_size=200), percents=st.lists(st.floats(0, 100)))
def test_quantiles_are_those_of_numpy(values, percents):
    found = filled([values], np.float64).quantiles(percents)
    np.testing.assert_array_equal(found, np.percentile(values, percents) if percents else [])


def test_nothing_has_no_quantiles():
    assert np.isnan(Spill(np.float64).quantiles([50])).all()


def test_the_first_of_equal_numbers_comes_first_with_what_it_carries():
    values = Spill(np.int64)
    keys = np.random.default_rng(1).integers(0, 5, 300)
    for at in range(0, 300, 10):
        values.add(keys[at : at + 10], np.arange(at, at + 10))
    first: dict[int, int] = {}
    carried = []
    for piece, number in values.pieces():
        carried += number.tolist()
        for key, at in zip(piece.tolist(), number.tolist(), strict=True):
            first.setdefault(key, at)
    assert first == {key: int(np.flatnonzero(keys == key)[0]) for key in range(5)}
    assert sorted(carried) == list(range(300))
