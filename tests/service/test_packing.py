"""Packing: for all queues and budgets, rows are neither lost, nor doubled, nor given to somebody else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.packing import (
    Int64,
    Limits,
    Piece,
    drop_padding,
    pack,
    piece_seq_lens,
    plan_window,
    restore_padding,
    split,
)


@dataclass(eq=False)
class Waiting:
    rows: int
    ends: Int64 | None = None
    taken: int = 0
    load_ends: Int64 | None = None


def sequences(*lens: int) -> Waiting:
    return Waiting(sum(lens), np.cumsum(lens))


def all_windows(queue: deque[Waiting], limits: Limits) -> list[list[Piece[Waiting]]]:
    windows = []
    while queue:
        windows.append(plan_window(queue, limits))
        assert windows[-1], "a queue that is not empty always yields a window"
    return windows


position_wise = st.builds(Waiting, st.integers(1, 300))
ragged = st.lists(st.integers(1, 90), min_size=1, max_size=8).map(lambda lens: sequences(*lens))
limits = st.builds(Limits, st.integers(1, 128), st.none() | st.integers(1, 4), st.booleans())


@given(st.lists(position_wise, max_size=12), limits)
def test_every_row_of_every_request_runs_exactly_once_and_in_order(requests: list[Waiting], limits: Limits) -> None:
    seen: dict[int, int] = {id(r): 0 for r in requests}
    for window in all_windows(deque(requests), limits):
        for piece in window:
            assert piece.start == seen[id(piece.request)]
            assert piece.stop > piece.start
            seen[id(piece.request)] = piece.stop
    assert [seen[id(r)] for r in requests] == [r.rows for r in requests]


@given(st.lists(position_wise, min_size=1, max_size=12), st.integers(1, 128))
def test_a_window_of_position_wise_rows_never_exceeds_its_budget(requests: list[Waiting], budget: int) -> None:
    for window in all_windows(deque(requests), Limits(budget)):
        assert sum(piece.stop - piece.start for piece in window) <= budget


@given(st.lists(ragged, min_size=1, max_size=8), limits)
def test_a_sequence_is_never_cut_and_exceeds_the_budget_only_alone(requests: list[Waiting], limits: Limits) -> None:
    for window in all_windows(deque(requests), limits):
        lens = []
        for piece in window:
            assert piece.request.ends is not None
            borders = {0, *piece.request.ends.tolist()}
            assert {piece.start, piece.stop} <= borders
            lens += piece_seq_lens(piece.request.ends, piece.start, piece.stop).tolist()
        assert sum(lens) == sum(piece.stop - piece.start for piece in window)
        assert all(n > 0 for n in lens)
        if sum(lens) > limits.tokens:
            assert len(window) == 1
            assert len(lens) == 1 or not limits.divisible


@given(st.lists(position_wise | ragged, min_size=1, max_size=12), st.integers(1, 3))
def test_no_more_requests_than_the_limit_share_a_window(requests: list[Waiting], most: int) -> None:
    same_kind = [r for r in requests if (r.ends is None) == (requests[0].ends is None)]
    for window in all_windows(deque(same_kind), Limits(64, requests=most)):
        assert len(window) <= most


def test_requests_leave_in_the_order_they_came() -> None:
    requests = [Waiting(n) for n in (5, 7, 4, 6)]
    windows = all_windows(deque(requests), Limits(12))
    assert [[p.request for p in w] for w in windows] == [requests[:2], requests[2:]]


def test_a_request_larger_than_the_budget_lets_small_ones_through_after_each_of_its_windows() -> None:
    huge, small, late = Waiting(250), Waiting(3), Waiting(2)
    queue = deque([huge, small])
    first = plan_window(queue, Limits(100))
    assert first == [Piece(huge, 0, 100)]
    queue.append(late)
    assert plan_window(queue, Limits(100)) == [Piece(small, 0, 3), Piece(huge, 100, 197)]
    assert plan_window(queue, Limits(100)) == [Piece(late, 0, 2), Piece(huge, 197, 250)]


def test_an_indivisible_request_runs_whole_even_beyond_the_budget() -> None:
    huge = Waiting(250)
    assert plan_window(deque([huge]), Limits(100, requests=1, divisible=False)) == [Piece(huge, 0, 250)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(0, 200))
def test_split_returns_to_each_what_pack_took_from_it(counts: list[int], capacity: int) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((n, 5), dtype=np.float32) for n in counts]
    window = pack(parts, np.full((capacity, 5), np.nan, np.float32))
    for part, back in zip(parts, split(window, counts), strict=True):
        np.testing.assert_array_equal(part, back)


def test_a_small_piece_does_not_keep_the_whole_window_alive() -> None:
    out = np.zeros((100, 4), np.float32)
    small, large = split(out, [24, 76])
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
