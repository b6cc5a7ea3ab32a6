"""RAGPulse: chunks in any order give no prefix sharing; what they would give is told in words."""

import re

import pytest

from kvfold.traces import ragpulse
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.stats import quantiles
from kvfold.traces.table import WAIT_KINDS
from tests.example_logs import lines, rag_row


def read(*rows: dict, **tables: bytes):
    return ragpulse.read([("0.jsonl", lines(*rows)), *tables.items()], "rag")


def test_reordered_passages_are_a_set_not_a_prefix():
    trace = read(rag_row("5"), rag_row("9", passages=(8, 7)), rag_row("10", passages=(8, 7)))
    text = trace.meta.warnings[0]
    # 12 chunks: 8 of the last two prompts came before; in order only [1] of the second and all 4 of the third
    assert "of 12 chunks 66.7 % came before in any place, 41.7 % in the same prefix" in text
    assert "tokens of the chunks unknown" in text
    assert (trace.meta.hash_scope, trace.meta.block_size_tokens) == ("none", 0)
    assert not len(trace.block_ids)


def test_equal_numbers_in_two_lists_are_two_chunks():
    trace = read(rag_row("5", passages=(1,)))
    assert "of 3 chunks 0.0 % came before" in trace.meta.warnings[0]


def test_the_files_beside_it_give_tokens():
    lengths = {
        "1.jsonl": lines({"sys_prompt_id": 1, "token_length": 30}),
        "2.jsonl": lines({"passage_id": 7, "token_length": 10}, {"passage_id": 8, "token_length": 50}),
    }
    trace = read(rag_row("5", passages=(7,)), rag_row("9", passages=(8,)), **lengths)
    assert "by tokens 25.0 % came before" in trace.meta.warnings[0]  # 30 of 120
    assert (trace.meta.rows_read, len(trace)) == (2, 2)


def test_sessions_and_seconds_as_text():
    trace = read(rag_row("100"), rag_row("93", session="b"), rag_row("140"))
    assert trace.arrival_time_s.tolist() == [0, 7, 47]
    assert trace.session_id.tolist() == [0, 1, 1]
    assert trace.wait_before_s[2] == 40
    assert WAIT_KINDS[trace.wait_kind[2]] == "human"


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (rag_row(5), "timestamp: expected str, got int"),
        (rag_row("5.5"), "timestamp: expected str matching"),
        (rag_row("5") | {"hash_ids": [1, 2]}, "hash_ids: expected object, got array"),
        (rag_row("5") | {"hash_ids": {"sys_prompt": [1]}}, "missing required field"),
    ],
)
def test_a_bad_row_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(rag_row(), bad)
    assert caught.value.place == "0.jsonl:2"


def test_lengths_alone_are_no_trace():
    content = lines({"passage_id": 7, "token_length": 10})
    with pytest.raises(BadTraceError, match="one file must be the trace, got only files of chunk lengths"):
        ragpulse.read([("2.jsonl", content)], "rag")
    with pytest.raises(BadTraceError, match="expected int, got str") as caught:
        ragpulse.read([("2.jsonl", content + lines({"passage_id": "a", "token_length": 1}))], "rag")
    assert caught.value.place == "2.jsonl:2"


def test_the_real_week(shared_data):
    trace = load(shared_data / "traces/ragpulse")
    assert (trace.meta.format, trace.meta.rows_read, len(trace), trace.meta.drops) == (
        "ragpulse",
        7_106,
        7_106,
        {},
    )
    assert int(trace.session_id.max()) + 1 == 3_990
    tokens = quantiles(trace.input_tokens)
    assert [round(tokens[name]) for name in ("p50", "p90", "p99", "max")] == [3_140, 3_958, 5_438, 7_712]
    waits_s = quantiles(trace.wait_before_s[trace.parent_request_id >= 0])
    assert [round(waits_s[name]) for name in ("p50", "p90", "p95", "p99")] == [40, 300, 1_024, 35_479]
    text = " ".join(trace.meta.warnings)
    assert re.search(r"69\.4 % came before in any place, 18\.0 % in the same prefix", text)
    assert "by tokens 72.0 %" in text
    assert "1 rows stood before an earlier one" in text
    assert int((trace.arrival_time_s[1:] == trace.arrival_time_s[:-1]).sum()) == 90
