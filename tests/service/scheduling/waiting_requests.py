"""A waiting request as scheduling sees it, and how hypothesis makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from service.packing import Int64
from service.scheduling.waiting import Waiting
from service.scheduling.window import load


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
