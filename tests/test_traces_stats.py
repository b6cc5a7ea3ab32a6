"""The summary against figures by hand, and its arithmetic against the schema's own check."""

import numpy as np
import pytest

from kvfold.traces import synth
from kvfold.traces.columns import KIND, assemble
from kvfold.traces.errors import BadTraceError
from kvfold.traces.load import load
from kvfold.traces.stats import inspect, quantiles
from kvfold.traces.table import Meta


def made(clock: str = "common", **columns) -> dict:
    meta = Meta(
        "made",
        "made",
        "",
        "s",
        clock=clock,
        rows_read=len(columns["input_tokens"]),
        rows_kept=len(columns["input_tokens"]),
    )
    return inspect(assemble(meta, columns))


def test_a_trace_by_hand():
    summary = made(
        arrival_time_s=[0.0, 1.0, 4.0, 4.0],
        input_tokens=[10, 20, 30, 40],
        output_tokens=[1, -1, 3, 5],
        session_id=[0, 0, 0, 1],
        wait_before_s=[np.nan, 3.0, 7.0, np.nan],
        wait_kind=[KIND["none"], KIND["tool"], KIND["human"], KIND["tool"]],
    )
    assert (summary["span_s"], summary["rate_per_s"], summary["sessions"]) == (4.0, 1.0, 2)
    gaps = np.array([1.0, 3.0, 0.0])
    assert summary["interarrival_cv"] == pytest.approx(gaps.std() / gaps.mean())
    expected = {"n": 4, "mean": 25, "p50": 25, "p90": 37, "p95": 38.5, "p99": 39.7, "max": 40}
    assert summary["input_tokens"] == pytest.approx(expected)
    assert (summary["output_tokens"]["n"], summary["output_tokens"]["mean"]) == (3, 3.0)
    assert (summary["calls_per_session"]["max"], summary["calls_per_session"]["mean"]) == (3, 2.0)
    assert (summary["tool_wait_s"]["n"], summary["human_wait_s"]["p50"]) == (1, 7.0)
    assert summary["block_size_tokens"] is None
    assert np.isnan(summary["prefix_hit_token_share"])


def test_a_session_clock_has_no_rate():
    summary = made(clock="session", arrival_time_s=[0.0, 1.0], input_tokens=[10, 20])
    assert np.isnan([summary["span_s"], summary["rate_per_s"], summary["interarrival_cv"]]).all()


def test_no_values_have_no_quantiles():
    empty = quantiles(np.empty(0))
    assert empty.pop("n") == 0
    assert all(np.isnan(value) for value in empty.values())


def test_rows_that_do_not_add_up_cannot_exist():
    with pytest.raises(BadTraceError, match="rows_read must equal rows_kept"):
        Meta("made", "made", "", "s", rows_read=3, rows_kept=1, drops={"zero_input_tokens": 1})


@pytest.mark.parametrize(
    ("file", "rate_per_s", "cv", "inputs", "outputs"),
    [
        (
            "azure-llm-2023/AzureLLMInferenceTrace_code.csv",
            2.57,
            13.2,
            (1469, 5188, 7436, 7437),
            (13, 55, 251, 1899),
        ),
        (
            "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
            5.53,
            1.09,
            (1020, 2734.5, 4142, 14050),
            (129, 424, 601, 1000),
        ),
        (
            "mooncake-fast25/conversation_trace.jsonl",
            3.40,
            3.03,
            (6909, 27367, 85400, 126195),
            (350, 597, 1118.5, 2000),
        ),
    ],
)
def test_published_figures_of_the_real_traces(shared_data, file, rate_per_s, cv, inputs, outputs):
    summary = inspect(load(shared_data / "traces" / file))
    assert summary["rate_per_s"] == pytest.approx(rate_per_s, abs=0.006)
    assert summary["interarrival_cv"] == pytest.approx(cv, rel=0.005)
    for name, expected in (("input_tokens", inputs), ("output_tokens", outputs)):
        found = [summary[name][key] for key in ("p50", "p90", "p99", "max")]
        np.testing.assert_allclose(found, expected, atol=0.5)


def test_poisson_gaps_have_a_variation_of_one():
    summary = inspect(synth.poisson(20_000, 8.0, 1000, 200, seed=3))
    # relative standard errors at n = 20,000: rate 1/sqrt(n), CV of exponential gaps 1/sqrt(n); 4 sigma = 0.028
    assert summary["rate_per_s"] == pytest.approx(8.0, rel=0.028)
    assert summary["interarrival_cv"] == pytest.approx(1.0, rel=0.028)
