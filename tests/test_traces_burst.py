"""Burstiness by hand, of a Poisson stream, and of the real traces against their published figures."""

import numpy as np
import pytest

from kvfold.traces.burst import burst, gap_cv
from kvfold.traces.columns import assemble
from kvfold.traces.load import load
from kvfold.traces.stats import inspect
from kvfold.traces.table import Meta


def test_counts_by_hand():
    found = burst(np.array([10.0, 10.1, 10.2, 13.5]), 1.0)
    # windows from the first arrival: 3, 0, 0, 1
    assert found.dispersion == pytest.approx(np.var([3, 0, 0, 1]) / 1.0)
    assert found.peak_over_mean == 3


@pytest.mark.parametrize("arrival_s", [[], [5.0], [5.0, 5.5]])
def test_fewer_than_two_windows_say_nothing(arrival_s):
    found = burst(np.array(arrival_s), 1.0)
    assert np.isnan([found.dispersion, found.peak_over_mean]).all()


def test_a_clock_that_ticks_evenly_has_no_dispersion():
    arrival_s = np.arange(0, 100, 0.25)
    assert burst(arrival_s, 1.0).dispersion == pytest.approx(0)
    assert gap_cv(arrival_s) == pytest.approx(0)
    assert np.isnan(gap_cv(np.array([3.0, 3.0])))


@pytest.mark.parametrize(
    ("file", "gap", "second", "minute", "peak"),
    [
        ("azure-llm-2023/AzureLLMInferenceTrace_code.csv", 13.2, 13.2, 161, 4.2),
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 1.09, 1.4, 20.6, 1.5),
        ("mooncake-fast25/conversation_trace.jsonl", 3.03, 7.9, 2.9, 1.2),
    ],
)
def test_published_figures_of_the_real_traces(shared_data, file, gap, second, minute, peak):
    summary = inspect(load(shared_data / "traces" / file))
    found = [summary[name] for name in ("interarrival_cv", "dispersion_1_s", "dispersion_60_s")]
    np.testing.assert_allclose(found, (gap, second, minute), rtol=0.02)
    assert summary["peak_over_mean_60_s"] == pytest.approx(peak, abs=0.05)


def made(arrival_s, output_tokens=5):
    rows = len(arrival_s)
    columns = {
        "arrival_time_s": arrival_s,
        "input_tokens": np.ones(rows),
        "output_tokens": np.full(rows, output_tokens),
    }
    return inspect(assemble(Meta("made", "made", "", "s", rows_read=rows, rows_kept=rows), columns))


def test_arrivals_that_say_nothing_are_warned_of():
    """A coarse clock, arrivals made at equal gaps, calls without output: each has its own line."""
    assert any("clock is coarse" in text for text in made(np.repeat(np.arange(50.0), 5))["warnings"])
    assert any("arrivals look made up" in text for text in made(np.arange(250.0))["warnings"])
    assert any("output_tokens is 0 on 250 calls" in text for text in made(np.arange(250.0), 0)["warnings"])
    fine = made(np.cumsum(1 + np.arange(250) % 7))["warnings"]
    assert not any("coarse" in text or "made up" in text for text in fine)
