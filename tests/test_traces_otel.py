"""OpenTelemetry spans in every shape that exports have; parallel calls stay parallel; nothing counts twice."""

import json

import numpy as np
import pytest

from kvfold.traces import otel
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.otel_spans import spans_of
from kvfold.traces.readers import Stated
from kvfold.traces.table import STATUSES, WAIT_KINDS
from tests.example_logs import lines, span


def at(second: float) -> str:
    return f"2026-01-01T00:{int(second // 60):02d}:{second % 60:09.6f}Z"


def chat(name: str, start: float, end: float, **attributes) -> dict:
    return span(name, at(start), at(end), **attributes)


def read(*spans: dict, rule: float | None = None):
    return otel.read([("o.json", json.dumps({"spans": spans}).encode())], "o", chars_per_token=rule)


def edges(trace) -> list:
    return list(
        zip(trace.edge_child.tolist(), trace.edge_parent.tolist(), trace.edge_wait_s.tolist(), strict=True)
    )


def typed(value) -> dict:
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def otlp(*spans: dict) -> dict:
    """The same spans as OTLP JSON: nanoseconds and integers as text, attributes as a list of typed values."""
    inner = [
        {
            "traceId": one["trace_id"],
            "spanId": one["span_id"],
            "startTimeUnixNano": str(next(spans_of(json.dumps(one).encode(), "x")).start_ns),
            "endTimeUnixNano": str(next(spans_of(json.dumps(one).encode(), "x")).end_ns),
            "attributes": [{"key": key, "value": typed(value)} for key, value in one["attributes"].items()],
            "status": {"code": one["status"]["code"]},
        }
        for one in spans
    ]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": inner}]}]}


def nested(one: dict) -> dict:
    """Attributes as objects in objects instead of dotted names."""
    tree: dict = {}
    for key, value in one["attributes"].items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return one | {"attributes": tree}


def console(one: dict) -> dict:
    """As the console exporter of the Python SDK prints it."""
    context = {"trace_id": one["trace_id"], "span_id": one["span_id"]}
    rest = {key: value for key, value in one.items() if key not in ("trace_id", "span_id", "status")}
    return rest | {"context": context, "parent_id": None, "status": {"status_code": "OK"}}


SPANS = (chat("a", 0, 2), chat("b", 5, 6.5))


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"spans": SPANS}).encode(),
        json.dumps({"spans": SPANS}, indent=2).encode(),
        json.dumps(SPANS).encode(),
        lines(*SPANS),
        lines(*map(nested, SPANS)),
        lines(*map(console, SPANS)),
        lines(
            *(
                {key: value for key, value in one.items() if key != "attributes"} | one["attributes"]
                for one in SPANS
            )
        ),
        json.dumps(otlp(*SPANS)).encode(),
        lines(otlp(SPANS[0]), otlp(SPANS[1])),
    ],
    ids=["object", "pretty", "list", "lines", "nested", "console", "top-level", "otlp", "otlp-lines"],
)
def test_every_export_gives_the_same_calls(tmp_path, content):
    path = tmp_path / "t"
    path.write_bytes(content)
    trace = load(path)
    assert (trace.meta.format, trace.meta.rows_read, len(trace)) == ("otel", 2, 2)
    assert trace.input_tokens.tolist() == [10, 10]
    assert trace.output_tokens.tolist() == [5, 5]
    assert trace.recorded_e2e_s.tolist() == [2, 1.5]
    assert edges(trace) == [(1, 0, 3.0)]
    assert [STATUSES[code] for code in trace.status] == ["ok", "ok"]
    assert trace.source_id == ["a", "b"]


def test_the_resource_of_an_export_names_the_service():
    first, second = (otlp(one)["resourceSpans"][0] for one in SPANS)
    second["resource"]["attributes"][0]["value"] = {"stringValue": "other"}
    trace = otel.read([("o", json.dumps({"resourceSpans": [first, second]}).encode())], "o")
    assert trace.agent_id.tolist() == [0, 1]


@pytest.mark.parametrize(
    "names",
    [
        ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
        ("llm.usage.prompt_tokens", "llm.usage.completion_tokens"),
        ("llm.token_count.prompt", "llm.token_count.completion"),
    ],
)
def test_older_names(names):
    one = chat("a", 0, 1)
    one["attributes"] = {"gen_ai.request.model": "m"} | dict(zip(names, (70, 9), strict=True))
    trace = read(one)
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist(), trace.model) == ([70], [9], ["m"])


