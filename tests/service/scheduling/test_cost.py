"""The cost model: for all windows it stays finite and non-negative, and from noisy ones it finds what made them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduling.cost import LONGEST_S, CostModel

windows = st.lists(
    st.tuples(
        st.integers(1, 1 << 20),
        st.integers(0, 1 << 34),
        st.floats(0, 1e5) | st.sampled_from([0.0, float("inf"), float("nan"), -1.0]),
    ),
    max_size=60,
)


def machine(
    rng: np.random.Generator, a: float, b: float, c: float, tokens: int, squares: int = 0, noise: float = 0.05
) -> float:
    """Seconds that such a machine takes: lognormal noise, and one window in twenty takes three times as long."""
    return (a + b * tokens + c * squares) * float(rng.lognormal(0, noise)) * (3 if rng.random() < 0.05 else 1)


@settings(deadline=None)
@given(windows, st.integers(1, 1 << 20), st.integers(0, 1 << 34))
def test_whatever_was_observed_predictions_are_finite_and_grow_with_the_work(
    seen: list[tuple[int, int, float]], tokens: int, squares: int
) -> None:
    cost = CostModel()
    for window in seen:
        cost.observe(*window)
    assert all(np.isfinite(p) and p >= 0 for p in cost.parameters)
    assert 0 <= cost.seconds(tokens, squares) <= LONGEST_S
    assert cost.seconds(tokens, squares) <= cost.seconds(2 * tokens, squares)
    assert cost.seconds(tokens, squares) <= cost.seconds(tokens, squares + 1000)
    assert 0 < cost.marginal(tokens, squares) <= cost.marginal(tokens + 1, squares)
    assert cost.room_s(0.01) >= 0


@settings(deadline=None)
@given(
    st.floats(1e-5, 1e-3),
    st.floats(1e-6, 1e-3),
    st.integers(0, 2**32 - 1),
)
def test_it_finds_the_price_of_a_token_through_noise_and_outliers(a: float, b: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = CostModel()
    for _ in range(150):
        tokens = int(rng.integers(1, 2048))
        cost.observe(tokens, 0, machine(rng, a, b, 0, tokens))
    for tokens in (64, 512, 2048):
        # A tenth of a chunk: the fixed cost may always have grown, so it is not known as well as the price.
        assert cost.seconds(tokens) == pytest.approx(a + b * tokens, rel=0.35, abs=1e-3)


def test_it_tells_attention_from_the_rest() -> None:
    rng = np.random.default_rng()
    a, b, c = 2e-4, 5e-5, 2e-7
    cost = CostModel()
    for _ in range(300):
        lens = rng.integers(1, 512, int(rng.integers(1, 20)))
        cost.observe(int(lens.sum()), int((lens**2).sum()), machine(rng, a, b, c, lens.sum(), (lens**2).sum()))
    many_short, one_long = cost.seconds(2048, 2048 * 8), cost.seconds(2048, 2048 * 2048)
    assert many_short == pytest.approx(a + b * 2048 + c * 2048 * 8, rel=0.3)
    assert one_long == pytest.approx(a + b * 2048 + c * 2048 * 2048, rel=0.3)


def test_the_first_window_alone_is_a_price_per_token() -> None:
    cost = CostModel()
    cost.observe(1000, 0, 0.1)
    assert cost.seconds(1000) == pytest.approx(0.1, rel=0.02)
    assert cost.seconds(100) == pytest.approx(0.01, rel=0.1)


def test_two_warm_up_runs_are_enough_to_start_with() -> None:
    cost = CostModel()
    cost.observe(1, 0, 3e-4)
    cost.observe(2048, 0, 0.205)
    assert cost.seconds(1) == pytest.approx(4e-4, rel=0.5)
    assert cost.seconds(512) == pytest.approx(0.0515, rel=0.1)


@pytest.mark.parametrize("factor", [5.0, 0.2], ids=["slower", "faster"])
def test_it_follows_a_machine_that_changes(factor: float) -> None:
    rng = np.random.default_rng()
    cost = CostModel()
    for speed in (1.0, factor):
        for _ in range(200):
            tokens = int(rng.integers(1, 2048))
            cost.observe(tokens, 0, speed * machine(rng, 2e-4, 1e-4, 0, tokens))
    assert cost.seconds(1024) == pytest.approx(factor * (2e-4 + 1e-4 * 1024), rel=0.3)


def test_windows_of_one_size_do_not_make_it_forget_the_others() -> None:
    rng = np.random.default_rng()
    cost = CostModel()
    for tokens in (1, 64, 512, 2048) * 5:
        cost.observe(tokens, 0, machine(rng, 2e-4, 1e-4, 0, tokens, noise=0.02))
    for _ in range(5000):
        cost.observe(64, 0, machine(rng, 2e-4, 1e-4, 0, 64))
    assert cost.seconds(64) == pytest.approx(2e-4 + 64e-4, rel=0.2)
    assert cost.seconds(2048) == pytest.approx(0.205, rel=0.5)


def test_one_window_that_was_held_up_changes_little() -> None:
    cost = CostModel()
    for tokens in (1, 256, 1024, 2048) * 10:
        cost.observe(tokens, 0, 1e-4 + 1e-4 * tokens)
    before = cost.seconds(1024)
    cost.observe(1024, 0, 30.0)
    assert cost.seconds(1024) == pytest.approx(before, rel=0.2)
