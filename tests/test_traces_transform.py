"""Changes to a trace: each by hand, what it leaves alone, and the line that says what it did."""

from dataclasses import replace

import numpy as np
import pytest

from kvfold.traces.arrivals import Clients
from kvfold.traces.columns import KIND, Edges, assemble
from kvfold.traces.prefix import prefix_hit_token_share
from kvfold.traces.published import AGENT
from kvfold.traces.synth_agent import agents
from kvfold.traces.table import Meta
from kvfold.traces.transform import (
    cap_idle,
    first_of_equal_sessions,
    has_coarse_clock,
    keep_matching,
    keep_sessions,
    sample_sessions,
    scale_rate,
    spread_ticks,
    window,
)
from tests.archives import weka


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


def sessions_of(arrival_s, waits_s, service_s=1.0):
    """One session: calls that each follow the one before after a wait."""
    rows = len(arrival_s)
    edges = Edges()
    for row in range(1, rows):
        edges.add(row, row - 1, waits_s[row], KIND["human"])
    columns = {
        "arrival_time_s": arrival_s,
        "input_tokens": np.arange(1, rows + 1),
        "output_tokens": [5] * rows,
        "session_id": [0] * rows,
        "parent_request_id": np.arange(-1, rows - 1),
        "wait_before_s": waits_s,
        "wait_kind": [KIND["human"]] * rows,
        "recorded_e2e_s": [service_s] * rows,
        "model": ["small" if row % 2 else "large" for row in range(rows)],
    }
    return assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns, edges)


def test_dropping_sessions_keeps_the_others_whole(random_trace):
    trace = random_trace(200, 3, sessions=True)
    own = np.unique(trace.session_id)[::2].tolist()
    rows = np.flatnonzero(np.isin(trace.session_id, own))
    kept, text = keep_sessions(trace, own)
    assert f"{len(own)} sessions: kept {len(rows):,} calls, dropped {200 - len(rows)}" == text
    assert kept.meta.rows_read == kept.meta.rows_kept + sum(kept.meta.drops.values())
    assert kept.input_tokens.tolist() == trace.input_tokens[rows].tolist()
    again, _ = keep_sessions(kept, own[::2])
    assert again.meta.drops["session_not_kept"] == len(trace) - len(again)


def test_a_sample_of_sessions_is_seeded_and_of_the_size_asked_for(random_trace):
    trace = random_trace(200, 3, sessions=True)
    kept, text = sample_sessions(trace, 7, 1)
    assert len(np.unique(kept.session_id)) == 7
    assert "7 of" in text
    assert "sessions at random (seed 1)" in text
    assert sample_sessions(trace, 7, 1)[0].input_tokens.tolist() == kept.input_tokens.tolist()
    assert sample_sessions(trace, 7, 2)[0].input_tokens.tolist() != kept.input_tokens.tolist()
    single = made(np.arange(50.0))
    assert len(sample_sessions(single, 9, 1)[0]) == 9
    for count in (0, 51):
        with pytest.raises(ValueError, match="must be 1 to 50"):
            sample_sessions(single, count, 1)


def test_a_window_cuts_and_starts_the_clock():
    trace = sessions_of([0.0, 10.0, 20.0, 30.0], [np.nan, 9.0, 9.0, 9.0])
    kept, text = window(trace, 10.0, 30.0)
    assert kept.arrival_time_s.tolist() == [0, 10]
    assert kept.parent_request_id.tolist() == [-1, 0]
    assert kept.meta.drops == {"outside_window": 2}
    assert text.startswith("arrivals from 10 s to 30 s: kept 2 calls, dropped 2; 1 calls lost the call")
    with pytest.raises(ValueError, match="no call is left"):
        window(trace, 50.0, 60.0)


def test_twice_the_rate_is_twice_as_many_a_second():
    trace = made(np.arange(1.0, 101.0))
    fast, text = scale_rate(trace, 2.0)
    assert fast.arrival_time_s.tolist() == (1 + np.arange(100) / 2).tolist()
    assert "2 times as fast (2 is twice as many a second): 1.01 requests/s become 2.02" in text
    slow, _ = scale_rate(fast, 0.5)
    np.testing.assert_allclose(slow.arrival_time_s, trace.arrival_time_s)
    with pytest.raises(ValueError, match="must be positive"):
        scale_rate(trace, 0.0)