def test_parallel_calls_follow_the_same_one_and_a_join_waits_for_all():
    """a, then b and c beside each other, then d after both: no edge from a to d, which b and c cover."""
    trace = read(chat("a", 0, 1), chat("b", 2, 5), chat("c", 2.5, 4), chat("d", 6, 7))
    assert edges(trace) == [(1, 0, 1.0), (2, 0, 1.5), (3, 1, 1.0), (3, 2, 1.0)]
    assert trace.parent_request_id.tolist() == [-1, 0, 0, 1]


def test_calls_of_no_length_at_one_instant_do_not_follow_each_other():
    assert edges(read(chat("a", 1, 1), chat("b", 1, 1), chat("c", 2, 2))) == [(2, 1, 1.0), (2, 0, 1.0)]


def test_sessions_by_conversation_then_vendor_key_then_trace():
    trace = read(
        chat("a", 0, 1, gen_ai__conversation__id="x"),
        chat("b", 2, 3, gen_ai__conversation__id="x") | {"trace_id": "t2"},
        chat("c", 4, 5, vendor__session__id="x"),
        chat("d", 6, 7),
    )
    assert trace.session_id.tolist() == [0, 0, 1, 2]
    assert "vendor.session.id on 1 calls" in trace.meta.warnings[0]
    assert "trace_id on 1 calls" in trace.meta.warnings[0]


def test_agents_are_told_by_their_own_name_or_their_service():
    service = {"resource_attributes": {"service.name": "b"}}
    named = chat("c", 4, 5, gen_ai__agent__name="c") | service
    trace = read(chat("a", 0, 1), chat("b", 2, 3) | service, named, chat("d", 6, 7) | service)
    assert trace.agent_id.tolist() == [0, 1, 2, 1]


