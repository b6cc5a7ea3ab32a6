"""OpenTelemetry ``gen_ai`` spans: one call a span, sessions from the conversation id, waits from end to start.

Source of the names: the OpenTelemetry semantic conventions for generative AI. Since their release 1.37 usage is
``gen_ai.usage.input_tokens`` and ``output_tokens``; ``prompt_tokens`` and ``completion_tokens`` are older, and
OpenLLMetry and OpenInference have their own. Counts of cached tokens should be inside the input; where they
exceed it they were left out of it.

Spans do not say what they waited for. A call here follows every call of its session that had ended before it
began, but for those that another one in between has followed already: parallel calls stay parallel, and one
that joins them waits for all. This is taken from the clock, and said so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from math import nan
from typing import Any

import msgspec

from kvfold.traces import texts
from kvfold.traces.calls import Calls
from kvfold.traces.decode import Tokens, convert_row
from kvfold.traces.otel_spans import Span, spans_of
from kvfold.traces.stamps import NS_PER_S
from kvfold.traces.table import Trace

_INPUT = (
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.prompt_tokens",
    "llm.usage.prompt_tokens",
    "llm.token_count.prompt",
)
_OUTPUT = (
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.completion_tokens",
    "llm.usage.completion_tokens",
    "llm.token_count.completion",
)
_CACHED = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
_REASONING = ("gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens")
_PROMPT = ("gen_ai.input.messages", "gen_ai.prompt", "llm.input_messages", "input.value")
_ANSWER = (
    "gen_ai.output.messages",
    "gen_ai.output.text",
    "gen_ai.completion",
    "llm.output_messages",
    "output.value",
)
_MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
_OPERATION = ("gen_ai.operation.name", "llm.request.type")
_CALLS = {"chat", "text_completion", "completion", "generate_content", "LLM"}


class _Usage(msgspec.Struct):
    input: Tokens | None = None
    output: Tokens | None = None
    cached: Tokens | None = None
    reasoning: Tokens | None = None


def read(files: Iterable[tuple[str, bytes]], source: str, *, chars_per_token: float | None = None) -> Trace:
    """The calls of all files on one clock; ``agent_id`` counts the agents or services of a session.

    A span that is no call of a model is dropped by that name, and so is one that was exported before, one that
    wraps other calls and repeats their tokens, and one without token counts unless ``chars_per_token`` says how
    to estimate them.
    Raises BadTraceError.
    """
    calls = Calls(source, NS_PER_S)
    spans = [span for name, data in files for span in calls.reading(spans_of(data, name))]
    wrappers = _wrappers(spans)
    members: dict[str, list[tuple[int, Span]]] = defaultdict(list)
    tools: dict[str, list[Span]] = defaultdict(list)
    agents: dict[tuple[str, str], int] = {}
    agents_of: Counter[str] = Counter()
    count: Counter[str] = Counter()
    seen: dict[tuple[str, str], Span] = {}
    for line, span in enumerate(spans, 1):
        session, key = _session(span)
        operation = _first(span, _OPERATION)
        if operation == "execute_tool" or span.attributes.get("openinference.span.kind") == "TOOL":
            tools[session].append(span)
        if not _is_call(span):
            calls.drop("no_model_call")
            continue
        twin = seen.setdefault((span.trace, span.span), span)
        if span.span and twin is not span and replace(twin, place=span.place) == span:
            calls.drop("repeats_span")
            continue
        if id(span) in wrappers:
            calls.drop("wraps_other_calls")
            continue
        usage = _usage(span, count)
        prompt, output = usage.input, usage.output
        chain: list[int] = []
        if prompt is None:
            text = _prompt_text(span)
            if chars_per_token is None or not text:
                calls.drop("no_token_counts")
                continue
            prompt, chain = texts.tokens_of(len(text), chars_per_token), texts.chain_of(text, chars_per_token)
            count["estimated"] += 1
            if output is None and (answer := texts.plain(_first(span, _ANSWER))):
                output = texts.tokens_of(len(answer), chars_per_token)
                count["estimated_outputs"] += 1
        if not prompt:
            calls.drop("zero_input_tokens")
            continue
        count[key] += 1
        count["zoned" if span.zoned else "naive"] += 1
        agent = session, str(_first(span, ("gen_ai.agent.id", "gen_ai.agent.name", "service.name")) or "")
        if agent not in agents:
            agents[agent] = agents_of[session]
            agents_of[session] += 1
        row = calls.add(
            span.place,
            line,
            span.start_ns,
            prompt,
            _known(output),
            session=session,
            agent=agents[agent],
            chain=chain,
            reasoning=_known(usage.reasoning),
            cached=_known(usage.cached),
            e2e_s=nan if span.end_ns is None else (span.end_ns - span.start_ns) / NS_PER_S,
            status=span.status,
            name=span.span,
            model=str(_first(span, _MODEL) or ""),
        )
        members[session].append((row, span))
    if not calls and calls.drops["no_token_counts"]:
        raise texts.no_counts(source, calls.drops["no_token_counts"])
    for session, rows in members.items():
        _link(calls, rows, tools[session])
    calls.warnings += _remarks(count, calls, chars_per_token)
    blocks: dict[str, Any] = {}
    if count["estimated"] and count["estimated"] == len(calls):
        blocks = {"block_tokens": texts.BLOCK_TOKENS, "hash_scope": "global"}
    return calls.trace(
        "otel", "ns" if count["zoned"] else "us", time_zone="UTC" if count["zoned"] else "", **blocks
    )


def _wrappers(spans: list[Span]) -> set[int]:
    """Identities of the call spans that have another call span below them while they last."""
    by_id = {(span.trace, span.span): span for span in spans}
    found: set[int] = set()
    for span in filter(_is_call, spans):
        above = by_id.get((span.trace, span.parent))
        seen = {id(span)}
        while above is not None and id(above) not in seen:
            seen.add(id(above))
            inside = above.start_ns <= span.start_ns and (
                above.end_ns is None or span.start_ns < above.end_ns
            )
            if inside and _is_call(above):
                found.add(id(above))
            above = by_id.get((above.trace, above.parent))
    return found


def _is_call(span: Span) -> bool:
    operation = _first(span, _OPERATION) or span.attributes.get("openinference.span.kind")
    if operation is not None:
        return str(operation) in _CALLS
    return _first(span, _INPUT) is not None or _first(span, _OUTPUT) is not None


def _session(span: Span) -> tuple[str, str]:
    """Session of a span and the attribute that names it: the conversation, a vendor's key, else the trace."""
    vendor = sorted(name for name in span.attributes if name.endswith(("session.id", "session_id")))
    for name in ("gen_ai.conversation.id", *vendor):
        if span.attributes.get(name):
            return f"{name}={span.attributes[name]}", f"session by {name}"
    return f"trace_id={span.trace}", "session by trace_id"


