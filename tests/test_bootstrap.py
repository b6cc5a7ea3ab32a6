"""The paired moving-block bootstrap: laws of the draw, coverage, and cases computed by hand."""

import heapq

import numpy as np
import pytest

from kvfold.analysis import bootstrap
from kvfold.analysis.bootstrap import change, ci95, default_block, mean, quantile, rate
from kvfold.analysis.metrics import makespan_share_s
from tests.test_metrics import make_calls


def expanded(values, counts):
    return [np.repeat(values, row) for row in counts]


@pytest.mark.parametrize(("units", "block"), [(1, 1), (7, 1), (10, 3), (10, 10), (97, 9)])
def test_a_draw_has_as_many_units_as_the_sample_in_whole_blocks(units, block):
    counts = bootstrap._draw(np.random.default_rng(0), units, block, 3000)
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == units).all()
    # every unit is drawn once on average: no unit near the ends is rarer
    assert np.abs(counts.mean(axis=0) - 1).max() < 6 * np.sqrt(block / 3000)
    if block == units:
        assert (counts == 1).all()


def test_blocks_are_runs_of_neighbours():
    counts = bootstrap._draw(np.random.default_rng(1), 12, 4, 200)
    around = np.roll(counts, 1, axis=1)
    # three blocks start, so the counts rise by 3 at most around the circle; single draws rise by more
    assert np.maximum(counts - around, 0).sum(axis=1).max() <= 3


@pytest.mark.parametrize("holes", [False, True])
def test_statistics_are_those_of_the_expanded_sample(holes):
    rng = np.random.default_rng(2)
    values, weights = rng.lognormal(size=50), rng.lognormal(size=50)
    counts = rng.integers(0, 4, (8, 50)).astype(np.int32)
    if holes:
        values[::7] = np.nan
    samples = expanded(values, counts)
    np.testing.assert_allclose(mean(values, counts), [np.nanmean(s) for s in samples], rtol=1e-12)
    for at in (0.0, 0.5, 0.99, 1.0):
        np.testing.assert_allclose(
            quantile(at)(values, counts), [np.nanquantile(s, at) for s in samples], rtol=1e-12
        )
    if not holes:
        both = np.column_stack([values, weights])
        truth = [a.sum() / b.sum() for a, b in zip(samples, expanded(weights, counts), strict=True)]
        np.testing.assert_allclose(rate(both, counts), truth, rtol=1e-12)


def dependent_pair(rng, n, correlation):
    """A baseline with memory, as latencies in a queue have it, and a run that is 20 % faster but noisy."""
    noise = rng.normal(size=n)
    load = np.empty(n)
    load[0] = noise[0] / np.sqrt(1 - correlation**2)
    for i in range(1, n):
        load[i] = correlation * load[i - 1] + noise[i]
    baseline = 20 + load
    return baseline, 0.8 * baseline + rng.normal(size=n)


def test_coverage_of_the_mean_change_is_95_percent():
    """500 samples whose true change is -20 %: a 95 % interval must hold it in 93-97 % of them.

    With n = 400, blocks of 20 and a memory of 0.5; 1.4 points less than 93 % for the error of 500 trials.
    """
    rng = np.random.default_rng(3)
    held = 0
    for trial in range(500):
        low, high = ci95(*dependent_pair(rng, 400, 0.5), mean, seed=trial, replicates=300)
        held += low <= -0.2 <= high
    assert 0.93 - 0.014 <= held / 500 <= 0.97


def closed_loop(service_s, servers):
    """Arrivals and completions of requests of which `servers` are in flight at any time."""
    free = [0.0] * servers
    arrival, end = np.empty(len(service_s)), np.empty(len(service_s))
    for i, service in enumerate(service_s):
        arrival[i] = heapq.heappop(free)
        end[i] = arrival[i] + service
        heapq.heappush(free, end[i])
    return arrival, end


