from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.cases import CASES, SKEWED_LONGEST, skewed_lengths


@given(st.integers(0, 1 << 32))
def test_skewed_lengths_are_64_of_1_to_15_and_one_of_256(seed: int) -> None:
    lengths = sorted(skewed_lengths(seed).tolist())
    assert len(lengths) == 65
    assert lengths[-1] == SKEWED_LONGEST == 256
    assert lengths[0] >= 1
    assert lengths[63] <= 15


def test_windows_are_measured_at_the_size_of_a_perfect_one_and_16_tokens_have_the_bar() -> None:
    assert [(c.window_rows, c.bar) for c in CASES if c.windows] == [(64, None), (512, 0.75), (1020, None), (1024, None)]


def test_windows_off_has_its_counterpart_with_windows_on() -> None:
    off = [c for c in CASES if not c.windows]
    assert [(c.tokens, c.connections) for c in off] == [(16, 32)]
    assert all(any(c.windows and c.window_rows == o.window_rows for c in CASES) for o in off)
