from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.loadtest.arrivals import ArrivalKind, arrivals, share


@given(
    st.sampled_from(["poisson", "constant"]),
    st.floats(0.5, 2000),
    st.floats(0.01, 5),
    st.integers(0, 1 << 31),
)
def test_times_ascend_within_the_stage_and_come_again_with_the_seed(
    kind: ArrivalKind, rate: float, seconds: float, seed: int
) -> None:
    times = arrivals(kind, rate, seconds, seed)
    assert (np.diff(times) >= 0).all()
    assert ((times >= 0) & (times < seconds)).all()
    assert np.array_equal(times, arrivals(kind, rate, seconds, seed))
    expected = rate * seconds
    slack = 1 if kind == "constant" else 6 * np.sqrt(expected) + 20
    assert abs(len(times) - expected) <= slack


def test_gaps_of_a_poisson_process_are_exponential() -> None:
    gaps = np.diff(arrivals("poisson", 500.0, 40.0, seed=int(np.random.default_rng().integers(1 << 31))))
    assert gaps.mean() == pytest.approx(1 / 500, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)  # constant arrivals have none


@given(st.integers(0, 50), st.integers(1, 7))
def test_the_processes_together_send_every_arrival_once(count: int, parts: int) -> None:
    times = np.arange(count, dtype=np.float64)
    sent = np.concatenate([times[share(times, part, parts)] for part in range(parts)])
    assert sorted(sent) == list(times)


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_a_rate_or_time_of_nothing_is_refused(rate: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        arrivals("poisson", rate, seconds, 0)
