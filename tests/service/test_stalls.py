"""Small requests beside a huge one, while what a window takes is nothing like what it took before: nobody stalls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.packing import Limits
from service.request import Timing
from tests.service.batching import Bench, Doubler, bench, on_loop

MS = 1e-3
QUIET = tuple(Timing(n, 0, 0.3 * MS + 0.15 * MS * n) for n in (1, 64, 2048)) * 2


class Small:
    """A client that asks for 4 tokens, and again as soon as it has them."""

    def __init__(self, b: Bench, model: Doubler) -> None:
        self._bench, self._model = b, model
        self._task = b.post(4, model)
        self._waited = 0
        self.longest = 0  # windows, from request to answer
        self.answers = 0

    def window_ran(self) -> None:
        self._waited += 1
        self.longest = max(self.longest, self._waited)
        if self._task.done():
            assert self._task.result().out.shape == (4, 3)
            self._task, self._waited = self._bench.post(4, self._model), 0
            self.answers += 1


async def beside(
    b: Bench, rows: int, seconds: Callable[[int, int], float], timings: tuple[Timing, ...] = QUIET
) -> tuple[list[Small], int]:
    """Run `rows` beside four small clients, on an engine that takes `seconds(window, rows)`: clients and windows."""
    model = Doubler(limits=Limits(2048), timings=timings)
    large, windows = b.post(rows, model), 0
    await b.settle()
    clients = [Small(b, model) for _ in range(4)]
    while not large.done():
        window = await b.engine.next()
        took = seconds(windows, window.rows)
        b.now[0] += took
        windows += 1
        b.engine.finish(window, compute_s=took)
        await b.settle()
        for client in clients:
            client.window_ran()
    want = 2 * np.random.default_rng(rows).standard_normal((rows, 3), dtype=np.float32)
    np.testing.assert_array_equal(large.result().out, want)
    return clients, windows


def room(timeout_s: float = 1e4) -> Any:
    return bench(chunk_s=10 * MS, queue_tokens=100_000, timeout_s=timeout_s)


@on_loop
async def test_a_request_that_seems_large_on_a_slow_machine_does_not_wait_behind_the_whole_of_a_huge_one() -> None:
    slow = (Timing(1, 0, 6 * MS), Timing(100, 0, 600 * MS)) * 5  # 4 tokens are more than two chunks
    async with room() as b:
        clients, windows = await beside(b, 300, lambda _, rows: rows * 6 * MS, slow)
        assert windows > 100
        assert max(client.longest for client in clients) <= 30


@pytest.mark.parametrize("fixed_ms", [5.0, 15.0], ids=str)
@on_loop
async def test_a_fixed_cost_that_grows_does_not_make_chunks_ever_smaller(fixed_ms: float) -> None:
    rng = np.random.default_rng()
    async with room() as b:
        clients, windows = await beside(
            b, 20_000, lambda _, rows: (fixed_ms + 0.3 * rows) * MS * float(rng.lognormal(0, 0.3))
        )
        assert windows < 4000, "chunks of ever less came to 16,000 windows"
        assert min(client.answers for client in clients) > windows / 10


@on_loop
async def test_no_small_request_stalls_whatever_the_machine_does_to_the_windows() -> None:
    rng = np.random.default_rng()

    def seconds(window: int, rows: int) -> float:
        slowness = 30 if window // 100 % 3 == 1 else 1  # for a hundred windows at a time
        return (0.3 + 0.15 * rows) * MS * slowness * float(rng.lognormal(0, 1))

    async with room() as b:
        clients, _ = await beside(b, 30_000, seconds)
        assert max(client.longest for client in clients) <= 20
