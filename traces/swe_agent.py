"""Trajectories of SWE-agent (``.traj``) and mini-SWE-agent (``.traj.json``): one session a file.

SWE-agent writes ``trajectory[]`` with the ``response`` of each step, the ``observation`` it led to, in newer files
the ``query`` and the ``execution_time`` of the tool; tokens only as totals of the run. mini-SWE-agent writes the
messages, alone or in an object; since version 2 with the provider's usage and a time stamp in ``extra``.

The whole history goes into every prompt. Where a step has no usage, its tokens are estimated from its text: by the
rule that the user states, else by the characters per token that give the totals of the run. Where no times are
recorded, waits and arrivals but the first are unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import msgspec

from kvfold.traces import texts
from kvfold.traces.calls import Calls
from kvfold.traces.decode import UTF8_BOM, Seconds, Tokens, convert_row, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Trace


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None


class _Times(msgspec.Struct):
    execution_time: Seconds | None = None
    timestamp: Seconds | None = None


class _Totals(msgspec.Struct):
    tokens_sent: Tokens = 0
    tokens_received: Tokens = 0


@dataclass(slots=True)
class _Step:
    prompt: str
    answer: str
    usage: _Usage
    tool: str
    wait_s: float  # of the tool after it
    begin_s: float  # on any clock; NaN unknown
    end_s: float


def _is_run(messages: list[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], dict) and {"role", "content"} <= messages[0].keys()


def read(files: Iterable[tuple[str, bytes]], source: str, *, chars_per_token: float | None = None) -> Trace:
    """One session a file, each on its own clock. Raises BadTraceError."""
    calls = Calls(source)
    count: Counter[str] = Counter()
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
    for name, data in files:
        document = decode_json(decoder, data.removeprefix(UTF8_BOM), name, 1)
        steps, totals = _steps(document, name)
        rules = _rules(steps, totals, chars_per_token)
        last = -1
        for number, step in calls.reading(enumerate(steps, 1)):
            prompt, output, chain = _tokens(step, rules, count)
            if prompt is None:
                calls.drop("no_token_counts")
                continue
            if not prompt:
                calls.drop("zero_input_tokens")
                continue
            first_s = steps[0].begin_s if not isnan(steps[0].begin_s) else steps[0].end_s
            row = calls.add(
                f"{name}:1 (step {number})",
                number,
                0.0 if last < 0 else step.begin_s - first_s,
                prompt,
                -1 if output is None else output,
                session=name,
                chain=chain,
                e2e_s=step.end_s - step.begin_s,
                status="ok",
                name=name,
                tools=step.tool,
            )
            if last >= 0:
                calls.link(row, last, steps[number - 2].wait_s, "tool", "recorded")
                count["no_wait"] += isnan(steps[number - 2].wait_s)
            last = row
    if not len(calls) and (left := calls.drops["no_token_counts"]):
        raise texts.no_counts(source, left)
    calls.warnings += _remarks(count, chars_per_token)
    blocks: dict[str, Any] = {}
    if count["estimated"] == len(calls):
        scope = (
            "session" if chars_per_token is None else "global"
        )  # each run has its own rule, or all the same
        blocks = {"block_tokens": texts.BLOCK_TOKENS, "hash_scope": scope}
    return calls.trace("swe-agent", "s", clock="session", **blocks)


def _steps(document: Any, name: str) -> tuple[list[_Step], _Totals]:
    """The calls of a run in order, and its totals."""
    info = document.get("info") if isinstance(document, dict) else None
    stats = info.get("model_stats") if isinstance(info, dict) else None
    totals = convert_row(stats if isinstance(stats, dict) else {}, _Totals, f"{name}:1")
    messages = document.get("messages") if isinstance(document, dict) else document
    if isinstance(document, dict) and isinstance(document.get("trajectory"), list):
        return list(_of_trajectory(document, name)), totals
    if isinstance(messages, list) and _is_run(messages):
        return list(_of_messages(messages, name)), totals
    rule = "a trajectory must have `trajectory` or a list of messages with role and content"
    raise BadTraceError(rule, f"{name}:1", "name a .traj or .traj.json file")


def _of_trajectory(document: dict[str, Any], name: str) -> Iterator[_Step]:
    history = document.get("history")
    context = []
    for message in history if isinstance(history, list) else []:
        if not isinstance(message, dict) or message.get("role") == "assistant":
            break
        context.append(texts.plain(message.get("content")))
    for number, step in enumerate(document["trajectory"], 1):
        place = f"{name}:1 (step {number})"
        if not isinstance(step, dict):
            raise BadTraceError("a step must be an object", place, "restore the file")
        answer, action = texts.plain(step.get("response")), texts.plain(step.get("action"))
        times = convert_row({"execution_time": step.get("execution_time")}, _Times, place)
        query = step.get("query")
        yield _Step(
            prompt=texts.plain(query) if query else "\n".join(context),
            answer=answer,
            usage=_Usage(),
            tool=action.split()[0] if action.split() else "",
            wait_s=nan if times.execution_time is None else times.execution_time,
            begin_s=nan,
            end_s=nan,
        )
        context += [answer, texts.plain(step.get("observation"))]


def _of_messages(messages: list[Any], name: str) -> Iterator[_Step]:
    context: list[str] = []
    before_s = nan  # when the last message was written
    waiting: _Step | None = None
    for number, message in enumerate(messages, 1):
        place = f"{name}:1 (message {number})"
        if not isinstance(message, dict):
            raise BadTraceError("a message must be an object", place, "restore the file")
        more = message.get("extra")
        extra: dict[str, Any] = more if isinstance(more, dict) else {}
        stamp = extra.get("timestamp", message.get("timestamp"))
        moment_s = convert_row({"timestamp": stamp}, _Times, place).timestamp
        at_s = nan if moment_s is None else moment_s
        text = texts.plain(message.get("content"))
        if message.get("role") == "assistant":
            if waiting:
                yield waiting
            response = extra.get("response")
            usage = response.get("usage") if isinstance(response, dict) else None
            waiting = _Step(
                prompt="\n".join(context),
                answer=text + texts.plain(message.get("tool_calls")),
                usage=convert_row(usage if isinstance(usage, dict) else {}, _Usage, place),
                tool="bash",
                wait_s=nan,
                begin_s=before_s,
                end_s=at_s,
            )
        elif waiting:
            waiting.wait_s = at_s - waiting.end_s
        context.append(text)
        before_s = at_s
    if waiting:
        yield waiting


def _rules(steps: list[_Step], totals: _Totals, stated: float | None) -> tuple[float | None, float | None]:
    """Characters per token of prompts and of answers: as stated, else those that give the totals of the run."""
    if stated is not None:
        return stated, stated
    sent, received = sum(len(step.prompt) for step in steps), sum(len(step.answer) for step in steps)
    return (
        sent / totals.tokens_sent if sent and totals.tokens_sent else None,
        received / totals.tokens_received if received and totals.tokens_received else None,
    )


def _tokens(
    step: _Step, rules: tuple[float | None, float | None], count: Counter[str]
) -> tuple[int | None, int | None, list[int]]:
    """Prompt and output tokens, None where unknown, and the prompt's blocks where it was estimated."""
    prompt, output, chain = step.usage.prompt_tokens, step.usage.completion_tokens, []
    if prompt is None and rules[0] is not None:
        prompt, chain = texts.tokens_of(len(step.prompt), rules[0]), texts.chain_of(step.prompt, rules[0])
        count["estimated"] += 1
    if output is None and rules[1] is not None and prompt is not None:
        output = texts.tokens_of(len(step.answer), rules[1])
        count["estimated_outputs"] += 1
    return prompt, output, chain


def _remarks(count: Counter[str], chars_per_token: float | None) -> Iterator[str]:
    if count["estimated"] and chars_per_token is not None:
        yield texts.remark(chars_per_token, count["estimated"], count["estimated_outputs"])
    elif count["estimated"]:
        yield (
            f"tokens of {count['estimated']:,} prompts and {count['estimated_outputs']:,} outputs are estimated:"
            " the recorded totals of each run, spread over its steps by characters"
        )
    if count["no_wait"]:
        yield f"no tool wait is recorded for {count['no_wait']:,} calls: unknown, not 0"
