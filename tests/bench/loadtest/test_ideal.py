"""An ideal server against what queueing theory says of it."""

from __future__ import annotations

import numpy as np
import pytest

from bench.loadtest.ideal import WindowCost, ideal_latency


def test_without_load_latency_is_the_time_of_one_run() -> None:
    ideal = ideal_latency(WindowCost([1, 2], [0.010, 0.019]), rate=0.001, seed=0)
    assert (ideal.p99, ideal.compute) == pytest.approx((10.0, 10.0))


def test_where_a_window_costs_the_same_whatever_it_holds_nobody_waits_for_more_than_two() -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    ideal = ideal_latency(WindowCost([1, 64], [0.010, 0.010]), rate=1000, seed=seed)
    assert 19 < ideal.p99 <= 20
    assert ideal.compute == pytest.approx(10)


def test_where_batching_gains_nothing_the_tail_is_no_better_than_that_of_one_at_a_time() -> None:
    """M/D/1 at a load of 0.7: 99 % are done within 7.6 service times; whoever shares a window waits for all of it."""
    seed = int(np.random.default_rng().integers(1 << 31))
    ideal = ideal_latency(WindowCost([1, 2], [0.001, 0.002]), rate=700, seed=seed)
    assert 7.5 < ideal.p99 / ideal.compute < 15


def test_windows_larger_than_measured_cost_as_the_last_two_say() -> None:
    cost = WindowCost([1, 2, 4], [0.010, 0.012, 0.016])
    assert [cost.of(count) for count in (1, 3, 4, 14)] == pytest.approx([0.010, 0.014, 0.016, 0.036])
