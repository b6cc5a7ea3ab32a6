"""Calls on their way to a Trace: sorting, sessions, waits from the clock, and the sum of rows."""

from math import nan

import numpy as np
import pytest

from kvfold.traces.calls import Calls
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES


def filled(*stamps: float, ticks_per_s: int = 0, sessions=None, e2e_s=None) -> Calls:
    calls = Calls("log", ticks_per_s)
    for number, stamp in calls.reading(enumerate(stamps, 1)):
        at = number - 1
        calls.add(
            f"log:{number}",
            number,
            stamp,
            100 * number,
            number,
            session=sessions[at] if sessions else None,
            e2e_s=e2e_s[at] if e2e_s else nan,
        )
    return calls


def test_rows_are_sorted_stably_and_count_from_the_earliest():
    trace = filled(30.0, 10.0, 30.0, 20.0).trace("x", "s")
    assert trace.arrival_time_s.tolist() == [0, 10, 20, 20]
    assert trace.source_row.tolist() == [2, 4, 1, 3]
    assert trace.session_id.tolist() == [-1] * 4
    assert any("2 rows stood before an earlier one" in line for line in trace.meta.warnings)


def test_many_rows_of_one_instant_keep_the_order_of_the_file():
    trace = filled(*(float(at % 2) for at in range(1000))).trace("x", "s")
    assert trace.source_row.tolist() == [*range(1, 1000, 2), *range(2, 1001, 2)]


def test_an_epoch_in_nanoseconds_loses_none():
    epoch_ns = 1_760_587_678_577_028_123
    trace = filled(epoch_ns, epoch_ns + 1, ticks_per_s=10**9).trace("x", "ns")
    assert trace.arrival_time_s.tolist() == [0, 1e-9]


def test_a_second_file_may_begin_earlier_without_being_out_of_order():
    calls = Calls("logs")
    for name, stamp in calls.reading([("a", 5.0), ("a", 9.0), ("b", 1.0)]):
        calls.add(f"{name}:1", 1, stamp, 10, 1)
    assert not any("stood before" in line for line in calls.trace("x", "s").meta.warnings)


def test_sessions_follow_the_clock_not_the_file():
    calls = filled(20.0, 0.0, 5.0, 1.0, sessions=["a", "a", None, "b"])
    calls.follow_sessions("human")
    trace = calls.trace("x", "s")
    assert trace.session_id.tolist() == [0, 1, -1, 0]
    assert trace.turn_index.tolist() == [0, 0, 0, 1]
    assert trace.parent_request_id.tolist() == [-1, -1, -1, 0]
    assert (trace.edge_child.tolist(), trace.edge_parent.tolist()) == ([3], [0])


def test_a_wait_counts_from_the_end_of_the_parent_where_it_is_known():
    calls = filled(0.0, 10.0, 12.0, 20.0, sessions=["a"] * 4, e2e_s=[4.0, 5.0, nan, nan])
    calls.follow_sessions("tool")
    trace = calls.trace("x", "s")
    np.testing.assert_array_equal(trace.wait_before_s, [nan, 6, 0, 8])
    assert [WAIT_SOURCES[code] for code in trace.wait_source] == [
        "none",
        "end_to_start",
        "end_to_start",
        "start_to_start",
    ]
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "tool", "tool", "tool"]
    text = " ".join(trace.meta.warnings)
    assert "1 waits count from arrival to arrival" in text
    assert "1 calls arrive before the one they follow has ended" in text


def test_an_unknown_wait_is_not_zero():
    calls = filled(0.0, nan, 7.0, sessions=["a", "a", "b"])
    calls.link_by_clock(1, 0, "unknown")
    trace = calls.trace("x", "s")
    assert trace.source_row.tolist() == [1, 2, 3]  # after its parent
    assert np.isnan(trace.arrival_time_s[1])
    assert np.isnan(trace.edge_wait_s).tolist() == [True]
    assert WAIT_SOURCES[trace.wait_source[1]] == "none"


def test_joins_keep_all_parents_and_the_first_is_the_recorded_one():
    calls = filled(0.0, 1.0, 5.0)
    calls.link(2, 1, 2.0, "tool", "recorded")
    calls.link(2, 0, 0.5, "subagent", "recorded")
    trace = calls.trace("x", "s")
    assert (trace.edge_child.tolist(), trace.edge_parent.tolist()) == ([2, 2], [1, 0])
    assert trace.edge_wait_s.tolist() == [2.0, 0.5]
    assert (trace.parent_request_id[2], trace.wait_before_s[2]) == (1, 2.0)


def test_a_parent_that_arrives_later_is_left_out_and_counted():
    calls = filled(5.0, 9.0)
    calls.link(0, 1, 1.0, "tool", "recorded")
    trace = calls.trace("x", "s")
    assert (len(trace.edge_child), trace.parent_request_id.tolist()) == (0, [-1, -1])
    assert any("1 parents arrive after their child" in line for line in trace.meta.warnings)


def test_equal_ids_of_two_sessions_are_different_blocks_in_session_scope():
    calls = Calls("log")
    for at in calls.reading(range(4)):
        calls.add(f"log:{at}", at, float(at), 32, 1, session=at % 2, chain=[1, 2])
    shared = calls.trace("x", "s", block_tokens=16, hash_scope="session")
    assert shared.shared_parent.tolist() == [-1, -1, 0, 1]
    assert len(set(shared.block_ids.tolist())) == 4


def test_a_row_neither_kept_nor_dropped_fails_the_load():
    calls = filled(0.0)
    list(calls.reading(["forgotten"]))
    with pytest.raises(BadTraceError, match="rows_read must equal rows_kept"):
        calls.trace("x", "s")


def test_no_calls_is_an_error_that_says_where_they_went():
    calls = Calls("log")
    for _ in calls.reading(range(3)):
        calls.drop("failed")
    with pytest.raises(BadTraceError, match=r"got none .3 failed.") as caught:
        calls.trace("x", "s")
    assert caught.value.mend
