"""ServeGen's clients: the files as they are, and requests whose rates, shapes and lengths follow them."""

import json

import numpy as np
import pytest

from kvfold.traces.errors import BadTraceError
from kvfold.traces.servegen import _arrivals, read_clients, servegen

LENGTHS = {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{10: 1.0}"}


def client(
    folder,
    name="chunk-1",
    rows=("0,4,1,Gamma,1,0.25", "600,0,0,,0,0", "1200,8,2,Gamma,0.25,0.5"),
    lengths=None,
):
    (folder / f"{name}-trace.csv").write_bytes("\r\n".join(rows).encode())
    (folder / f"{name}-dataset.json").write_text(json.dumps(lengths or {"0": LENGTHS}))


def test_the_rate_of_each_window_is_kept(tmp_path):
    client(tmp_path)
    arrivals_s = _arrivals(next(read_clients(tmp_path)), 0, 1800, 1.0, np.random.default_rng(1))
    counts = np.histogram(arrivals_s, [0, 600, 1200, 1800])[0]
    assert counts[1] == 0
    # a renewal process counts with variance n / shape over the long run: 4 sigma of 2,400 and of 4,800 with CV 2
    assert abs(counts[0] - 2400) < 4 * np.sqrt(2400)
    assert abs(counts[2] - 4800) < 4 * np.sqrt(4 * 4800)


@pytest.mark.parametrize(("shape", "cv"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_gaps_have_the_cv_of_their_shape(tmp_path, shape, cv):
    client(tmp_path, rows=(f"0,20,{cv},Gamma,{shape},1", f"3600,20,{cv},Gamma,{shape},1"))
    gaps = np.diff(servegen(tmp_path, 3, duration_s=7200).arrival_time_s)
    assert len(gaps) > 100_000
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize("pattern", ["Gamma", "Weibull"])
def test_a_short_span_expects_its_rate(tmp_path, pattern):
    """A process that began long before has n arrivals in a span on average, however bursty (Cox, 1962)."""
    client(
        tmp_path, rows=(f"0,0.5,2,{pattern},0.3,1", f"10,0.5,2,{pattern},0.3,1", f"20,0.5,2,{pattern},0.3,1")
    )
    one = next(read_clients(tmp_path))
    counts = [len(_arrivals(one, 0, 30, 1.0, np.random.default_rng(seed))) for seed in range(4000)]
    assert np.mean(counts) == pytest.approx(15, abs=4 * np.std(counts) / np.sqrt(4000))


def test_gaps_run_across_windows(tmp_path):
    """Two arrivals a window; a gap that began anew in each window would have a CV of 1.6 instead of 2."""
    rows = tuple(f"{at * 100},0.02,2,Gamma,0.25,1" for at in range(20_000))
    client(tmp_path, rows=rows)
    gaps = np.diff(_arrivals(next(read_clients(tmp_path)), 0, 2_000_000, 1.0, np.random.default_rng(1)))
    assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.04)


def test_weibull_gaps_have_the_mean_of_the_rate(tmp_path):
    client(tmp_path, rows=("0,10,9,Weibull,0.5,1", "3600,10,9,Weibull,0.5,1"))
    gaps = np.diff(servegen(tmp_path, 3, duration_s=7200).arrival_time_s)
    assert gaps.mean() == pytest.approx(0.1, rel=0.04)  # 4 sigma of 72,000 gaps of CV sqrt(5)
    assert gaps.std() / gaps.mean() == pytest.approx(np.sqrt(5), rel=0.05)


def test_lengths_follow_their_table_and_the_nearest_one_where_there_is_none(tmp_path):
    other = {"input_tokens": "{7: 1.0}", "output_tokens": "{1: 1.0}", "reason_ratio": "{0.5: 1.0}"}
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    client(tmp_path, lengths={"0": LENGTHS, "600": empty, "1200": other})
    trace = servegen(tmp_path, 1, duration_s=1800)
    early = (
        trace.arrival_time_s < 900
    )  # the first window of lengths ends at 600 s, the next arrival is at 1,200 s
    assert np.mean(trace.input_tokens[early] == 100) == pytest.approx(0.5, abs=0.05)
    assert set(trace.input_tokens[~early].tolist()) == {7}
    assert set(trace.reasoning_tokens[early].tolist()) == {-1}
    assert set(trace.reasoning_tokens[~early].tolist()) == {0}  # half of one token, to even


def test_borrowed_lengths_are_counted(tmp_path):
    client(tmp_path, lengths={"0": LENGTHS, "600": LENGTHS})
    trace = servegen(tmp_path, 1, duration_s=1800)
    rng = np.random.default_rng(1).spawn(1)[0]
    late = int((_arrivals(next(read_clients(tmp_path)), 0, 1800, 1.0, rng) >= 1200).sum())
    assert any(
        line.startswith(f"{late:,} requests fall into windows without lengths")
        for line in trace.meta.warnings
    )


def test_the_rate_can_be_stated_and_seeds_repeat(tmp_path):
    client(tmp_path)
    client(tmp_path, "chunk-2")
    trace = servegen(tmp_path, 5, duration_s=1800, rate_per_s=1.0)
    assert len(trace) == pytest.approx(1800, rel=0.15)
    assert sorted(set(trace.tenant)) == ["chunk-1", "chunk-2"]
    again = servegen(tmp_path, 5, duration_s=1800, rate_per_s=1.0)
    assert again.arrival_time_s.tolist() == trace.arrival_time_s.tolist()
    assert (
        servegen(tmp_path, 6, duration_s=1800, rate_per_s=1.0).arrival_time_s.tolist()
        != trace.arrival_time_s.tolist()
    )
    assert (np.diff(trace.arrival_time_s) >= 0).all()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"start_s": 600, "duration_s": 600}, "but all are idle"),
        ({"rate_per_s": 1e9}, "from 1 to 100,000,000 requests"),
    ],
)
def test_arguments_that_make_no_load_are_refused(tmp_path, arguments, rule):
    client(tmp_path)
    with pytest.raises(ValueError, match=rule):
        servegen(tmp_path, 1, **arguments)


