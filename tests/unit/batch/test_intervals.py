"""Means and differences with their intervals, against the examples in the methods' publications."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.batch.intervals import Z, difference, estimate, newcombe, student, t_quantile, wilson

# Student 1908, hours of sleep that ten patients gained by each of two drugs; the limits are those of R's t.test.
SLEEP_1 = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SLEEP_2 = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


def test_shares_get_wilsons_interval() -> None:
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 10), (10, 10), 0.6075, 1.0),
    ],
    ids=["many", "few", "all-and-none"],
)
def test_differences_of_shares_get_newcombes_interval(
    first: tuple[int, int], second: tuple[int, int], low: float, high: float
) -> None:
    # Newcombe 1998, Interval estimation for the difference between independent proportions, table II, method 10.
    (hits_1, count_1), (hits_2, count_2) = first, second
    found = newcombe(hits_1 / count_1, count_1, hits_2 / count_2, count_2)
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)
    scores = [[1.0] * hits + [0.0] * (count - hits) for hits, count in (first, second)]
    assert difference(*scores) == found


def test_other_scores_get_students_interval() -> None:
    gains = [second - first for first, second in zip(SLEEP_1, SLEEP_2, strict=True)]
    found = student(gains)
    assert found.count == 10
    assert found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert estimate(gains) == found


def test_differences_of_other_scores_get_welchs_interval() -> None:
    found = difference(SLEEP_1, SLEEP_2)
    assert (found.low, found.high) == pytest.approx((-0.2054832, 3.3654832), abs=1e-6)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (5, 2.5706), (17.776, 2.1028), (30, 2.0423), (120, 1.9799), (10**9, Z)],
)
def test_quantiles_are_those_of_the_tables(degrees: float, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50))
def test_the_mean_lies_in_its_interval(scores: list[float]) -> None:
    mean = estimate(scores)
    assert mean is not None
    if mean.low is not None and mean.high is not None:
        assert mean.low - 1e-9 <= mean.mean <= mean.high + 1e-9


def test_astronomical_scores_have_a_mean_and_no_interval() -> None:
    mean = estimate([1e308, 1e308, 0.5])
    assert mean is not None
    assert mean.mean == pytest.approx(1e308 / 3 * 2)
    assert (mean.low, mean.high) == (None, None)
    assert difference([1e308, 0.5], [-1e308, 0.5]).low is None


def test_scores_without_a_spread_have_no_interval() -> None:
    for scores in ([0.5], [0.5, 0.5, 0.5]):
        mean = estimate(scores)
        assert mean is not None
        assert (mean.mean, mean.low, mean.high) == (0.5, None, None)
    assert difference([0.5, 0.5], [0.7, 0.7]).low is None
    assert difference([0.5], [0.7, 0.2]).low is None


def test_no_number_is_no_score() -> None:
    assert estimate([]) is None
    assert estimate([math.nan]) is None
