"""Azure CSV: exact stamps of both years, and the faults that such files have."""

import io

import numpy as np
import pytest

from kvfold.traces import azure
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def read(*rows: str, end: str = "\r\n", last: str = ""):
    return azure.read(io.BytesIO((end.join([HEADER, *rows]) + last).encode()), "a.csv")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n"])
def test_the_last_row_survives_whatever_the_line_ends(end, last):
    trace = read(
        "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8", end=end, last=last
    )
    assert trace.input_tokens.tolist() == [4808, 3180]
    assert trace.output_tokens.tolist() == [10, 8]
    assert trace.source_row.tolist() == [2, 3]


def test_seven_digits_are_exact_to_100_ns():
    trace = read("2023-11-16 23:59:59.9999999,1,1", "2023-11-17 00:00:00.0000001,1,1")
    assert trace.arrival_time_s.tolist() == [0.0, 2e-7]
    assert (trace.meta.time_unit, trace.meta.time_zone) == ("100 ns", "")


def test_the_2024_form_has_an_offset_and_six_digits():
    trace = read("2024-05-10 02:00:00.000001+02:00,1,1", "2024-05-10 00:00:00.009930+00:00,1,1")
    np.testing.assert_allclose(trace.arrival_time_s, [0, 0.009929], atol=1e-12)
    assert (trace.meta.time_unit, trace.meta.time_zone) == ("us", "UTC")


@pytest.mark.parametrize("night", ["2023-03-12", "2023-10-29", "2023-03-26"])
def test_no_daylight_rule_moves_naive_stamps(night, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    trace = read(f"{night} 01:30:00.0000000,1,1", f"{night} 03:30:00.0000000,1,1")
    assert trace.arrival_time_s.tolist() == [0.0, 7200.0]


def test_rows_out_of_order_are_sorted_and_counted_and_ties_keep_the_file_order():
    late = "2023-01-01 00:00:01.0000000,%d,1"
    trace = read(late % 1, late % 2, "2023-01-01 00:00:00.0000000,3,1", late % 4)
    assert trace.input_tokens.tolist() == [3, 1, 2, 4]
    assert trace.arrival_time_s.tolist() == [0, 1, 1, 1]
    assert any("1 rows stood before an earlier one" in warning for warning in trace.meta.warnings)


def test_zero_prompts_are_dropped_by_name_and_zero_outputs_kept():
    trace = read("2023-01-01 00:00:00.0000000,0,5", "2023-01-01 00:00:01.0000000,7,0")
    assert (trace.meta.rows_read, trace.meta.rows_kept) == (2, 1)
    assert trace.meta.drops == {"zero_input_tokens": 1}
    assert trace.output_tokens.tolist() == [0]
    assert any("output_tokens is 0 on 1 calls" in warning for warning in trace.meta.warnings)


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = tmp_path / "bom.csv"
    path.write_bytes(b"\xef\xbb\xbf" + f"{HEADER}\r\n2023-01-01 00:00:00.0000000,7,1".encode())
    assert load(path).meta.format == "azure"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("2023-01-01 00:00:01.0000000,7", "a row must be"),
        ("2023-01-01 00:00:0", "a row must be"),
        ("2023-01-01 00:00:01.0000000,-7,1", "a row must be"),
        ("2023-01-01 00:00:01.0000000,nan,1", "a row must be"),
        ("2023-01-01 00:00:01.0000000,7.5,1", "a row must be"),
        ("2023-01-01 24:00:01.0000000,7,1", "a row must be"),
        ("2023-02-30 00:00:01.0000000,7,1", "a date must exist, got 2023-02-30"),
        ("2023-01-01 00:00:01.0000000+00:00,7,1", "all stamps must have a zone or none"),
    ],
)
def test_a_bad_row_is_named(row, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read("2023-01-01 00:00:00.0000000,7,1", row)
    assert caught.value.place == "a.csv:3"
    assert caught.value.mend


def test_a_header_alone_is_no_trace():
    with pytest.raises(BadTraceError, match="must have rows"):
        read()


def test_an_unknown_header_is_named():
    with pytest.raises(BadTraceError, match="the header must be"):
        azure.read(io.BytesIO(b"TIMESTAMP,Prompt\n"), "a.csv")


@pytest.mark.parametrize(("name", "rows", "gap_s"), [("code", 8_819, 0.052), ("conv", 19_366, 4.314579)])
def test_the_real_files(shared_data, name, rows, gap_s):
    trace = load(shared_data / f"traces/azure-llm-2023/AzureLLMInferenceTrace_{name}.csv")
    assert (len(trace), trace.meta.rows_read, trace.meta.drops) == (rows, rows, {})
    assert trace.arrival_time_s[1] == gap_s
    assert (np.diff(trace.arrival_time_s) >= 0).all()
