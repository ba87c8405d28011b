"""A waiting request as scheduling sees it, how hypothesis makes them, and the windows that a queue of them becomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from service.packing import Int64, Limits, Piece
from service.scheduling.cost import CostModel
from service.scheduling.waiting import Waiting
from service.scheduling.window import Rules, is_large, load, plan_window


@dataclass(eq=False)
class Ask:
    rows: int
    ends: Int64 | None = None
    load_ends: Int64 | None = None
    squares: Int64 | None = None
    taken: int = 0
    deadline: float = float("inf")
    isolate: bool = False
    large: bool = False
    level: int = 1
    client_id: str = ""

    @property
    def load(self) -> int:
        return self.rows if self.load_ends is None else int(self.load_ends[-1])

    @property
    def square(self) -> int:
        return 0 if self.squares is None else int(self.squares[-1])


def sequences(*lens: int, level: int = 1) -> Ask:
    sizes = np.array(lens, np.int64)
    return Ask(sum(lens), np.cumsum(sizes), np.cumsum(sizes), np.cumsum(sizes**2), level=level)


def queue_of(*requests: Ask, levels: int = 1, aging: int = 16) -> Waiting[Ask]:
    waiting: Waiting[Ask] = Waiting(levels, aging)
    for request in requests:
        wait(waiting, request)
    return waiting


def wait(waiting: Waiting[Ask], request: Ask) -> None:
    waiting.add(request, *load(request, request.rows))


position_wise = st.builds(Ask, st.integers(1, 300), client_id=st.sampled_from("abc"), level=st.integers(1, 3))
ragged = st.builds(
    lambda lens, level: sequences(*lens, level=level),
    st.lists(st.integers(1, 90), min_size=1, max_size=8),
    st.integers(1, 3),
)

TOKEN_S = 1e-3


def fitted(a: float = 0.0, b: float = TOKEN_S) -> CostModel:
    cost = CostModel()
    for tokens in (1, 1000, 10, 100) * 20:
        cost.observe(tokens, 0, a + b * tokens)
    return cost


COST = fitted()
limits = st.builds(Limits, st.integers(4, 128), st.none() | st.integers(1, 4), st.booleans())
chunks = st.sampled_from([0.005, 0.02, float("inf")])


def rules(limits: Limits, chunk_s: float = float("inf"), **rest: float) -> Rules:
    return Rules(limits, COST, chunk_s=chunk_s, **rest)


def waiting_for(requests: list[Ask], rules: Rules, aging: int = 4) -> Waiting[Ask]:
    for request in requests:
        request.large = is_large(*load(request, request.rows), rules.limits, rules.cost, rules.chunk_s)
    return queue_of(*requests, levels=3, aging=aging)


def all_windows(waiting: Waiting[Ask], rules: Rules) -> list[list[Piece[Ask]]]:
    windows = []
    while waiting.size:
        windows.append(plan_window(waiting, rules))
        assert windows[-1], "a queue that is not empty always yields a window"
    return windows


def rows_of(window: list[Piece[Ask]]) -> int:
    return sum(piece.stop - piece.start for piece in window)
