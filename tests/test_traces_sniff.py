"""The format comes from the content: every format alone, disguised, damaged; and what looks alike is refused."""

import gzip
import json
import re
import sys
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.analysis import cli
from kvfold.traces import canonical
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.readers import FORMATS, Stated
from tests.example_logs import LOGS, claude_row, lines, span

STATED = Stated(chars_per_token=4.0)


def write(tmp_path, content: bytes):
    path = tmp_path / "weka.azure.csv.zip"  # a name that lies
    path.write_bytes(content)
    return path


def test_every_format_has_an_example():
    """Three need to be stated: a map of columns, and rows whose prompts may be whole or not."""
    assert set(FORMATS) - set(LOGS) == {"columns", "mooncake-delta", "mooncake-sessions"}


@pytest.mark.parametrize("format", LOGS)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_format_comes_from_the_content(tmp_path, format, pack, mark):
    path = write(tmp_path, pack(mark + LOGS[format]))
    trace = load(path, stated=STATED)
    meta = trace.meta
    assert meta.format == format
    assert load(path, format, stated=STATED).meta == meta
    assert meta.rows_read == meta.rows_kept + sum(meta.drops.values())
    assert (trace.input_tokens > 0).all()


@pytest.mark.parametrize("format", LOGS)
def test_line_ends_and_a_missing_last_one_change_nothing(tmp_path, format):
    plain = load(write(tmp_path, LOGS[format]), stated=STATED)
    content = LOGS[format].replace(b"\r\n", b"\n")
    for other in (content.replace(b"\n", b"\r\n"), content.rstrip(b"\n"), content + b"\n\n"):
        trace = load(write(tmp_path, other), stated=STATED)
        assert (len(trace), trace.meta.drops) == (len(plain), plain.meta.drops)
        assert trace.input_tokens.tolist() == plain.input_tokens.tolist()
        assert trace.arrival_time_s.tolist() == pytest.approx(plain.arrival_time_s.tolist(), nan_ok=True)


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (json.dumps([span()]).encode(), "otel"),
        (json.dumps([span()], indent=2).encode(), "otel"),
        (json.dumps([{"role": "system", "content": "x"}]).encode(), None),
        (b"[1, 2]", None),
        (b"[]", None),
        (b"{}", None),
        (b'["a"]', None),
    ],
)
def test_a_list_is_told_by_its_first_item(tmp_path, content, format):
    path = write(tmp_path, content)
    if format is None:
        with pytest.raises(BadTraceError):
            load(path)
    else:
        assert load(path).meta.format == format


def test_rows_that_may_be_whole_or_delta_are_not_guessed(tmp_path):
    row = {"session_id": "s", "timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    path = write(tmp_path, lines(row, row | {"timestamp": 9000}))
    with pytest.raises(BadTraceError, match="whole prompts or only what each turn adds") as caught:
        load(path)
    assert "--format mooncake-delta" in caught.value.mend
    whole, delta = load(path, "mooncake-sessions"), load(path, "mooncake-delta")
    assert whole.input_tokens.tolist() == [600, 600]
    assert delta.input_tokens.tolist() == [600, 600 + 1 + 600]
    assert (
        load(tmp_path, "mooncake-delta").input_tokens.tolist() == delta.input_tokens.tolist()
    )  # in a folder


def test_parquet_is_told_by_its_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = (
        "id",
        "input_len",
        "output_len",
        "arrival_time",
        "round_idx",
        "tool_wait_after_ms",
        "prefix_len",
    )
    table = pa.table({name: [1, 2] for name in columns})
    pq.write_table(table, tmp_path / "t")
    assert load(tmp_path / "t").meta.format == "tracelab"


@pytest.mark.parametrize("format", LOGS)
@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_every_format_survives_the_canonical_table(tmp_path, format, ending):
    """Each column comes back equal, unknowns too."""
    trace = load(write(tmp_path, LOGS[format]), stated=STATED)
    canonical.write(trace, tmp_path / f"t{ending}")
    back = load(tmp_path / f"t{ending}")
    for column in fields(trace):
        before, after = getattr(trace, column.name), getattr(back, column.name)
        if isinstance(before, list):
            assert after == before
        elif column.name != "meta":
            np.testing.assert_array_equal(after, before)
    if format != "canonical":
        assert back.meta.warnings[0].startswith(f"converted from {format}")


@pytest.mark.parametrize("format", LOGS)
def test_a_rejected_log_is_one_line_exit_5_and_no_file(tmp_path, format, monkeypatch, capsys):
    """A sound log with a broken last row."""
    path = write(tmp_path, LOGS[format].rstrip() + b"\n{x")
    command = [
        "convert",
        str(path),
        str(tmp_path / "out.jsonl"),
        "--format",
        format,
        "--chars-per-token",
        "4",
    ]
    monkeypatch.setattr(sys, "argv", ["kvfold", "traces", *command])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(rf"kvfold: {re.escape(str(path))}:\d+: .+; .+", lines[0])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("depth", [600, 200_000])
@pytest.mark.parametrize("format", ["otel", "swe-agent", "claude-code"])
def test_deep_nesting_loads_or_is_one_error(tmp_path, format, depth):
    """600 is what the parser holds; readers must hold it too."""
    deep = "[" * depth + "]" * depth
    texts = {
        "otel": json.dumps({"spans": [span(gen_ai__input__messages="@")]}),
        "swe-agent": json.dumps(
            [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "@"}]
        ),
        "claude-code": json.dumps(claude_row(content=[{"type": "tool_use", "id": "a", "input": "@"}])),
    }
    path = write(tmp_path, texts[format].replace('"@"', deep).encode())
    if depth == 600:
        assert len(load(path, stated=STATED)) == 1
    else:
        with pytest.raises(BadTraceError, match="nested without end"):
            load(path, stated=STATED)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damage_raises_only_the_one_error(tmp_path_factory, data):
    """A byte changed, text put in, or the end cut off: the file loads with sound counts or it is named."""
    content = data.draw(st.sampled_from(list(LOGS.values())))
    at = data.draw(st.integers(0, len(content)))
    put = data.draw(
        st.sampled_from(
            [
                b"",
                b"-1",
                b"1e999",
                b"NaN",
                b"null",
                b"{",
                b"]",
                b"9" * 20,
                b"\xff",
                b"\0",
                b"\n",
                b'"',
                b"[[]]",
            ]
        )
    )
    after = data.draw(st.sampled_from([at, at + 1, at + 5, len(content)]))
    path = tmp_path_factory.getbasetemp() / "damaged_log"
    path.write_bytes(content[:at] + put + content[after:])
    try:
        trace = load(path, stated=STATED)
    except BadTraceError as error:
        line = str(error)
    else:
        line = f"{path}: sound"
        assert trace.meta.rows_kept == len(trace) >= 1
        assert trace.meta.rows_read == len(trace) + sum(trace.meta.drops.values())
        assert (trace.input_tokens > 0).all()
    assert line.startswith(str(path))
    assert "\n" not in line