def test_waits_change_only_where_asked():
    trace = sessions_of([5.0, 16.0, 27.0], [np.nan, 10.0, 10.0])
    same, text = scale_rate(trace, 2.0)
    assert same.wait_before_s.tolist()[1:] == [10, 10]
    assert same.arrival_time_s.tolist() == [
        5,
        16,
        27,
    ]  # one session: only its start could move, and it is first
    assert "waits are unchanged" in text
    short, text = scale_rate(trace, 2.0, waits=True)
    assert short.edge_wait_s.tolist() == [5, 5]
    assert short.arrival_time_s.tolist() == [5, 11, 17]
    assert "waits are 0.5 times as long" in text


def test_rows_are_in_order_after_sessions_moved(random_trace):
    trace = random_trace(300, 8, sessions=True)
    fast, _ = scale_rate(trace, 10.0)
    assert (np.diff(fast.arrival_time_s) >= 0).all()
    assert (fast.edge_parent < fast.edge_child).all()
    assert sorted(fast.input_tokens.tolist()) == sorted(trace.input_tokens.tolist())
    assert prefix_hit_token_share(fast) == pytest.approx(prefix_hit_token_share(trace))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_calls_still_stand_after_what_they_join(factor, waits):
    trace = agents(AGENT, 150, Clients(1 / 30), 6)
    assert (np.bincount(trace.edge_child) > 1).any()
    fast, _ = scale_rate(trace, factor, waits=waits)
    assert (fast.edge_parent < fast.edge_child).all()
    ends = fast.arrival_time_s + fast.recorded_e2e_s
    gaps = fast.arrival_time_s[fast.edge_child] - ends[fast.edge_parent]
    assert (gaps >= fast.edge_wait_s - 0.01).all()
    alone = np.bincount(fast.edge_child, minlength=len(fast))[fast.edge_child] == 1
    np.testing.assert_allclose(gaps[alone], fast.edge_wait_s[alone], atol=0.01)
    child = np.flatnonzero(fast.parent_request_id >= 0)
    waited = fast.arrival_time_s[child] - ends[fast.parent_request_id[child]]
    np.testing.assert_allclose(fast.wait_before_s[child], waited, atol=0.01)
    roots = np.sort(trace.arrival_time_s[trace.parent_request_id < 0])
    np.testing.assert_allclose(
        np.sort(fast.arrival_time_s[fast.parent_request_id < 0]), roots[0] + (roots - roots[0]) / factor
    )


def test_idle_time_is_cut_only_where_all_are_idle():
    # the session waits 98 s; a single call arrives 40 s into its wait, served for 1 s: 39 and 59 s are idle
    session = sessions_of([0.0, 99.0], [np.nan, 98.0])
    columns = {
        "arrival_time_s": [0.0, 40.0, 99.0],
        "input_tokens": [1, 1, 1],
        "output_tokens": [1, 1, 1],
        "session_id": [0, -1, 0],
        "parent_request_id": [-1, -1, 0],
        "wait_before_s": [np.nan, np.nan, 98.0],
        "wait_kind": [0, 0, KIND["human"]],
        "recorded_e2e_s": [1.0, 1.0, 1.0],
    }
    edges = Edges()
    edges.add(2, 0, 98.0, KIND["human"])
    trace = assemble(
        session.meta.__class__("made", "made", "", "s", rows_read=3, rows_kept=3), columns, edges
    )
    capped, text = cap_idle(trace, 10.0)
    assert capped.arrival_time_s.tolist() == [0, 40 - 29, 99 - 29 - 48]
    assert capped.wait_before_s.tolist()[2] == capped.edge_wait_s.tolist()[0] == 98 - 29 - 48
    assert text == (
        "2 idle stretches of more than 10 s cut to it: 77 s of 99 s removed, 77 s from 1 waits that last over them"
    )
    whole, text = cap_idle(trace, 1_000.0)
    assert whole.arrival_time_s.tolist() == trace.arrival_time_s.tolist()
    assert text.startswith("0 idle stretches")


