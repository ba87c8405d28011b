from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.timing import Load, Spread, percentile, share_of_limit

positive = st.floats(min_value=1e-3, max_value=1e9)


@given(positive, positive, positive)
def test_a_service_as_fast_as_both_limits_has_the_share_one_and_scales_with_it(
    service: float, before: float, after: float
) -> None:
    mean = (before + after) / 2
    assert share_of_limit(mean, before, after) == pytest.approx(1.0)
    assert share_of_limit(service, before, after) == pytest.approx(service / mean)


def test_the_limit_is_the_mean_of_before_and_after() -> None:
    assert share_of_limit(150.0, 100.0, 300.0) == 0.75


@pytest.mark.parametrize("limits", [(0.0, 1.0), (1.0, 0.0), (-1.0, 2.0)])
def test_a_limit_that_is_not_positive_is_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        share_of_limit(1.0, *limits)


@given(st.lists(positive, min_size=1, max_size=9))
def test_a_spread_is_ordered_and_its_ends_were_measured(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.low <= spread.median <= spread.high
    assert {spread.low, spread.high} <= set(values)
    below, above = (sum(v < spread.median for v in values), sum(v > spread.median for v in values))
    assert max(below, above) <= len(values) / 2


def test_the_median_of_an_even_number_of_rounds_lies_between_the_middle_two() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_no_rounds_make_no_figure() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


@given(st.lists(positive, min_size=1, max_size=200), st.floats(min_value=0.01, max_value=1.0))
def test_a_percentile_is_a_value_that_the_stated_share_does_not_exceed(values: list[float], q: float) -> None:
    found = percentile(values, q)
    assert found in values
    assert sum(v <= found for v in values) >= q * len(values) - 1e-6
    assert sum(v < found for v in values) < q * len(values) + 1e-6


def test_the_99th_percentile_of_a_hundred_is_the_last_but_one() -> None:
    assert percentile([float(i) for i in range(100)], 0.99) == 98.0


def test_requests_per_second_counts_what_was_answered() -> None:
    assert Load(requests=30, seconds=1.5, p50_ms=1, p99_ms=2, errors={"status": 9}).requests_per_s == 20.0
