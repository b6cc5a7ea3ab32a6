"""BurstGPT of all releases: named columns wherever they stand, failed requests by name, sessions of release 3."""

import io

import numpy as np
import pytest

from kvfold.traces import burstgpt
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES

FIRST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
THIRD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def read(header: str, *rows: str):
    return burstgpt.read(io.BytesIO("\n".join([header, *rows]).encode()), "b.csv")


def test_failed_requests_are_dropped_by_name():
    trace = read(
        FIRST,
        "5,ChatGPT,472,18,490,Conversation log",
        "6,GPT-4,0,0,0,API log",
        "7,GPT-4,9,0,9,API log",
        "8,GPT-4,0,3,3,API log",
        "9,GPT-4,10,5,15,API log",
    )
    assert trace.meta.drops == {"failed": 2, "zero_input_tokens": 1}
    assert (trace.meta.rows_read, len(trace)) == (5, 2)
    assert trace.input_tokens.tolist() == [472, 10]
    assert trace.model == ["ChatGPT", "GPT-4"]
    assert trace.tenant == ["Conversation log", "API log"]
    assert trace.session_id.tolist() == [-1, -1]


def test_two_inserted_columns_are_read_by_name_and_give_sessions():
    trace = read(
        THIRD,
        "100.0,s1,4,GPT-4,10,5,15,Conversation log",
        "103.0,,2,GPT-4,10,5,15,API log",
        "110.0,s1,3,GPT-4,30,5,35,Conversation log",
        "112.0,s1,3,GPT-4,30,5,35,Conversation log",
    )
    assert trace.session_id.tolist() == [0, -1, 0, 0]
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, np.nan, 6, 0])
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "none", "human", "human"]
    assert WAIT_SOURCES[trace.wait_source[2]] == "end_to_start"
    assert trace.recorded_e2e_s.tolist() == [4, 2, 3, 3]
    assert any("1 calls arrive before the one they follow has ended" in line for line in trace.meta.warnings)


def test_steps_of_one_second_look_made_up():
    """A copy of the data that circulates has 250 such rows; it is not BurstGPT."""
    trace = read(FIRST, *(f"{at}.000,m,{at + 1},5,{at + 6},log" for at in range(250)))
    assert any("99 % of the gaps are 1 s" in line for line in trace.meta.warnings)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("5,m,-1,2,1,log", "Request tokens.*expected int >= 0"),
        ("nan,m,1,2,3,log", "Timestamp"),
        (",m,1,2,3,log", "missing required field Timestamp"),
        ("5,m,1.5,2,3,log", "Request tokens"),
        ("5,m,1,2,3", "a row must have 6 cells"),
    ],
)
def test_a_bad_row_is_named(row, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(FIRST, "5,m,1,2,3,log", row)
    assert caught.value.place == "b.csv:3"


@pytest.mark.parametrize(
    ("name", "rows", "arrivals_s"),
    [("BurstGPT_1.head3", 3, [0, 40, 113]), ("BurstGPT_3.head4", 4, [0, 51, 82, 144])],
)
def test_the_real_heads(shared_data, name, rows, arrivals_s):
    trace = load(shared_data / f"traces/burstgpt-head/{name}.csv")
    assert (trace.meta.format, trace.meta.rows_read, len(trace)) == ("burstgpt", rows, rows)
    assert trace.arrival_time_s.tolist() == arrivals_s
    assert (len(set(trace.session_id.tolist())) == 4) == (rows == 4)