def test_coverage_of_the_change_of_a_rate_in_a_closed_loop():
    """8 in flight, service times 20 % shorter on average: the rate of tokens rises by 25 %.

    The makespan's own tail is not resampled, so 3 points less than for a mean are accepted.
    """
    rng = np.random.default_rng(10)
    held = 0
    for trial in range(200):
        service, factor = rng.lognormal(0, 0.7, 400), 0.8 + rng.uniform(-0.5, 0.5, 400)
        tokens = rng.integers(1, 300, 400).astype(float)
        runs = []
        for times in (service, service * factor):
            arrival, end = closed_loop(times, 8)
            share = makespan_share_s(make_calls(arrival, arrival, arrival, end, tokens))
            runs.append(np.column_stack([tokens, share]))
        low, high = ci95(*runs, rate, seed=trial, replicates=200)
        held += low <= 0.25 <= high
    assert 0.90 - 0.04 <= held / 200 <= 1.0


def test_blocks_see_dependence_that_single_requests_do_not():
    rng = np.random.default_rng(4)
    slow, other = dependent_pair(rng, 2000, 0.95), dependent_pair(rng, 2000, 0.95)
    single = ci95(slow[0], other[0], mean, block=1)
    blocks = ci95(slow[0], other[0], mean, block=44)
    assert blocks[1] - blocks[0] > 2 * (single[1] - single[0])


def test_pairing_removes_the_noise_that_both_runs_share():
    rng = np.random.default_rng(5)
    baseline = rng.lognormal(size=1000)
    low, high = ci95(baseline, 0.9 * baseline, mean)
    assert low == pytest.approx(-0.1, abs=1e-12)
    assert high == pytest.approx(-0.1, abs=1e-12)
    low, high = ci95(baseline, 0.9 * rng.permutation(baseline), mean)
    assert high - low > 0.05


def test_sessions_are_drawn_whole():
    rng = np.random.default_rng(6)
    session = np.repeat(rng.permutation(60), rng.integers(1, 9, 60))
    effect = rng.normal(-0.2, 0.1, 60)[session]
    baseline = np.ones(len(session))
    by_session = ci95(baseline, baseline + effect, mean, block=1, unit=session)
    by_request = ci95(baseline, baseline + effect, mean, block=1)
    assert by_session[1] - by_session[0] > 1.5 * (by_request[1] - by_request[0])
    # names of sessions do not matter, their order of appearance does
    assert by_session == ci95(baseline, baseline + effect, mean, block=1, unit=session * 1000 + 5)


def test_rate_over_makespan_shares():
    rng = np.random.default_rng(7)
    tokens, share = rng.integers(1, 300, 800).astype(float), rng.exponential(1.0, 800)
    baseline, value = np.column_stack([tokens, share]), np.column_stack([tokens, share / 1.25])
    assert change(baseline, value, rate) == pytest.approx(0.25)
    low, high = ci95(baseline, value, rate)
    assert low == pytest.approx(0.25)
    assert high == pytest.approx(0.25)


def test_same_arguments_same_bits_other_seed_other_bits():
    baseline, value = dependent_pair(np.random.default_rng(8), 500, 0.5)
    assert ci95(baseline, value, quantile(0.95), seed=1) == ci95(baseline, value, quantile(0.95), seed=1)
    assert ci95(baseline, value, quantile(0.95), seed=1) != ci95(baseline, value, quantile(0.95), seed=2)


def test_the_change_lies_in_its_interval():
    baseline, value = dependent_pair(np.random.default_rng(9), 500, 0.5)
    for statistic in (mean, quantile(0.5), quantile(0.99)):
        low, high = ci95(baseline, value, statistic)
        assert low <= change(baseline, value, statistic) <= high


def test_undefined_changes_are_none():
    ones, zeros, hole = np.ones(100), np.zeros(100), np.full(100, np.nan)
    assert change(ones, ones * 2, mean) == 1.0
    assert change(zeros, ones, mean) is None
    assert change(hole, ones, quantile(0.5)) is None
    assert ci95(zeros, ones, mean) is None
    assert ci95(ones, hole, quantile(0.5)) is None
    assert ci95(np.ones(bootstrap.MIN_UNITS - 1), np.ones(bootstrap.MIN_UNITS - 1), mean) is None
    assert ci95(ones, ones, mean, unit=np.zeros(100, int)) is None


def test_arguments_are_checked():
    ones = np.ones(50)
    with pytest.raises(ValueError, match="one value per request, got 50 and 49"):
        ci95(ones, ones[1:], mean)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ci95(ones, ones, mean, block=0)
    assert default_block(10_000) == 100
    assert default_block(0) == 1
