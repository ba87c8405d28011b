"""Turns: for all costs nobody who waits falls behind by more than one cost, and nobody saves turns up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduling.turns import Turns

costs = st.floats(0.01, 10)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), costs), min_size=1, max_size=200))
def test_whoever_always_has_work_gets_as_much_as_the_others_but_for_one_cost(served: list[tuple[int, float]]) -> None:
    turns: Turns[int] = Turns()
    for key in range(5):
        turns.join(key)
    got, largest = dict.fromkeys(range(5), 0.0), dict.fromkeys(range(5), 0.0)
    for _, cost in served:
        key = turns.first()
        turns.charge(key, cost)
        got[key] += cost
        largest[key] = max(largest[key], cost)
        for one in got:
            for other in got:
                assert got[one] - got[other] <= largest[one] + largest[other] + 1e-6


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "join a", "leave a", "join b", "leave b"]), max_size=120))
def test_the_turn_is_always_of_the_active_key_with_the_least_virtual_time(steps: list[str]) -> None:
    turns: Turns[str] = Turns()
    active: set[str] = set()
    for step in steps:
        verb, _, key = step.rpartition(" ")
        if verb == "join":
            turns.join(key)
            active.add(key)
        elif verb == "leave":
            if key in active:
                turns.leave(key)
                active.remove(key)
        elif key in active:
            turns.charge(key, 1.0)
        assert len(turns) == len(active)
        if active:
            assert turns.first() == turns.first_of(active)


def test_one_that_was_idle_comes_back_at_the_present_and_has_saved_nothing_up() -> None:
    turns: Turns[str] = Turns()
    turns.join("busy")
    for _ in range(100):
        turns.charge("busy", 1.0)
    turns.join("late")
    served = []
    for _ in range(10):
        served.append(turns.first())
        turns.charge(served[-1], 1.0)
    assert 5 <= served.count("late") <= 6


def test_leaving_and_coming_back_at_once_does_not_forgive_a_debt() -> None:
    turns: Turns[str] = Turns()
    turns.join("greedy")
    turns.join("other")
    turns.charge("greedy", 100.0)
    turns.leave("greedy")
    turns.join("greedy")
    for _ in range(99):
        assert turns.first() == "other"
        turns.charge("other", 1.0)


def test_what_was_served_costs_what_it_took_in_the_end() -> None:
    turns: Turns[str] = Turns()
    turns.join("a")
    turns.join("b")
    turns.charge("a", 1.0)
    turns.charge("b", 1.0)
    turns.correct("a", 5.0)
    assert turns.first() == "b"
    turns.leave("a")
    turns.correct("a", 5.0)
    turns.correct("gone", 5.0)
    turns.join("a")
    turns.charge("b", 9.0)
    assert turns.first() == "b"


def test_thousands_of_keys_that_come_and_go_are_not_remembered() -> None:
    turns: Turns[int] = Turns()
    turns.join(-1)
    for key in range(5000):
        turns.join(key)
        turns.charge(turns.first(), 1.0)
        turns.leave(key)
    assert len(turns._idle) < 200
    assert len(turns._heap) < 200
