"""Quantile tables against quadrature and their samples; streams that do not depend on each other."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.traces.draws import Quantiles, chosen, draws, stream, uniforms, zipf_shares

values = st.lists(st.floats(0, 1e6), min_size=2, max_size=8).map(sorted)


def table(knots):
    return Quantiles(tuple(zip(np.linspace(0, 1, len(knots)).tolist(), knots, strict=True)))


@given(values)
def test_the_mean_is_that_of_the_draws(knots):
    made = table(knots)
    shares = (np.arange(200_000) + 0.5) / 200_000
    # midpoint rule: the error is the curvature of exp over 24 n^2, far below this
    assert made.mean() == pytest.approx(made.at(shares).mean(), rel=1e-4, abs=1e-6)


@given(values, st.floats(0, 1))
def test_shares_and_values_are_inverse(knots, share):
    made = table(knots)
    value = made.value(share)
    assert made.share_of(value) >= share - 1e-6 or value == knots[0]
    assert knots[0] - 1e-9 <= value <= knots[-1] * (1 + 1e-9) + 1e-9


def test_knots_are_met_and_zero_is_allowed():
    made = Quantiles(((0, 0), (0.25, 0), (0.5, 3), (1, 99)))
    assert made.at(np.array([0, 0.2, 0.5, 1])) == pytest.approx([0, 0, 3, 99])
    assert made.value(0.75) == pytest.approx(19)  # 1 + value doubles every octave: sqrt(4 * 100) - 1


@pytest.mark.parametrize(
    "knots", [((0, 1), (0.5, 2)), ((0, 2), (1, 1)), ((0, -1), (1, 1)), ((0, 1), (0, 2), (1, 3))]
)
def test_knots_that_do_not_rise_are_refused(knots):
    with pytest.raises(ValueError, match="must rise over shares"):
        Quantiles(knots)


def test_a_sample_gives_its_quantiles_and_its_mean():
    sample = np.exp(2.5 + 1.5 * stream(1, "normal").standard_normal(20_000))
    made = Quantiles.of(sample)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert made.value(share) == pytest.approx(np.quantile(sample, share), rel=1e-9)
    assert made.mean() == pytest.approx(sample.mean(), rel=1e-6)
    assert Quantiles.of(np.full(7, 5)).mean() == pytest.approx(5)
    with pytest.raises(ValueError, match="need a sample"):
        Quantiles.of(np.empty(0))


def test_a_cap_changes_nothing_below_it():
    made = Quantiles(((0, 1), (0.5, 10), (1, 1_000)))
    capped = made.up_to(100)
    assert capped.value(0.5) == made.value(0.5)
    assert capped.value(1.0) == pytest.approx(100)


def test_streams_depend_on_seed_and_name_alone():
    def head(*names):
        return list(islice(uniforms(7, *names), 5))

    assert head("waits") == head("waits")
    assert head("waits") != head("tokens") != head("waits", 1) != head("waits", 2)
    assert list(islice(uniforms(8, "waits"), 5)) != head("waits")
    made = Quantiles(((0, 1), (1, 9)))
    assert list(islice(draws(made, 7, "waits"), 5)) == made.at(np.array(head("waits"))).tolist()


def test_choice_by_shares():
    assert [chosen((0.25, 0.5, 0.25), at) for at in (0, 0.24, 0.25, 0.74, 0.75, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert chosen((0.3, 0.3), 0.99) == 1  # shares that miss 1 by rounding
    assert zipf_shares(4, 0).tolist() == [0.25] * 4
    assert zipf_shares(2, 1).tolist() == pytest.approx([2 / 3, 1 / 3])
