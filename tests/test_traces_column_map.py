"""Any flat log by a map: units are stated, semantics are stated, what is not mapped is named."""

import io
import json

import numpy as np
import pytest

from kvfold.traces import column_map
from kvfold.traces.column_map import parse
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.readers import Stated
from kvfold.traces.table import WAIT_KINDS, WAIT_SOURCES
from tests.example_logs import lines

MAP = "arrival_time_s=ts:ms,input_tokens=prompt_len,output_tokens=gen_len"


def read(content: str | bytes, text: str = MAP):
    data = content.encode() if isinstance(content, str) else content
    return column_map.read(io.BytesIO(data), "c", parse(text))


@pytest.mark.parametrize(("unit", "second"), [("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)])
def test_the_unit_is_the_stated_one_whatever_the_size_of_the_numbers(unit, second):
    text = MAP.replace("ts:ms", f"ts:{unit}")
    trace = read("ts,prompt_len,gen_len\n5000000000,10,5\n5000000500,20,6\n", text)
    np.testing.assert_allclose(trace.arrival_time_s, [0, 500 * second], rtol=1e-12)
    assert (trace.meta.format, trace.meta.time_unit) == ("columns", unit)


def test_three_containers_and_iso_stamps(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"ts": "2026-01-01T00:00:01+01:00", "prompt_len": 10, "gen_len": 5},
        {"ts": "2026-01-01T00:00:00Z", "prompt_len": 20, "gen_len": 6},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p")
    header = "ts,prompt_len,gen_len\n"
    (tmp_path / "c").write_text(header + "".join(",".join(map(str, row.values())) + "\n" for row in rows))
    (tmp_path / "j").write_bytes(lines(*rows))
    for name in "pcj":
        trace = load(tmp_path / name, stated=Stated(columns=MAP.replace(":ms", ":iso")))
        assert trace.arrival_time_s.tolist() == [0, 3599]
        assert trace.input_tokens.tolist() == [10, 20]
        assert trace.meta.time_zone == "UTC"


def test_empty_cells_are_unknown_and_other_columns_named():
    trace = read("ts,prompt_len,gen_len,user,x\n0,10,,u,1\n1,20,0,v,2\n")
    assert trace.output_tokens.tolist() == [-1, 0]
    assert any("columns that are not mapped: user, x" in line for line in trace.meta.warnings)


def test_sessions_with_recorded_waits():
    text = f"{MAP},session_id=conv,wait_before_s=gap:s:tool,recorded_e2e_s=e2e:ms,recorded_cached_tokens=hit"
    trace = read(
        "ts,prompt_len,gen_len,conv,gap,e2e,hit\n0,10,5,a,,500,0\n2000,20,5,a,0.75,100,8\n9000,30,5,a,,,\n",
        text.replace("prompt_len", "prompt_len:whole"),
    )
    np.testing.assert_array_equal(trace.wait_before_s, [np.nan, 0.75, 6.9])
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "tool", "tool"]
    assert [WAIT_SOURCES[code] for code in trace.wait_source] == ["none", "recorded", "end_to_start"]
    assert trace.recorded_cached_tokens.tolist() == [0, 8, -1]


def test_deltas_are_summed_up_along_their_session():
    text = f"{MAP},session_id=conv".replace("prompt_len", "prompt_len:delta")
    content = "ts,prompt_len,gen_len,conv\n0,100,10,a\n1,50,10,b\n2,20,5,a\n3,7,1,\n"
    trace = read(content, text)
    assert trace.input_tokens.tolist() == [100, 50, 130, 7]
    assert any("summed up along each session" in line for line in trace.meta.warnings)
    with pytest.raises(BadTraceError, match="need output_tokens on every row"):
        read(content.replace("0,100,10,a", "0,100,,a"), text)


def test_zero_prompts_are_dropped_by_name():
    assert read(
        json.dumps({"ts": 5, "prompt_len": 0, "gen_len": 1}) + '\n{"ts": 6, "prompt_len": 3, "gen_len": 1}'
    ).meta.drops == {"zero_input_tokens": 1}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "each part must be FIELD=COLUMN"),
        ("arrival_time_s=ts,input_tokens=a,output_tokens=b", "arrival_time_s needs its unit"),
        (
            "arrival_time_s=ts:min,input_tokens=a,output_tokens=b",
            "the unit of arrival_time_s must be one of s, ms",
        ),
        ("arrival_time_s=ts:s,input_tokens=a", "output_tokens is missing"),
        (f"{MAP},model=m:s", "the unit of model must be left out, got 's'"),
        (f"{MAP},speed=m", "with a field of arrival_time_s, .* got 'speed=m'"),
        (f"{MAP},model=", "got 'model='"),
        (f"{MAP},output_tokens=c", "output_tokens may be mapped once"),
        (f"{MAP},session_id=c", "input_tokens must say whether prompts are whole"),
        (f"{MAP},wait_before_s=w:s", "wait_before_s needs session_id"),
        (f"{MAP},wait_before_s=w:s:nap", "a kind of wait must be one of none, tool"),
    ],
)
def test_a_map_that_leaves_something_open_is_refused(text, rule):
    with pytest.raises(ValueError, match=rule):
        parse(text)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("soon,10,5", "arrival_time_s must be a number of ms from 0 to 292 years, got 'soon'"),
        ("-1,10,5", "arrival_time_s must be a number of ms"),
        (",10,5", "a row must have arrival_time_s in the column 'ts'"),
        ("1,ten,5", "input_tokens: expected int, got str"),
        ("1,10,-5", "output_tokens: expected int >= 0"),
        ("1,9999999999,5", "input_tokens: expected int <= 1000000000"),
    ],
)
def test_a_bad_row_is_named(row, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(f"ts,prompt_len,gen_len\n0,1,1\n{row}\n")
    assert caught.value.place == "c:3"


def test_a_map_whose_columns_are_not_there_says_which_are():
    with pytest.raises(BadTraceError, match="in the column 'ts'") as caught:
        read("time,prompt_len,gen_len\n0,1,1\n")
    assert "'time', 'prompt_len', 'gen_len'" in caught.value.mend


def test_the_format_columns_needs_a_map(tmp_path):
    (tmp_path / "t").write_text("a\n1\n")
    with pytest.raises(ValueError, match="needs a map of its columns"):
        load(tmp_path / "t", "columns")