def _usage(span: Span, count: Counter[str]) -> _Usage:
    named = {"input": _INPUT, "output": _OUTPUT, "cached": _CACHED, "reasoning": _REASONING}
    raw = {name: value for name, keys in named.items() if (value := _first(span, keys)) is not None}
    usage = convert_row(raw, _Usage, span.place)
    if usage.input is not None and usage.cached is not None and usage.cached > usage.input:
        usage.input += usage.cached
        count["cached_apart"] += 1
    return usage


def _link(calls: Calls, rows: list[tuple[int, Span]], tools: list[Span]) -> None:
    """Parents of each call: those that ended before it and that no call in between has followed."""
    ended = sorted(((span.end_ns or span.start_ns), row, span) for row, span in rows)
    ends = [end for end, _, _ in ended]
    latest_start = list(accumulate((span.start_ns for _, _, span in ended), max))
    tool_starts = sorted(tool.start_ns for tool in tools)
    for row, span in rows:
        before = bisect_right(ends, span.start_ns)
        while (
            before and ended[before - 1][2].start_ns == span.start_ns
        ):  # itself or one beside it, of no length
            before -= 1
        if not before:
            continue
        first = bisect_left(ends, latest_start[before - 1], 0, before)
        gap_ns = span.start_ns - ends[before - 1]
        in_tools = bisect_right(tool_starts, span.start_ns) > bisect_left(tool_starts, ends[before - 1])
        kind = "tool" if in_tools else _kind(span)
        for _, parent, above in reversed(ended[first:before]):
            source = "start_to_start" if above.end_ns is None else "end_to_start"
            calls.link(row, parent, gap_ns / NS_PER_S, kind, source)


def _kind(span: Span) -> str:
    """What the prompt ends in: a tool's result or a user's text, which a program may have written as well."""
    messages = _messages(_first(span, _PROMPT))
    role = messages[-1].get("role") if messages and isinstance(messages[-1], dict) else None
    return {"tool": "tool", "function": "tool", "user": "human"}.get(str(role), "unknown")


def _messages(value: Any) -> list[Any]:
    """Messages that may stand as JSON inside a text."""
    if isinstance(value, str) and value.lstrip()[:1] in "[{":
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return [value]
    if isinstance(value, dict):
        return value["messages"] if isinstance(value.get("messages"), list) else [value]
    return value if isinstance(value, list) else [value] if value else []


def _prompt_text(span: Span) -> str:
    """The whole prompt as one text: instructions, then messages; equal beginnings give equal beginnings."""
    parts = [texts.plain(span.attributes.get("gen_ai.system_instructions"))]
    parts += map(texts.plain, _messages(_first(span, _PROMPT)))
    index = 0
    while (content := span.attributes.get(f"gen_ai.prompt.{index}.content")) is not None:
        parts.append(f"{span.attributes.get(f'gen_ai.prompt.{index}.role', '')}\n{texts.plain(content)}")
        index += 1
    return "\n".join(part for part in parts if part)


def _first(span: Span, names: Iterable[str]) -> Any:
    return next((span.attributes[name] for name in names if span.attributes.get(name) is not None), None)


def _known(count: int | None) -> int:
    return -1 if count is None else count


def _remarks(count: Counter[str], calls: Calls, chars_per_token: float | None) -> Iterable[str]:
    sessions = [
        f"{key[len('session by ') :]} on {n:,} calls" for key, n in count.items() if key.startswith("session")
    ]
    yield f"sessions are named by {', '.join(sessions)}; what a call follows is inferred from the clock"
    if count["zoned"] and count["naive"]:
        yield f"{count['naive']:,} stamps without a zone stand beside others with one: taken as UTC"
    if count["cached_apart"]:
        yield f"{count['cached_apart']:,} calls have more cached than input tokens: added up as the whole prompt"
    if count["estimated"] and chars_per_token is not None:
        yield texts.remark(chars_per_token, count["estimated"], count["estimated_outputs"])
    if left := calls.drops["no_token_counts"]:
        yield f"{left:,} calls without token counts left out: --chars-per-token estimates them"
