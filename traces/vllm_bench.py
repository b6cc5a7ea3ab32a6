"""Results of ``vllm bench serve --save-result --save-detailed``: one JSON object with a list per quantity.

Source: github.com/vllm-project/vllm, ``vllm/benchmarks/serve.py``: ``input_lens``, ``output_lens``, ``ttfts``,
``itls`` and ``start_times`` in seconds of the client's clock, later also ``latencies``. A request with an entry in
``errors`` failed: what it would have produced is unknown. The requests were sent at the benchmark's own rate,
so this is load as it was offered then, with the latencies that the engine had.
"""

from __future__ import annotations

from math import nan
from typing import BinaryIO

import msgspec

from kvfold.traces.calls import Calls
from kvfold.traces.decode import UTF8_BOM, Seconds, Tokens, decode_json
from kvfold.traces.errors import BadTraceError
from kvfold.traces.table import Trace


class _Result(msgspec.Struct):
    input_lens: list[Tokens]
    output_lens: list[Tokens]
    ttfts: list[Seconds]
    itls: list[list[Seconds]] = []
    start_times: list[Seconds] = []
    latencies: list[Seconds] = []
    errors: list[str | None] = []
    model_id: str = ""


def read(stream: BinaryIO, source: str) -> Trace:
    """The requests of one result. Raises BadTraceError, also where it has no start times."""
    result = decode_json(msgspec.json.Decoder(_Result), stream.read().removeprefix(UTF8_BOM), source, 1)
    if result.input_lens and not result.start_times:
        rule = "a trace needs arrival times, but the result has no start_times"
        raise BadTraceError(
            rule, f"{source}:1", "run the benchmark again with --save-detailed and a newer vLLM"
        )
    for name in ("output_lens", "ttfts", "itls", "start_times", "latencies", "errors"):
        length = len(getattr(result, name))
        if length != len(result.input_lens) and (length or name in ("output_lens", "ttfts")):
            rule = f"{name} must have as many entries as input_lens ({len(result.input_lens)}), got {length}"
            raise BadTraceError(rule, f"{source}:1", "restore the file")
    calls = Calls(source)
    for at in calls.reading(range(len(result.input_lens))):
        if result.errors and result.errors[at]:
            calls.drop("failed")
        elif not result.input_lens[at]:
            calls.drop("zero_input_tokens")
        else:
            calls.add(
                f"{source}:1 (request {at + 1})",
                at + 1,
                result.start_times[at],
                result.input_lens[at],
                result.output_lens[at],
                ttft_s=result.ttfts[at] or nan,
                e2e_s=_latency_s(result, at),
                status="ok",
                model=result.model_id,
            )
    calls.warnings.append(
        "arrivals are when the benchmark's client sent, after any wait for its concurrency limit"
    )
    return calls.trace("vllm-bench", "s")


def _latency_s(result: _Result, at: int) -> float:
    if result.latencies:
        return result.latencies[at] or nan
    return result.ttfts[at] + sum(result.itls[at]) if result.itls and result.ttfts[at] else nan
