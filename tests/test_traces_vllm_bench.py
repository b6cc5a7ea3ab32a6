"""Results of vLLM's benchmark: lists of one length, failures by name, arrivals or no trace."""

import io
import json

import numpy as np
import pytest

from kvfold.traces import vllm_bench
from kvfold.traces.errors import BadTraceError
from tests.example_logs import BENCH


def read(**changes):
    return vllm_bench.read(io.BytesIO(json.dumps(BENCH | changes).encode()), "r.json")


def test_requests_by_start_with_their_latencies():
    trace = read()
    assert trace.arrival_time_s.tolist() == [0, 0.5]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([20, 10], [2, 3])
    np.testing.assert_allclose(trace.recorded_e2e_s, [0.75, 0.7])  # TTFT and all gaps between tokens
    assert trace.recorded_ttft_s.tolist() == [0.25, 0.5]
    assert read(latencies=[0.9, 0.8]).recorded_e2e_s.tolist() == [0.8, 0.9]


def test_failed_requests_are_dropped_by_name():
    trace = read(errors=["boom", ""])
    assert (trace.meta.rows_read, trace.meta.drops) == (2, {"failed": 1})
    assert trace.input_tokens.tolist() == [20]


def test_a_latency_of_zero_is_unknown():
    assert np.isnan(read(ttfts=[0.0, 0.25], itls=[]).recorded_ttft_s).tolist() == [False, True]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"start_times": []}, "the result has no start_times"),
        ({"output_lens": [3]}, "output_lens must have as many entries as input_lens .2., got 1"),
        ({"errors": ["", "", ""]}, "errors must have as many entries"),
        ({"ttfts": None}, "ttfts: expected array, got null"),
        ({"input_lens": [10, -1]}, "input_lens.1.: expected int >= 0, got -1"),
        (
            {"input_lens": [], "output_lens": [], "ttfts": [], "itls": [], "start_times": [], "errors": []},
            "no rows",
        ),
    ],
)
def test_a_bad_result_is_named(changes, rule):
    with pytest.raises(BadTraceError, match=rule) as caught:
        read(**changes)
    assert caught.value.mend
