"""GuideLLM reports: requests by outcome; a report that left them out is refused."""

import io
import json

import pytest

from kvfold.traces import guidellm
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from tests.example_logs import GUIDELLM_REQUEST as REQUEST


def read(*benchmarks: dict):
    document = {"metadata": {"version": 2}, "benchmarks": [{"requests": requests} for requests in benchmarks]}
    return guidellm.read(io.BytesIO(json.dumps(document).encode()), "g.json")


def test_requests_by_outcome():
    later = REQUEST | {"request_id": "q", "info": {"timings": {"resolve_start": 7.0}}, "output_tokens": None}
    trace = read(
        {"successful": [later, REQUEST], "errored": [{"request_id": "x"}], "incomplete": [{}], "total": None}
    )
    assert trace.meta.drops == {"cancelled": 1, "failed": 1}
    assert trace.source_id == ["r", "q"]
    assert trace.arrival_time_s.tolist() == [0, 2]
    assert trace.output_tokens.tolist() == [4, -1]
    assert (trace.recorded_e2e_s[0], trace.recorded_ttft_s[0]) == (1.5, 0.25)


def test_requests_without_time_or_counts_have_a_name_each():
    trace = read({"successful": [REQUEST, REQUEST | {"info": {}}, REQUEST | {"prompt_tokens": None}]})
    assert trace.meta.drops == {"no_timestamp": 1, "no_token_counts": 1}


def test_two_benchmarks_are_not_mixed():
    with pytest.raises(BadTraceError, match="one benchmark of 2 must hold successful requests, got 2"):
        read({"successful": [REQUEST]}, {"successful": [REQUEST]})


def test_the_real_report_left_its_requests_out(shared_data):
    with pytest.raises(
        BadTraceError, match="one benchmark of 2 must hold successful requests, got 0"
    ) as caught:
        load(shared_data / "traces/misc-formats/guidellm_report_v2.json")
    assert "sample size" in caught.value.mend
