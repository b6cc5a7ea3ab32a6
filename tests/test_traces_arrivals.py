"""Arrivals of on-off clients against the closed form of their dispersion; a Poisson stream as the limit."""

import numpy as np
import pytest

from kvfold.traces.arrivals import Clients, fitted
from kvfold.traces.burst import burst, gap_cv

AZURE = fitted(5.53, (1, 1.4), (60, 20.6), count=20, longest_memory_s=350)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dispersion_is_that_of_the_formula(seed):
    clients = Clients(20.0, active_share=0.4, memory_s=5.0, count=10)
    arrival_s, _ = clients.arrivals(400_000, seed)
    # 20,000 windows of 1 s, 333 of 60 s: relative standard error sqrt(2 / n), longer for their correlation
    for window_s, error in ((1.0, 0.05), (10.0, 0.12), (60.0, 0.25)):
        measured = burst(arrival_s, window_s).dispersion
        assert measured == pytest.approx(clients.index_of_dispersion(window_s), rel=error)


def test_the_formula_at_its_ends():
    clients = Clients(3.0, active_share=0.25, memory_s=50.0, count=1)
    c = 3.0 * 0.75 / 0.25
    assert clients.dispersion_per_s == pytest.approx(c)
    assert clients.index_of_dispersion(1e-6) == pytest.approx(1 + c * 1e-6, rel=1e-9)
    assert clients.index_of_dispersion(1e9) == pytest.approx(1 + 2 * c * 50, rel=1e-6)
    assert Clients(3.0).index_of_dispersion(60.0) == 1
    slow = Clients(3.0, active_share=0.25, memory_s=1e6, count=1)  # 90 s: c w (1 - x / 3 + ...) at x = 9e-5
    assert slow.index_of_dispersion(90.0) - 1 == pytest.approx(c * 90 * (1 - 3e-5), rel=2e-9)


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_always_active_are_a_poisson_stream(seed):
    arrival_s, client = Clients(8.0).arrivals(50_000, seed)
    assert gap_cv(arrival_s) == pytest.approx(1, abs=4 / np.sqrt(50_000))
    # 6,250 windows: standard error of the index sqrt(2 / n) = 0.018
    assert burst(arrival_s, 1.0).dispersion == pytest.approx(1, abs=0.072)
    shares = np.bincount(client) / len(client)
    assert shares[:3] == pytest.approx(shares[0] / np.arange(1, 4), rel=0.05)


def test_two_dispersions_are_met():
    assert AZURE.index_of_dispersion(1) == pytest.approx(1.4, rel=1e-6)
    assert AZURE.index_of_dispersion(60) == pytest.approx(20.6, rel=1e-6)


def test_dispersions_that_no_clients_have():
    poisson = fitted(1.0, (1, 1.1), (60, 0.9), 20, 300)
    assert poisson.active_share == 1
    rough = fitted(1.0, (1, 5.0), (60, 1.2), 20, 300)  # rougher in short windows than in long ones
    assert rough.index_of_dispersion(60) == pytest.approx(1.2)
    assert 1 < rough.index_of_dispersion(1) <= 1.2
    smooth = fitted(1.0, (1, 0.9), (60, 20.0), 20, 300)
    assert smooth.memory_s == pytest.approx(300, rel=1e-6)


@pytest.mark.parametrize("count", [1, 7, 5_000])
def test_count_rate_and_order_are_exact(count):
    arrival_s, client = AZURE.arrivals(count, 4)
    assert len(arrival_s) == len(client) == count
    assert (np.diff(arrival_s) >= 0).all()
    assert arrival_s[-1] == pytest.approx(count / 5.53)
    assert arrival_s[0] > 0
    again, _ = AZURE.arrivals(count, 4)
    assert (arrival_s == again).all()
    assert count == 1 or not np.array_equal(arrival_s, AZURE.arrivals(count, 5)[0])


@pytest.mark.parametrize(
    "bad",
    [
        dict(rate_per_s=0),
        dict(rate_per_s=float("inf")),
        dict(rate_per_s=1, active_share=0),
        dict(rate_per_s=1, active_share=1.1),
        dict(rate_per_s=1, memory_s=0),
        dict(rate_per_s=1, count=0),
    ],
)
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        Clients(**bad)
