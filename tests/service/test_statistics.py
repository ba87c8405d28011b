"""The counters of the statistics extension: sums of what windows report, in whole nanoseconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.statistics import ModelStatistics, Served, size_class

seconds = st.floats(0, 1e3)
served = st.builds(Served, st.integers(0, 64), st.integers(1, 1 << 16), seconds, seconds, seconds, seconds)


@given(st.lists(served, max_size=5))
def test_every_stage_counts_every_request_once(windows: list[Served]) -> None:
    statistics = ModelStatistics()
    for requests in windows:
        statistics.count_served(requests, 0.001)
    real = [s for s in windows if s.requests]
    stages = ("queue", "compute_input", "compute_infer", "compute_output", "success")
    assert {getattr(statistics, stage).count for stage in stages} == {sum(s.requests for s in real)}
    assert statistics.tokens == sum(s.tokens for s in real)
    assert statistics.queue.ns == pytest.approx(sum(s.queue_s for s in real) * 1e9, abs=10)
    assert bool(statistics.last_inference_ms) == bool(real)
    assert statistics.fail.count == 0


def test_windows_are_counted_by_the_power_of_two_that_holds_them() -> None:
    statistics = ModelStatistics()
    for tokens in (1, 2, 3, 4, 5, 2048):
        statistics.count_window(tokens, 1e-6, 2e-3, 3e-6)
    assert {size: batch.compute_infer.count for size, batch in statistics.batches.items()} == {
        **{1: 1, 2: 1, 4: 2, 8: 1},
        2048: 1,
    }
    assert statistics.batches[4].compute_input.ns == 2000
    assert statistics.batches[4].compute_infer.ns == 4_000_000
    assert statistics.batches[4].compute_output.ns == 6000


@given(st.integers(1, 1 << 20))
def test_a_size_class_is_the_least_power_of_two_not_below(tokens: int) -> None:
    assert tokens <= size_class(tokens) < 2 * tokens


def test_a_failure_is_no_success() -> None:
    statistics = ModelStatistics()
    statistics.count_failed(0.5)
    assert (statistics.fail.count, statistics.fail.ns, statistics.success.count) == (1, 500_000_000, 0)
