"""LMCache texts: microseconds, rows in no order, no counts unless a rule is stated, empty is unknown."""

import pytest

from kvfold.traces import lmcache
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.readers import Stated
from tests.example_logs import lines

RULE = Stated(chars_per_token=4.0)


def row(second=0.0, text="a" * 1000, output="b" * 10, session="s", **more) -> dict:
    stamp = 1_760_587_678_577_028 + round(second * 1e6)
    return {"timestamp": stamp, "input": text, "output": output, "session_id": session} | more


def read(*rows: dict, rule: float | None = 4.0):
    return lmcache.read([("l.jsonl", lines(*rows))], "l", chars_per_token=rule)


def test_without_a_rule_the_texts_are_not_guessed():
    with pytest.raises(BadTraceError, match="holds only the text of its 2 calls") as caught:
        read(row(), row(1), rule=None)
    assert "--chars-per-token" in caught.value.mend


def test_a_stated_rule_counts_and_is_flagged():
    trace = read(row(), row(2, "a" * 1000 + "c" * 500, "b" * 11))
    assert trace.input_tokens.tolist() == [250, 375]
    assert trace.output_tokens.tolist() == [2, 2]
    assert trace.shared_blocks.tolist() == [0, 3]  # 250 tokens are 3 whole blocks of 64
    assert (trace.meta.block_size_tokens, trace.meta.partial_last) == (64, "dropped")
    assert (
        "tokens of 2 prompts and 2 outputs are estimated from text at 4 characters each"
        in trace.meta.warnings[0]
    )


def test_rows_are_put_in_order_of_time_and_counted():
    trace = read(row(5), row(0), row(1.5))
    assert trace.arrival_time_s.tolist() == [0, 1.5, 5]
    assert trace.wait_before_s.tolist()[1:] == [1.5, 3.5]
    assert any("1 rows stood before an earlier one" in line for line in trace.meta.warnings)


def test_empty_output_is_unknown_and_empty_input_dropped():
    trace = read(row(), row(1, output=""), row(2, text=""))
    assert trace.output_tokens.tolist() == [2, -1]
    assert (trace.meta.drops, trace.meta.rows_read) == ({"empty_input": 1}, 3)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (row(text=None), "input: expected str, got null"),
        (row() | {"timestamp": 1.5}, "timestamp: expected int, got float"),
        (row(extra=1), "unknown field extra"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(row(), bad)
    assert caught.value.place == "l.jsonl:2"


def test_a_line_of_a_megabyte_loads(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_bytes(lines(row(text="x" * 1_000_000)))
    assert load(path, stated=RULE).input_tokens.tolist() == [250_000]


@pytest.mark.parametrize(
    ("folder", "rows", "dropped", "empty_outputs", "sessions", "late"),
    [
        ("taubench", 471, {}, 283, 24, 134),
        ("miniswe", 118, {}, 0, 6, 32),
        ("magagent", 196, {"empty_input": 19}, 0, 6, 8),
    ],
)
def test_the_real_samples(shared_data, folder, rows, dropped, empty_outputs, sessions, late):
    trace = load(shared_data / "traces/lmcache-agent-trace" / folder, stated=RULE)
    assert (trace.meta.format, trace.meta.rows_read, trace.meta.drops) == ("lmcache", rows, dropped)
    assert int((trace.output_tokens < 0).sum()) == empty_outputs
    assert int(trace.session_id.max()) + 1 == sessions
    text = " ".join(trace.meta.warnings)
    assert f"{late} rows stood before an earlier one" in text
    assert ("1 files are no traces, left out" in text) == (folder == "taubench")  # the one of 0 bytes
