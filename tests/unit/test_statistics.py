"""Intervals against hand-worked and published values; the split of a rise adds up."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmppo.reporting.figures import spread
from llmppo.reporting.statistics import split_rise, t_interval, wilson_interval

rates = st.floats(0, 1)


def test_t_interval_of_three_seeds_by_hand() -> None:
    # mean 0.8, s = 0.1, t(2, 97.5 %) = 4.302653: half width 4.302653 * 0.1 / sqrt(3)
    estimate = t_interval([0.7, 0.8, 0.9])
    assert estimate.kind == "seeds"
    assert estimate.n == 3
    assert estimate.mean == pytest.approx(0.8)
    assert estimate.high is not None
    assert estimate.high - estimate.mean == pytest.approx(4.302653 * 0.1 / math.sqrt(3), abs=1e-6)


def test_one_seed_has_no_interval_over_seeds() -> None:
    estimate = t_interval([0.4])
    assert (estimate.mean, estimate.low, estimate.high, estimate.kind) == (0.4, None, None, "none")


def test_equal_seeds_have_an_interval_of_no_width() -> None:
    estimate = t_interval([0.25, 0.25, 0.25, 0.25])
    assert (estimate.low, estimate.high) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # Brown, Cai and DasGupta 2001: z² / (n + z²)
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I
    ],
)
def test_wilson_interval_has_published_values(successes: int, n: int, low: float, high: float) -> None:
    estimate = wilson_interval(successes / n, n)
    assert estimate.low == pytest.approx(low, abs=5e-5)
    assert estimate.high == pytest.approx(high, abs=5e-5)
    assert estimate.kind == "episodes"


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_rate(trials: tuple[int, int]) -> None:
    successes, n = trials
    rate = successes / n
    estimate = wilson_interval(rate, n)
    assert estimate.low is not None
    assert estimate.high is not None
    assert 0 <= estimate.low <= rate + 1e-12
    assert rate - 1e-12 <= estimate.high <= 1


def test_split_of_a_rise_by_hand() -> None:
    # Valid 0.6 -> 1.0 at success 0.5 -> 0.9 among them, never right when invalid: 0.3 -> 0.9.
    by_format, by_answers = split_rise((0.6, 0.5, 0.0), (1.0, 0.9, 0.0))
    assert by_format == pytest.approx(0.4 * 0.7)
    assert by_answers == pytest.approx(0.4 * 0.8)


@given(st.tuples(rates, rates, rates), st.tuples(rates, rates, rates))
def test_the_parts_of_a_rise_add_up(
    before: tuple[float, float, float], after: tuple[float, float, float]
) -> None:
    def success(parts: tuple[float, float, float]) -> float:
        share, valid, other = parts
        return share * valid + (1 - share) * other

    assert sum(split_rise(before, after)) == pytest.approx(success(after) - success(before), abs=1e-12)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.floats(0.01, 0.5))
def test_spread_labels_keep_their_order_distance_and_centre(places: list[float], gap: float) -> None:
    moved = spread(places, gap)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for left, right in pairwise(order):
        assert moved[right] - moved[left] >= gap - 1e-9
    assert sum(moved) == pytest.approx(sum(places), abs=1e-9)


def test_labels_that_fit_stay_where_they_are() -> None:
    assert spread([0.9, 0.1, 0.5], 0.2) == [0.9, 0.1, 0.5]
    assert spread([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
