"""Reports of GuideLLM: one JSON object, requests of each benchmark by outcome, epoch seconds.

Source: github.com/vllm-project/guidellm, ``schemas/request_stats.py`` and ``schemas/info.py``. A report may leave
its requests out (``sample_size`` 0). The rows are what a benchmark sent, with the latencies that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from typing import BinaryIO

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import UTF8_BOM, Seconds, Tokens, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Trace


class _Timings(msgspec.Struct):
    request_start: Seconds | None = None
    request_end: Seconds | None = None
    first_iteration: Seconds | None = None
    resolve_start: Seconds | None = None


class _Info(msgspec.Struct):
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Request(msgspec.Struct):
    request_id: str = ""
    info: _Info = msgspec.field(default_factory=_Info)
    prompt_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class _Requests(msgspec.Struct):
    successful: list[_Request] = []
    errored: list[_Request] = []
    incomplete: list[_Request] = []


class _Benchmark(msgspec.Struct):
    requests: _Requests


class _Report(msgspec.Struct):
    benchmarks: list[_Benchmark]


def read(stream: BinaryIO, source: str) -> Trace:
    """The successful requests of a report's one benchmark with rows. Raises BadTraceError."""
    report = decode_json(msgspec.json.Decoder(_Report), stream.read().removeprefix(UTF8_BOM), source, 1)
    filled = [at for at, benchmark in enumerate(report.benchmarks, 1) if benchmark.requests.successful]
    if len(filled) != 1:
        rule = f"one benchmark of {len(report.benchmarks)} must hold successful requests, got {len(filled)}"
        mend = (
            "keep them all in the report (no sample size)" if not filled else "write one benchmark a report"
        )
        raise BadTraceError(rule, f"{source}:1", mend)
    requests = report.benchmarks[filled[0] - 1].requests
    calls = Calls(source)
    for number, (outcome, request) in calls.reading(enumerate(_by_outcome(requests), 1)):
        place = f"{source}:1 (benchmark {filled[0]}, request {number})"
        prompt = request.prompt_tokens if request.prompt_tokens is not None else request.input_tokens
        times = request.info.timings
        start_s = times.request_start if times.request_start is not None else times.resolve_start
        if outcome:
            calls.drop(outcome)
        elif start_s is None:
            calls.drop("no_timestamp")
        elif not prompt:
            calls.drop("no_token_counts" if prompt is None else "zero_input_tokens")
        else:
            calls.add(
                place,
                number,
                start_s,
                prompt,
                -1 if request.output_tokens is None else request.output_tokens,
                e2e_s=nan if times.request_end is None else max(0.0, times.request_end - start_s),
                ttft_s=nan if times.first_iteration is None else max(0.0, times.first_iteration - start_s),
                status="ok",
                name=request.request_id,
            )
    calls.warnings.append(
        "arrivals are when the benchmark's client sent, after any wait for its concurrency limit"
    )
    return calls.trace("guidellm", "s", time_zone="UTC")


def _by_outcome(requests: _Requests) -> Iterator[tuple[str, _Request]]:
    for outcome, several in (
        ("", requests.successful),
        ("failed", requests.errored),
        ("cancelled", requests.incomplete),
    ):
        for request in several:
            yield outcome, request
