"""Memories: a piece of a request carries those of its sequences, and a window's budget counts their rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.memory import Memory, pack_memory, piece_memory
from service.packing import Limits, piece_seq_lens
from service.scheduling.window import load_between, plan_window
from tests.service.scheduling.waiting_requests import Ask, all_windows, queue_of, rules, waiting_for

Sequences = list[tuple[int, int]]  # tokens, memory rows
ragged = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8)


def waiting(sequences: Sequences) -> Ask:
    tokens, memory = np.cumsum(np.array(sequences), axis=0).T
    return Ask(int(tokens[-1]), tokens, load_ends=tokens + memory, squares=tokens)


def memory_of(sequences: Sequences, tag: int = 0) -> Memory:
    """Rows that say whose they are: (request, sequence)."""
    rows = [[tag, i] for i, (_, m) in enumerate(sequences) for _ in range(m)]
    return Memory(np.array(rows, np.float32), np.cumsum([m for _, m in sequences]))


@settings(max_examples=50, deadline=None)
@given(st.lists(ragged, min_size=1, max_size=8), st.integers(1, 128), st.booleans())
def test_tokens_and_memory_together_exceed_the_budget_only_for_one_sequence_alone(
    requests: list[Sequences], budget: int, divisible: bool
) -> None:
    held = rules(Limits(budget, divisible=divisible))
    for window in all_windows(waiting_for(list(map(waiting, requests)), held), held):
        sequences = 0
        for request, start, stop in window:
            assert request.ends is not None
            sequences += len(piece_seq_lens(request.ends, start, stop))
        if sum(load_between(*piece)[0] for piece in window) > budget:
            assert len(window) == 1
            assert sequences == 1 or not divisible


@settings(max_examples=50, deadline=None)
@given(st.lists(ragged, min_size=1, max_size=6), st.integers(1, 200))
def test_every_sequence_meets_its_own_memory_in_every_window(requests: list[Sequences], budget: int) -> None:
    queue, held = list(map(waiting, requests)), rules(Limits(budget))
    numbers = {id(request): i for i, request in enumerate(queue)}
    memories = [memory_of(sequences, tag) for tag, sequences in enumerate(requests)]
    met: list[tuple[int, int]] = []
    for window in all_windows(waiting_for(queue, held), held):
        parts, wanted = [], []
        for request, start, stop in window:
            number = numbers[id(request)]
            assert request.ends is not None
            parts.append(piece_memory(memories[number], request.ends, start, stop))
            first = int(np.searchsorted(request.ends, start, side="right"))
            count = len(piece_seq_lens(request.ends, start, stop))
            wanted += [(number, first + i) for i in range(count)]
        packed = pack_memory(parts, np.full((40, 2), np.nan, np.float32))
        assert packed.ends[-1] == len(packed.rows)
        got = np.split(packed.rows, packed.ends[:-1])
        assert [len(rows) for rows in got] == packed.seq_lens.tolist()
        assert [len(rows) for rows in got] == [requests[number][i][1] for number, i in wanted]
        for rows, (number, i) in zip(got, wanted, strict=True):
            assert (rows == [number, i]).all()
        met += wanted
    assert sorted(met) == [(n, i) for n, sequences in enumerate(requests) for i in range(len(sequences))]


def test_the_memory_of_a_whole_request_is_not_copied_on_its_way_to_the_slab() -> None:
    memory = memory_of([(2, 3), (4, 5)])
    assert piece_memory(memory, np.array([2, 6]), 0, 6) is memory
    part = piece_memory(memory, np.array([2, 6]), 2, 6)
    assert np.shares_memory(part.rows, memory.rows)
    assert part.ends.tolist() == [5]


def test_a_request_within_the_budget_waits_for_room_for_its_memory_too() -> None:
    first, second = waiting([(10, 40)]), waiting([(10, 45)])
    queue = queue_of(first, second)
    assert [p.request for p in plan_window(queue, rules(Limits(100)))] == [first]
    assert [p.request for p in plan_window(queue, rules(Limits(105)))] == [second]