def test_a_wait_says_until_when_the_call_before_it_was_served():
    # no service is recorded, but the wait of 50 s began at 50 s: only that half of the gap is idle
    trace = sessions_of([0.0, 100.0], [np.nan, 50.0], service_s=np.nan)
    capped, text = cap_idle(trace, 10.0)
    assert capped.arrival_time_s.tolist() == [0, 60]
    assert capped.wait_before_s.tolist()[1] == capped.edge_wait_s.tolist()[0] == 10
    assert text.startswith("1 idle stretches of more than 10 s cut to it: 40 s of 100 s removed")


def test_capped_sessions_still_wait_from_end_to_arrival():
    trace = agents(AGENT, 12, Clients(1 / 600), 3)
    capped, _ = cap_idle(trace, 30.0)
    assert (np.diff(capped.arrival_time_s) >= 0).all()
    child = np.flatnonzero(capped.parent_request_id >= 0)
    parent = capped.parent_request_id[child]
    ends = (capped.arrival_time_s + capped.recorded_e2e_s)[parent]
    np.testing.assert_allclose(capped.arrival_time_s[child] - capped.wait_before_s[child], ends, atol=0.01)
    assert np.nanmin(capped.wait_before_s) >= 0
    busy = np.maximum.accumulate(capped.arrival_time_s + capped.recorded_e2e_s)
    assert (capped.arrival_time_s[1:] - busy[:-1]).max() <= 30.01
    assert capped.arrival_time_s[-1] < trace.arrival_time_s[-1] / 2
    _, text = cap_idle(capped, 30.01)
    assert text.startswith("0 idle stretches")


def test_no_wait_changes_while_others_work():
    """A call every 5 s: nothing is idle for 10 s, so a wait of 500 s stays, whatever the cap per session."""
    arrival_s = np.arange(0.0, 1_000.0, 5.0)
    waits = np.full(200, np.nan)
    waits[-1] = 500.0
    columns = {"arrival_time_s": arrival_s, "input_tokens": np.ones(200), "wait_before_s": waits}
    trace = assemble(Meta("made", "made", "", "s", rows_read=200, rows_kept=200), columns)
    capped, _ = cap_idle(trace, 10.0)
    np.testing.assert_array_equal(capped.wait_before_s, waits)
    np.testing.assert_array_equal(capped.arrival_time_s, arrival_s)


def test_filters_by_name_and_range():
    trace = sessions_of([0.0, 10.0, 20.0, 30.0], [np.nan, 9.0, 9.0, 9.0])
    kept, text = keep_matching(trace, model=["small"])
    assert kept.model == ["small", "small"]
    assert text.startswith("model small: kept 2 calls, dropped 2")
    assert keep_matching(trace, input_tokens=(2, 3))[0].input_tokens.tolist() == [2, 3]
    assert keep_matching(trace, output_tokens=(5, 5), input_tokens=(4, 99))[0].input_tokens.tolist() == [4]
    assert len(keep_matching(trace, session=[0])[0]) == 4
    with pytest.raises(ValueError, match="session must be in the trace, got 7; it has 0"):
        keep_matching(trace, session=[7])
    with pytest.raises(ValueError, match="model must be in the trace, got 'tiny'; it has large, small"):
        keep_matching(trace, model=["tiny"])


def test_clocks_of_sessions_have_no_window_rate_or_idle_time():
    trace = sessions_of([0.0, 10.0], [np.nan, 9.0])
    trace = replace(trace, meta=replace(trace.meta, clock="session"))
    for change in (lambda: window(trace, 0, 5), lambda: scale_rate(trace, 2), lambda: cap_idle(trace, 5)):
        with pytest.raises(ValueError, match="needs a clock common to all sessions"):
            change()


def test_the_repeats_of_the_weka_archive_are_18(shared_data):
    trace = weka(shared_data)
    own = first_of_equal_sessions(trace)
    assert len(own) == 710 - 18
    kept, _ = keep_sessions(trace, own)
    assert len(np.unique(kept.session_id)) == 692
    assert prefix_hit_token_share(kept) == pytest.approx(0.963, abs=0.002)
    # chains still lead to the same number of blocks
    whole = (trace.shared_blocks + trace.new_blocks)[np.isin(trace.session_id, own)]
    assert np.array_equal(kept.shared_blocks + kept.new_blocks, whole)
