"""Windows: for all queues and budgets, rows are neither lost nor doubled, and nobody waits without an end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.packing import Limits, Piece, piece_seq_lens
from service.scheduling.cost import CostModel
from service.scheduling.window import Rules, certainly_small, is_large, plan_window
from tests.service.scheduling.waiting_requests import (
    COST,
    Ask,
    all_windows,
    chunks,
    fitted,
    limits,
    position_wise,
    queue_of,
    ragged,
    rows_of,
    rules,
    sequences,
    wait,
    waiting_for,
)


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(position_wise, max_size=8), limits, chunks)
def test_every_row_of_every_request_runs_exactly_once_and_in_order(
    requests: list[Ask], limits: Limits, chunk_s: float
) -> None:
    seen: dict[int, int] = {id(r): 0 for r in requests}
    for window in all_windows(waiting_for(requests, rules(limits, chunk_s)), rules(limits, chunk_s)):
        for piece in window:
            assert piece.start == seen[id(piece.request)]
            assert piece.stop > piece.start
            seen[id(piece.request)] = piece.stop
    assert [seen[id(r)] for r in requests] == [r.rows for r in requests]


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(position_wise, min_size=1, max_size=8), st.integers(8, 128), chunks)
def test_a_window_of_position_wise_rows_never_exceeds_its_budget(
    requests: list[Ask], budget: int, chunk_s: float
) -> None:
    for window in all_windows(waiting_for(requests, rules(Limits(budget), chunk_s)), rules(Limits(budget), chunk_s)):
        assert rows_of(window) <= budget


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(position_wise, min_size=1, max_size=8), st.integers(16, 128), st.sampled_from([0.005, 0.02]))
def test_what_is_cut_adds_no_more_than_a_chunk_to_any_window(requests: list[Ask], budget: int, chunk_s: float) -> None:
    for window in all_windows(waiting_for(requests, rules(Limits(budget), chunk_s)), rules(Limits(budget), chunk_s)):
        cut = [piece for piece in window if piece.request.large]
        assert COST.seconds(rows_of(cut)) <= chunk_s or rows_of(cut) == 1


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(position_wise, min_size=1, max_size=8), st.integers(8, 128), chunks)
def test_a_small_request_is_never_split(requests: list[Ask], budget: int, chunk_s: float) -> None:
    for window in all_windows(waiting_for(requests, rules(Limits(budget), chunk_s)), rules(Limits(budget), chunk_s)):
        for request, start, stop in window:
            assert request.large or (start, stop) == (0, request.rows)


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(ragged, min_size=1, max_size=8), limits, chunks)
def test_a_sequence_is_never_cut_and_exceeds_the_budget_only_alone(
    requests: list[Ask], limits: Limits, chunk_s: float
) -> None:
    for window in all_windows(waiting_for(requests, rules(limits, chunk_s)), rules(limits, chunk_s)):
        lens = []
        for piece in window:
            assert piece.request.ends is not None
            borders = {0, *piece.request.ends.tolist()}
            assert {piece.start, piece.stop} <= borders
            lens += piece_seq_lens(piece.request.ends, piece.start, piece.stop).tolist()
        assert sum(lens) == rows_of(window)
        assert all(n > 0 for n in lens)
        if sum(lens) > limits.tokens:
            assert len(window) == 1
            assert len(lens) == 1 or not limits.divisible


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(position_wise, min_size=1, max_size=12), st.integers(1, 3))
def test_no_more_requests_than_the_limit_share_a_window(requests: list[Ask], most: int) -> None:
    for window in all_windows(queue_of(*requests, levels=3), rules(Limits(64, requests=most))):
        assert len(window) <= most


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(st.lists(position_wise, min_size=1, max_size=10), st.sets(st.integers(0, 9)))
def test_an_isolated_request_shares_its_windows_with_nobody(requests: list[Ask], isolated: set[int]) -> None:
    for index in isolated & set(range(len(requests))):
        requests[index].isolate = True
    for window in all_windows(waiting_for(requests, rules(Limits(64))), rules(Limits(64))):
        assert len(window) == 1 or not any(piece.request.isolate for piece in window)


def test_requests_leave_in_the_order_they_came() -> None:
    requests = [Ask(n) for n in (5, 7, 4, 6)]
    windows = all_windows(queue_of(*requests), rules(Limits(12)))
    assert [[p.request for p in w] for w in windows] == [requests[:2], requests[2:]]


def test_a_large_request_lets_small_ones_through_with_each_of_its_chunks() -> None:
    huge, small = Ask(250, large=True), Ask(3)
    waiting = queue_of(huge, small)
    assert plan_window(waiting, rules(Limits(100), 0.0501)) == [Piece(huge, 0, 50), Piece(small, 0, 3)]
    late = Ask(2)
    wait(waiting, late)
    assert plan_window(waiting, rules(Limits(100), 0.0501)) == [Piece(huge, 50, 100), Piece(late, 0, 2)]


def test_many_sequences_are_cut_between_sequences_at_a_chunk() -> None:
    request = sequences(*[10] * 30)
    request.large = True
    windows = all_windows(queue_of(request), rules(Limits(200), 0.0401))
    assert [rows_of(w) for w in windows] == [40] * 7 + [20]


def test_attention_counts_when_a_chunk_is_cut() -> None:
    cost = CostModel()
    for tokens, squares in ((10, 10), (100, 10_000), (100, 100), (10, 100)) * 50:
        cost.observe(tokens, squares, 1e-5 * tokens + 1e-5 * squares)
    short, long = sequences(*[10] * 30), sequences(*[30] * 10)
    short.large = long.large = True
    rules = Rules(Limits(1000), cost, chunk_s=0.0105)
    assert rows_of(plan_window(queue_of(short), rules)) == pytest.approx(100, abs=20)
    assert rows_of(plan_window(queue_of(long), rules)) == 30


def test_large_requests_have_their_chunks_in_turn() -> None:
    huge, other = Ask(5000, large=True), Ask(250, large=True)
    waiting = queue_of(huge, other)
    within = rules(Limits(2048), 0.1)
    taken = [plan_window(waiting, within)[0].request for _ in range(4)]
    assert taken == [huge, other, huge, other]


def test_a_chunk_is_never_so_small_that_the_fixed_cost_exceeds_a_fifth_of_its_window() -> None:
    dear = Rules(Limits(2048), fitted(a=2e-4, b=1e-6), chunk_s=1e-4)
    assert rows_of(plan_window(queue_of(Ask(5000, large=True)), dear)) == pytest.approx(800, rel=0.3)


def test_an_indivisible_request_runs_whole_even_beyond_the_budget() -> None:
    huge = Ask(250)
    assert plan_window(queue_of(huge), rules(Limits(100, requests=1, divisible=False))) == [Piece(huge, 0, 250)]


def test_a_window_closes_before_a_request_that_would_break_an_earlier_deadline() -> None:
    urgent, other, last = Ask(10, deadline=100.05), Ask(30), Ask(20)
    waiting = queue_of(urgent, other, last)
    assert plan_window(waiting, rules(Limits(100), now=100.0)) == [Piece(urgent, 0, 10), Piece(other, 0, 30)]
    assert plan_window(waiting, rules(Limits(100), now=100.0)) == [Piece(last, 0, 20)]


def test_those_who_are_gone_leave_the_queue_and_take_no_room() -> None:
    left, stays = Ask(60), Ask(50)
    waiting = queue_of(left, stays)
    assert plan_window(waiting, rules(Limits(64)), lambda r: r is left) == [Piece(stays, 0, 50)]
    assert waiting.size == 0


def test_the_dead_are_dropped_wherever_they_stand() -> None:
    requests = [Ask(n, level=1 + n % 3, client_id="ab"[n % 2], large=n % 5 == 0) for n in range(1, 40)]
    waiting = queue_of(*requests, levels=3)
    waiting.keep(lambda r: r.rows % 4 == 0)
    assert waiting.size == 9
    served = [p.request.rows for w in all_windows(waiting, rules(Limits(50))) for p in w]
    assert sorted(set(served)) == [4, 8, 12, 16, 20, 24, 28, 32, 36]


def test_a_window_is_short_while_another_model_waits() -> None:
    waiting = queue_of(*(Ask(4) for _ in range(10)))
    assert rows_of(plan_window(waiting, rules(Limits(100), window_s=0.0101))) == 8
    wait(waiting, Ask(30))
    assert rows_of(plan_window(queue_of(Ask(30)), rules(Limits(100), window_s=0.0101))) == 30, "it cannot be less"


def test_a_higher_level_goes_first_and_lower_ones_add_no_more_than_a_chunk() -> None:
    low, high = [Ask(4, level=3) for _ in range(10)], [Ask(5, level=1), Ask(6, level=1)]
    window = plan_window(queue_of(*low, *high, levels=3), rules(Limits(100), 0.0101))
    assert [p.request for p in window] == [*high, *low[:2]]


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(
    st.lists(st.builds(Ask, st.integers(1, 200), level=st.integers(2, 3)), min_size=1, max_size=8),
    st.integers(1, 6),
    chunks,
)
def test_nothing_starves_however_much_comes_above_it(low: list[Ask], aging: int, chunk_s: float) -> None:
    """Level 1 never runs dry, and yet each part of a lower one waits for no more than `aging` and a few windows."""
    now = rules(Limits(64), chunk_s)
    waiting = waiting_for(low, now, aging)
    parts = sum(-(-r.rows // 5) if r.large and chunk_s == 0.005 else -(-r.rows // 16) for r in low)
    for _ in range((aging + 3) * parts + aging + 3):
        while waiting.levels[0].size < 4:
            wait(waiting, Ask(60))
        plan_window(waiting, now)
        if all(r.taken == r.rows for r in low):
            break
    else:
        pytest.fail(f"{[(r.taken, r.rows) for r in low]}: somebody starves")


@settings(deadline=None, max_examples=60)  # a queue may take a hundred windows
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
    chunks,
)
def test_two_clients_that_always_wait_get_the_same_number_of_tokens(
    one: list[int], other: list[int], chunk_s: float
) -> None:
    now = rules(Limits(64), chunk_s)
    waiting = waiting_for([], now)
    got, sizes = {"one": 0, "other": 0}, {"one": one, "other": other}
    asked = {"one": 0, "other": 0}
    for _ in range(30):
        for client, rows in sizes.items():
            while sum(r.rows - r.taken for r in waiting if r.client_id == client) < 130:
                n = rows[asked[client] % len(rows)]
                asked[client] += 1
                wait(waiting, Ask(n, client_id=client, large=is_large(n, 0, now.limits, now.cost, chunk_s)))
        for piece in plan_window(waiting, now):
            got[piece.request.client_id] += piece.stop - piece.start
    assert abs(got["one"] - got["other"]) <= 2 * 64


def test_a_flood_of_one_client_does_not_hold_up_another() -> None:
    waiting = queue_of(*(Ask(10, client_id="flood") for _ in range(500)))
    plan_window(waiting, rules(Limits(64)))
    late = Ask(10, client_id="late")
    wait(waiting, late)
    assert late in [p.request for p in plan_window(waiting, rules(Limits(64)))]


@settings(deadline=None)
@given(st.lists(position_wise | ragged, min_size=1, max_size=8), limits, chunks)
def test_what_waits_ahead_is_known_at_all_times(requests: list[Ask], limits: Limits, chunk_s: float) -> None:
    waiting = waiting_for(requests, rules(limits, chunk_s))
    while True:
        for level in (1, 2, 3):
            for client in "abc":
                probe = Ask(1, level=level, client_id=client)
                same = [r for r in waiting if (r.level, r.client_id, r.large) == (level, client, False)]
                assert waiting.ahead(probe)[0] == sum(r.rows - r.taken for r in same)
                probe.large = True
                assert waiting.ahead(probe) == (0, 0), "it has its first chunk before others have all of theirs"
        if not plan_window(waiting, rules(limits, chunk_s)):
            break


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1.0)), max_size=6),
    st.integers(1, 4096),
    st.floats(1e-4, 1.0) | st.just(float("inf")),
    st.booleans(),
)
def test_what_is_certainly_small_is_never_large(
    seen: list[tuple[int, float]], budget: int, chunk_s: float, divisible: bool
) -> None:
    cost, limits = CostModel(), Limits(budget, divisible=divisible)
    for tokens, seconds in seen:
        cost.observe(tokens, 0, seconds)
    most = certainly_small(limits, cost, chunk_s)
    assert most <= budget or not divisible
    for tokens in (1, most // 2, most - 1, most):
        assert tokens > most or not is_large(tokens, 0, limits, cost, chunk_s)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            Ask,
            st.integers(1, 60),
            deadline=st.sampled_from([100.0, 100.02, 100.1, 200.0, float("inf")]),
            isolate=st.integers(0, 9).map(lambda n: n == 0),
            level=st.integers(1, 2),
        ),
        max_size=12,
    ),
    st.integers(1, 400),
    st.sampled_from([0.05, 0.2, float("inf")]),
    st.sets(st.integers(0, 11)),
)
def test_a_queue_that_fits_as_a_whole_is_taken_as_it_would_be_one_by_one(
    asks: list[Ask], budget: int, window_s: float, left: set[int]
) -> None:
    planned = []
    for requests in (None, 1 << 30):  # a bound on requests, however high, has them taken one by one
        copies = [replace(ask) for ask in asks]
        index = {ask: i for i, ask in enumerate(copies)}
        waiting = queue_of(*copies, levels=2)

        def gone(ask: Ask, index: dict[Ask, int] = index) -> bool:
            return index[ask] in left

        limits, windows = Limits(budget, requests), []
        for _ in range(len(copies) + 1):
            window = plan_window(waiting, rules(limits, window_s=window_s, now=100.0), gone)
            windows.append([(index[p.request], p.start, p.stop) for p in window])
        assert not waiting.size
        planned.append(windows)
    assert planned[0] == planned[1]
