"""Sums of products beyond 64 bits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvfold.sim.exact import exact_dot

LARGE = st.integers(0, 2**62 - 1)


@given(st.lists(st.tuples(LARGE, LARGE), max_size=50))
def test_as_python_adds_them_up(rows):
    ones, others = (np.array([row[side] for row in rows], np.int64) for side in (0, 1))
    assert exact_dot(ones, others) == sum(one * other for one, other in rows)
