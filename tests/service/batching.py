"""A batcher on an engine that runs when the test lets it, with a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec

import numpy as np

from service.batcher import Batcher
from service.engine import Window
from service.memory import Memory
from service.metrics import Metrics
from service.packing import Float32, Int64, Limits, pack
from service.request import Answer, Bounds, Timing
from service.statistics import ModelStatistics

P = ParamSpec("P")

D = 3


@dataclass(frozen=True, eq=False)
class Doubler:
    """out = 2 x tokens."""

    label: str = "doubler"
    slab: Float32 = field(default_factory=lambda: np.empty((64, D), np.float32))
    limits: Limits = field(default_factory=lambda: Limits(64))
    memory_slab: Float32 | None = None
    timings: tuple[Timing, ...] = ()
    statistics: ModelStatistics = field(default_factory=ModelStatistics)

    def try_out(self) -> None:
        self.run(np.zeros((1, D), np.float32), None)

    def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
        assert seq_lens is None or seq_lens.sum() == len(tokens)
        return tokens * 2


@dataclass
class Client:
    disconnected: bool = False


class ManualEngine:
    """Keeps windows until the test lets one run."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.arrived = asyncio.Event()

    def submit(self, window: Window) -> None:
        self.windows.append(window)
        self.arrived.set()

    async def next(self) -> Window:
        while not self.windows:
            self.arrived.clear()
            await self.arrived.wait()
        return self.windows.pop(0)

    def finish(self, window: Window, error: Exception | None = None, compute_s: float = 0.0) -> None:
        window.finished = window.started + compute_s
        if error is None:
            window.out = window.model.run(pack(window.parts, window.model.slab), window.seq_lens)
        window.error = error
        window.done(window)


@dataclass
class Bench:
    engine: ManualEngine
    batcher: Batcher
    metrics: Metrics
    now: list[float]
    tasks: list[asyncio.Task[Answer]] = field(default_factory=list)

    def post(
        self,
        rows: int,
        model: Doubler,
        *,
        client: Client | None = None,
        timeout_s: float | None = None,
        lens: Any = None,
        **wish: Any,
    ) -> asyncio.Task[Answer]:
        tokens = np.random.default_rng(rows).standard_normal((rows, D), dtype=np.float32)
        seq_lens = None if lens is None else np.array(lens, np.int64)
        task = asyncio.create_task(self.batcher.submit(model, tokens, seq_lens, client or Client(), timeout_s, **wish))
        self.tasks.append(task)
        return task

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def bench(**bounds: Any) -> AsyncIterator[Bench]:
    now = [0.0]
    engine, metrics = ManualEngine(), Metrics()
    settings = Bounds(**{"queue_tokens": 1000, "sequence_tokens": 100, "timeout_s": 60.0, **bounds})
    bench = Bench(
        engine, Batcher(engine.submit, settings, metrics, asyncio.get_running_loop(), lambda: now[0]), metrics, now
    )
    yield bench
    for task in bench.tasks:
        task.cancel()
    await asyncio.gather(*bench.tasks, return_exceptions=True)
    assert bench.batcher.open_tokens == 0, "tokens of answered requests no longer count"


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run


async def rows_of(task: Awaitable[Answer]) -> int:
    return len((await task).out)
