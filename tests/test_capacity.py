"""The change of the highest load: t interval over several searches."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvfold.analysis.capacity import _T95, capacity
from kvfold.analysis.search import Found, Outcome


def found(load, failed=None, exhausted=False):
    best = Outcome(load, SimpleNamespace(), 1.0) if load else None
    return Found(best, failed, (best,) if best else (), exhausted)


def test_one_search_gives_a_change_and_no_interval():
    result = capacity([found(10.0, 10.3)], [found(12.0, 12.3)])
    assert result.change == pytest.approx(0.2)
    assert result.ci95 is None
    assert (result.baseline, result.value, result.searches) == (10.0, 12.0, 2)
    assert result.resolution == pytest.approx(0.03)


def test_a_load_that_is_no_limit_gives_no_change():
    result = capacity([found(10.0, 10.3)], [found(64.0, exhausted=True)])
    assert result.change is None
    assert result.ci95 is None
    assert result.exhausted
    assert np.isnan(result.resolution)
    assert capacity([found(None, 1.0)], [found(2.0, 2.1)]).baseline is None


def test_interval_over_seeds_covers_the_true_ratio():
    """95 % t intervals on made-up searches whose ratio is known cover it about as often as they say."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        base = rng.lognormal(0, 0.3, 5)
        after = 1.25 * base * rng.lognormal(0, 0.1, 5)
        low, high = capacity([found(x, 2 * x) for x in base], [found(x, 2 * x) for x in after]).ci95
        covered += low <= 0.25 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_student_quantiles():
    """The table against draws: |t| with k degrees of freedom stays below its quantile 95 % of the time."""
    rng = np.random.default_rng(1)
    for degrees, quantile in enumerate(_T95[:9], start=1):
        sample = rng.normal(size=(200_000, degrees + 1))
        t = sample.mean(axis=1) / (sample.std(axis=1, ddof=1) / np.sqrt(degrees + 1))
        assert np.mean(np.abs(t) <= quantile) == pytest.approx(0.95, abs=0.002)
