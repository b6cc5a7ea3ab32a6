"""Spreading a coarse clock keeps the order, the ticks and every other column."""

import numpy as np

from kvfold.traces.columns import assemble
from kvfold.traces.table import Meta
from kvfold.traces.transform import has_coarse_clock, spread_ticks


def made(arrival_s):
    rows = len(arrival_s)
    columns = {
        "arrival_time_s": arrival_s,
        "input_tokens": np.arange(1, rows + 1),
        "output_tokens": [5] * rows,
    }
    return assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns)


def test_arrivals_stay_in_their_tick_and_in_order():
    arrival_s = np.repeat(np.arange(0.0, 300.0, 3.0), 7)
    trace = made(arrival_s)
    assert has_coarse_clock(trace)
    spread, text = spread_ticks(trace, 4)
    assert "700 arrivals" in text
    assert (np.diff(spread.arrival_time_s) >= 0).all()
    assert (np.floor(spread.arrival_time_s / 3) * 3 == arrival_s).all()
    assert len(np.unique(spread.arrival_time_s)) == 700
    assert spread.input_tokens is trace.input_tokens
    offsets = (spread.arrival_time_s - arrival_s) / 3
    # uniform on [0, 1): mean 1/2, standard error 1 / sqrt(12 n)
    assert abs(offsets.mean() - 0.5) < 4 / np.sqrt(12 * 700)
    assert np.array_equal(spread_ticks(trace, 4)[0].arrival_time_s, spread.arrival_time_s)
    assert not np.array_equal(spread_ticks(trace, 5)[0].arrival_time_s, spread.arrival_time_s)


def test_a_fine_clock_is_not_coarse_and_lone_arrivals_stay():
    trace = made(np.arange(0.0, 200.0))
    assert not has_coarse_clock(trace)
    assert np.array_equal(spread_ticks(trace, 1)[0].arrival_time_s, trace.arrival_time_s)
