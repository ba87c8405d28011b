"""Packing: for all windows, rows are neither lost, nor doubled, nor given to somebody else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.packing import (
    drop_padding,
    kept,
    pack,
    restore_padding,
    split,
)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(0, 200))
def test_split_returns_to_each_what_pack_took_from_it(counts: list[int], capacity: int) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((n, 5), dtype=np.float32) for n in counts]
    window = pack(parts, np.full((capacity, 5), np.nan, np.float32))
    for part, back in zip(parts, split(window, counts), strict=True):
        np.testing.assert_array_equal(part, back)


def test_a_small_piece_does_not_keep_the_whole_window_alive() -> None:
    out = np.zeros((100, 4), np.float32)
    small, large = map(kept, split(out, [24, 76]))
    assert small.base is None
    assert large.base is out


def test_split_refuses_an_answer_of_another_length_than_the_window() -> None:
    with pytest.raises(ValueError, match="returned 4 rows for a window of 5"):
        split(np.zeros((4, 2), np.float32), [2, 3])


def test_pack_takes_rows_at_any_alignment() -> None:
    octets = np.zeros(4 * 6 + 1, np.uint8)
    unaligned = np.frombuffer(octets.data[1:], "<f4").reshape(2, 3)
    assert not unaligned.flags.aligned
    assert pack([unaligned], np.ones((2, 3), np.float32)).sum() == 0


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_padding_is_dropped_and_comes_back_as_zeros(lens: list[int]) -> None:
    tokens = np.random.default_rng(1).standard_normal((len(lens), 7, 3), dtype=np.float32)
    seq_lens = np.array(lens, np.int64)
    packed = drop_padding(tokens, seq_lens)
    assert packed.shape == (sum(lens), 3)
    back = restore_padding(packed, seq_lens, 7)
    for row, original, n in zip(back, tokens, lens, strict=True):
        np.testing.assert_array_equal(row[:n], original[:n])
        assert not row[n:].any()