@pytest.mark.parametrize(
    ("change", "rule", "place"),
    [
        ({"rows": ("0,4,1,Gamma,1", "600,4,1,Gamma,1")}, "a window must have 6 cells", "chunk-1-trace.csv:1"),
        ({"rows": ("0,4,1,Gamma,1,1", "0,4,1,Gamma,1,1")}, "in order of time", "chunk-1-trace.csv:2"),
        (
            {"rows": ("0,4,1,Pareto,1,1", "600,4,1,Gamma,1,1")},
            "the pattern Gamma or Weibull",
            "chunk-1-trace.csv:1",
        ),
        ({"rows": ("0,nan,1,Gamma,1,1", "600,4,1,Gamma,1,1")}, "rate_per_s", "chunk-1-trace.csv:1"),
        ({"rows": ("0,4,1,Gamma,1,1",)}, "two windows or more", "chunk-1-trace.csv:1"),
        (
            {"lengths": {"0": LENGTHS | {"input_tokens": "{1: 0.4}"}}},
            "sum to 1, got a sum of 0.4",
            "chunk-1-dataset.json:1",
        ),
        (
            {"lengths": {"0": LENGTHS | {"input_tokens": "{-1: 1}"}}},
            "must be 0 or more",
            "chunk-1-dataset.json:1",
        ),
        (
            {"lengths": {"0": LENGTHS | {"input_tokens": "__import__('os')"}}},
            "text of a dictionary",
            "chunk-1-dataset",
        ),
        (
            {"lengths": {"0": LENGTHS | {"input_tokens": "(" * 9999}}},
            "text of a dictionary",
            "chunk-1-dataset",
        ),
        ({"lengths": {"0": {}}}, "lengths in one window or more", "chunk-1-dataset.json:1"),
    ],
)
def test_a_bad_file_is_named(tmp_path, change, rule, place):
    client(tmp_path, **change)
    with pytest.raises(BadTraceError, match=rule) as caught:
        list(read_clients(tmp_path))
    assert place in caught.value.place


def test_a_missing_half_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(BadTraceError, match="got no such files"):
        servegen(tmp_path, 1)
    client(tmp_path)
    (tmp_path / "chunk-1-dataset.json").unlink()
    with pytest.raises(BadTraceError, match="a client needs both files"):
        servegen(tmp_path, 1)


def test_the_real_clients(shared_data):
    clients = list(read_clients(shared_data / "traces/servegen-clients"))
    assert (len(clients), sum(len(one.windows) for one in clients)) == (17, 26_784)
    windows = {len(one.windows) for one in clients if one.name.startswith("language")}
    assert windows == {2_016}
    patterns = [window.pattern for one in clients for window in one.windows]
    assert (patterns.count("Gamma"), patterns.count("Weibull"), patterns.count("")) == (6_734, 5_731, 14_319)
    gammas = [window for one in clients for window in one.windows if window.pattern == "Gamma"]
    assert max(abs(window.cv * np.sqrt(window.shape) - 1) for window in gammas) < 1e-6


def test_a_real_hour(shared_data):
    folder = shared_data / "traces/servegen-clients/reason/deepseek-r1"
    trace = servegen(folder, 1, start_s=36_000, duration_s=1_800)
    assert len(trace) == pytest.approx(15_039, rel=0.15)
    assert (trace.reasoning_tokens <= trace.output_tokens).all()
    assert trace.meta.rows_read == len(trace) + sum(trace.meta.drops.values())
