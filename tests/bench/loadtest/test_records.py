from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.loadtest.driver import Part
from bench.loadtest.records import RECORD, TIMEOUT, Latency, joined, summarize, weighted_median, windows_of
from bench.loadtest.saturation import saturation
from bench.timing import percentile
from tests.bench.loadtest.stages import records


def test_a_stall_counts_for_every_request_that_was_meant_to_be_sent_during_it() -> None:
    """Coordinated omission: the client stood still for 1 s, so counting from the sending only one request is slow."""
    stalled = records((at, max(at, 1.0), max(at, 1.0) + 0.001) for at in np.arange(0, 2, 0.01))
    summary = summarize(stalled, 0.0, 2.0, open_loop=True)
    assert summary.latency is not None
    assert summary.latency.max == pytest.approx(1001)
    assert summary.latency.p90 == pytest.approx(800, abs=15)
    assert summary.send_delay_p99_ms > 900
    from_sending = stalled.copy()
    from_sending["intended"] = from_sending["sent"]
    naive = summarize(from_sending, 0.0, 2.0, open_loop=True)
    assert naive.latency is not None
    assert naive.latency.p999 == pytest.approx(1)


def test_the_warm_up_and_what_was_answered_after_the_end_are_not_in_the_rate() -> None:
    summary = summarize(records([(0, 0, 0.5), (1, 1, 1.5), (1.5, 1.5, 9), (2.5, 2.5, 2.6)]), 1.0, 2.0, open_loop=True)
    assert summary.requests_per_s == 1.0
    assert summary.offered_per_s == summary.requests == 2
    assert summary.latency is not None
    assert summary.latency.max == pytest.approx(7500)  # it was meant to be sent in time, and it was slow


def test_errors_are_told_by_kind_and_are_no_latencies() -> None:
    three = records([(0, 0, 0.1)] * 3)
    three["status"] = [429, TIMEOUT, 200]
    summary = summarize(three, 0.0, 1.0, open_loop=False)
    assert (summary.requests, summary.errors) == (1, {"status 429": 1, "timeout": 1})
    three["status"] = 503
    assert summarize(three, 0.0, 1.0, open_loop=False).latency is None


def test_a_stage_that_is_all_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="all warm-up"):
        summarize(records([]), 1.0, 1.0, open_loop=True)


@given(st.lists(st.floats(1e-4, 10), min_size=1))
def test_percentiles_are_those_of_nearest_rank(seconds: list[float]) -> None:
    latency = Latency.of(np.array(seconds))
    assert latency.p50 == pytest.approx(percentile(seconds, 0.5) * 1e3)
    assert latency.p99 == pytest.approx(percentile(seconds, 0.99) * 1e3)
    assert latency.p50 <= latency.p90 <= latency.p99 <= latency.p999 <= latency.max == pytest.approx(max(seconds) * 1e3)


windows = st.lists(st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 1000)), min_size=1)


@given(windows)
def test_a_window_counts_once_however_many_requests_shared_it(built: list[tuple[list[int], int]]) -> None:
    rows = [(0.0, 0.0, 1.0, t, float(ms), sum(requests)) for requests, ms in built for t in requests]
    found = windows_of(records(rows))
    assert found is not None
    assert found.tokens == pytest.approx(np.mean([sum(requests) for requests, _ in built]))
    times = sorted(ms for _, ms in built)
    assert times[(len(times) - 1) // 2] <= found.compute_ms <= times[len(times) // 2]


def test_a_server_without_server_timing_has_no_windows() -> None:
    assert windows_of(records([(0, 0, 1)])) is None


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 5)), min_size=1))
def test_a_weight_of_n_is_a_value_n_times(weighted: list[tuple[float, int]]) -> None:
    values, weights = (np.array(column) for column in zip(*weighted, strict=True))
    repeated = sorted(np.repeat(values, weights))
    assert weighted_median(values, weights) == repeated[math.ceil(len(repeated) / 2) - 1]


def test_records_of_several_processes_are_one_stage() -> None:
    both = joined([records([(2, 2, 3)]), records([(1, 1, 2), (3, 3, 4)])])
    assert both["intended"].tolist() == [1, 2, 3]
    assert joined([]).dtype == RECORD


@pytest.mark.parametrize(
    ("part", "sent", "said"),
    [
        ((0.2, 1.0, 0), 0.0, ""),
        ((0.95, 1.0, 0), 0.0, "95% of a core"),
        ((0.2, 40.0, 0), 0.0, "event loop was 40 ms late"),
        ((0.2, 1.0, 3), 0.0, "3 requests found all connections busy"),
        ((0.2, 1.0, 0), 0.05, "sent 50 ms late"),
    ],
)
def test_a_client_that_is_itself_the_limit_says_so(part: tuple[float, float, int], sent: float, said: str) -> None:
    summary = summarize(records([(0, sent, 0.5)] * 10), 0.0, 1.0, open_loop=True)
    idle = Part(records([]), 0.1, 0.1, 0)
    reasons = saturation(summary, [idle, Part(records([]), *part)])
    assert len(reasons) == bool(said)
    assert said in "".join(reasons)