def test_tool_spans_and_roles_say_what_a_call_waited_for():
    tool = span("t", at(2), at(4), gen_ai__operation__name="execute_tool", gen_ai__tool__name="bash")
    user = json.dumps([{"role": "user", "content": "x"}])
    result = json.dumps([{"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}])
    trace = read(
        chat("a", 0, 1),
        tool,
        chat("b", 5, 6),
        chat("c", 9, 10, gen_ai__input__messages=user),
        chat("d", 11, 12, gen_ai__input__messages=result),
        chat("e", 13, 14),
    )
    assert [WAIT_KINDS[code] for code in trace.wait_kind] == ["none", "tool", "human", "tool", "unknown"]
    assert trace.wait_before_s.tolist()[1] == 4.0
    assert (trace.meta.rows_read, trace.meta.drops) == (6, {"no_model_call": 1})


def test_a_span_around_other_calls_is_not_counted_twice():
    outer = chat("outer", 0, 10)
    agent = span("agent", at(0), at(10), gen_ai__operation__name="invoke_agent")
    inner = chat("inner", 1, 9) | {"parent_span_id": "outer"}
    causal = chat("next", 12, 13) | {
        "parent_span_id": "outer"
    }  # names what it follows, not what it is part of
    trace = read(outer, agent, inner, causal)
    assert trace.source_id == ["inner", "next"]
    assert trace.meta.drops == {"no_model_call": 1, "wraps_other_calls": 1}


def test_a_span_in_two_exports_counts_once():
    """But only where all of it is equal: ids alone repeat."""
    one = json.dumps({"spans": [chat("a", 0, 1)]}).encode()
    other = json.dumps({"spans": [chat("a", 0, 1), chat("b", 2, 3), chat("a", 4, 5)]}).encode()
    trace = otel.read([("1.json", one), ("2.json", other)], "o")
    assert (trace.source_id, trace.meta.drops) == (["a", "b", "a"], {"repeats_span": 1})


def test_parents_in_a_ring_end():
    assert (
        len(read(chat("a", 0, 1) | {"parent_span_id": "b"}, chat("b", 2, 3) | {"parent_span_id": "a"})) == 2
    )


def test_cached_tokens_outside_the_input_are_added_and_counted():
    trace = read(
        chat("a", 0, 1, **{"gen_ai__usage__cache_read__input_tokens": 8}),
        chat("b", 2, 3, **{"gen_ai__usage__cache_read__input_tokens": 500}),
    )
    assert trace.input_tokens.tolist() == [10, 510]
    assert trace.recorded_cached_tokens.tolist() == [8, 500]
    assert any("1 calls have more cached than input tokens" in line for line in trace.meta.warnings)


def text_span(name: str, start: float, text: str) -> dict:
    one = chat(name, start, start + 1)
    messages = json.dumps([{"role": "user", "content": text}])
    one["attributes"] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": messages,
        "gen_ai.output.text": "o" * 40,
    }
    return one


def test_text_without_counts_needs_a_stated_rule():
    spans = text_span("a", 0, "x" * 600), text_span("b", 2, "x" * 600 + "y" * 600)
    with pytest.raises(BadTraceError, match="only the text of its 2 calls"):
        read(*spans)
    trace = read(*spans, rule=4.0)
    assert trace.input_tokens.tolist() == [(4 + 1 + 600) // 4, (4 + 1 + 1200) // 4]  # role, line end, text
    assert trace.output_tokens.tolist() == [10, 10]
    assert trace.shared_blocks.tolist() == [0, 2]
    assert any("2 prompts and 2 outputs are estimated" in line for line in trace.meta.warnings)


def test_mixed_counts_keep_what_is_recorded_and_count_the_rest():
    trace = read(chat("a", 0, 1), text_span("b", 2, "x" * 600))
    assert (len(trace), trace.meta.drops) == (1, {"no_token_counts": 1})
    trace = read(chat("a", 0, 1), text_span("b", 2, "x" * 600), rule=4.0)
    assert (trace.input_tokens[0], trace.meta.hash_scope) == (10, "none")


def test_zones_beside_none_are_said():
    naive = span("n", "2026-01-01T00:00:05", "2026-01-01T00:00:06")
    trace = read(chat("a", 0, 1), naive)
    assert trace.arrival_time_s.tolist() == [0, 5]
    assert any("1 stamps without a zone" in line for line in trace.meta.warnings)


def test_an_unset_end_is_unknown():
    one = chat("a", 0, 1)
    one["end_time"] = None
    trace = read(one, chat("b", 5, 6))
    assert np.isnan(trace.recorded_e2e_s[0])
    assert trace.wait_before_s[1] == 5.0
    assert any("1 waits count from arrival to arrival" in line for line in trace.meta.warnings)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (chat("b", 5, 4), "a span must end after it starts, got -1 s"),
        (chat("b", 0, 1) | {"start_time": None}, "a span must have a start time"),
        (chat("b", 0, 1) | {"start_time": "noon"}, "a stamp must be"),
        (chat("b", 0, 1, gen_ai__usage__input_tokens=-3), "input: expected int >= 0, got -3"),
        (chat("b", 0, 1, gen_ai__usage__input_tokens=1.5), "input: expected int"),
        ({"startTimeUnixNano": "soon"}, "startTimeUnixNano must be a number of ns"),
        (5, "a span must have a start time"),
    ],
)
def test_a_bad_span_is_named(bad, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        otel.read([("o.jsonl", lines(chat("a", 0, 1), bad))], "o")
    assert caught.value.place == "o.jsonl:2"


def test_the_real_examples(shared_data):
    folder = shared_data / "traces/otel-genai-inference-perf"
    bare = load(folder)
    # simple_chain_alt.json holds the three spans of simple_chain.json again
    assert (bare.meta.rows_read, len(bare)) == (73, 7)
    assert bare.meta.drops == {"no_token_counts": 63, "repeats_span": 3}
    assert bare.input_tokens[0] == 50
    trace = load(folder, stated=Stated(chars_per_token=4.0))
    assert (trace.meta.rows_read, len(trace), trace.meta.drops) == (73, 70, {"repeats_span": 3})
    text = " ".join(trace.meta.warnings)
    assert "exgentic.session.id on 63 calls, trace_id on 7 calls" in text
    assert "63 stamps without a zone" in text
    assert "tokens of 63 prompts" in text
    join = load(folder / "advanced/fan_in_dependencies.json", stated=Stated(chars_per_token=4.0))
    assert sorted(edges(join))[-2:] == [(3, 1, 1.0), (3, 2, 1.0)]
