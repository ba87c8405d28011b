"""The batcher on a fake engine and an injected clock: what shares a window, who is refused, who is dropped."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
import pytest

from service.batcher import Batcher
from service.engine import Window
from service.errors import DeadlineExceeded, EngineFailed, QueueFull, TooLarge
from service.memory import Memory
from service.metrics import Metrics
from service.packing import Float32, Int64, Limits, pack
from service.request import Answer, Bounds, ClientGone, Outcome, Timing
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


@on_loop
async def test_requests_that_arrive_together_share_a_window_and_each_gets_its_own_rows() -> None:
    async with bench() as b:
        model = Doubler()
        tasks = [b.post(n, model) for n in (1, 4, 2)]
        window = await b.engine.next()
        assert window.rows == 7
        b.engine.finish(window)
        for n, task in zip((1, 4, 2), tasks, strict=True):
            want = 2 * np.random.default_rng(n).standard_normal((n, D), dtype=np.float32)
            np.testing.assert_array_equal((await task).out, want)
            assert (await task).window_tokens == 7


@on_loop
async def test_an_outcome_is_called_back_once_and_by_then_counts_no_more() -> None:
    async with bench() as b:
        model, outcomes = Doubler(), list[Outcome]()
        tokens = np.random.default_rng(0).standard_normal((4, D), dtype=np.float32)

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            assert b.batcher.open_tokens == 0

        request = b.batcher.enqueue(model, tokens, None, Client(), done=done)
        b.engine.finish(await b.engine.next())
        await b.settle()
        b.batcher.withdraw(request)
        (answer,) = outcomes
        assert isinstance(answer, Answer)
        np.testing.assert_array_equal(answer.out, 2 * tokens)


@on_loop
async def test_whoever_is_called_back_may_enqueue_again() -> None:
    async with bench() as b:
        again, tokens = Doubler("again"), np.ones((2, D), np.float32)
        last = asyncio.get_running_loop().create_future()

        def enqueue(_: Outcome) -> None:
            b.batcher.enqueue(again, tokens, None, Client(), done=last.set_result)

        b.batcher.enqueue(Doubler(), tokens, None, Client(), done=enqueue)
        b.engine.finish(await b.engine.next())
        window = await b.engine.next()
        assert window.model is again
        b.engine.finish(window)
        assert isinstance(await last, Answer)


@on_loop
async def test_one_callers_fault_keeps_no_other_from_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        model = Doubler()

        def fail(_: Outcome) -> None:
            raise RuntimeError("boom")

        other = asyncio.get_running_loop().create_future()
        for done in (fail, other.set_result):
            b.batcher.enqueue(model, np.ones((2, D), np.float32), None, Client(), done=done)
        b.engine.finish(await b.engine.next())
        assert isinstance(await other, Answer)
        assert "nobody took the outcome" in caplog.text


@on_loop
async def test_a_request_that_was_withdrawn_is_neither_run_nor_called_back() -> None:
    async with bench() as b:
        model, outcomes = Doubler(), list[Outcome]()
        b.post(1, model)
        first = await b.engine.next()
        request = b.batcher.enqueue(model, np.ones((8, D), np.float32), None, Client(), done=outcomes.append)
        b.batcher.withdraw(request)
        b.post(3, model)
        await b.settle()
        b.engine.finish(first)
        window = await b.engine.next()
        assert window.rows == 3
        b.engine.finish(window)
        await b.settle()
        assert not outcomes


@on_loop
async def test_a_busy_engine_is_itself_the_window() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(1, model)
        first = await b.engine.next()
        for _ in range(5):
            b.post(2, model)
        await b.settle()
        assert not b.engine.windows, "the engine runs one window at a time"
        b.engine.finish(first)
        assert (await b.engine.next()).rows == 10


@on_loop
async def test_a_free_engine_starts_when_the_loop_finds_nothing_new() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(10, model)
        b.engine.finish(await b.engine.next(), compute_s=0.004)
        for n in range(1, 6):  # read one after another, a turn of the loop or two apart
            b.post(n, model)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert (await b.engine.next()).rows == 15


@on_loop
async def test_a_free_engine_does_not_wait_longer_than_a_window_takes() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(1, model)
        b.engine.finish(await b.engine.next(), compute_s=0.004)
        b.post(1, model)
        await asyncio.sleep(0)
        b.now[0] = 0.004
        b.post(1, model)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert b.engine.windows, "requests that keep coming must not keep the engine idle"


@on_loop
async def test_a_free_engine_with_much_to_do_starts_before_the_answers_are_written() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(10, model)
        first = await b.engine.next()
        b.post(40, model)
        await b.settle()
        b.engine.finish(first, compute_s=0.01)  # 1 ms a token: 40 tokens are work for longer than COLLECT_S
        while not b.engine.windows:
            assert not b.tasks[0].done()
            await asyncio.sleep(0)


@on_loop
async def test_a_free_engine_waits_for_the_oldest_request_to_have_waited_max_wait() -> None:
    async with bench(max_wait_s=0.02) as b:
        model = Doubler()
        b.post(1, model)
        await b.settle()
        assert not b.engine.windows
        b.post(1, model)
        b.now[0] = 0.02
        assert (await b.engine.next()).rows == 2


@on_loop
async def test_a_full_budget_ends_the_wait() -> None:
    async with bench(max_wait_s=30.0) as b:
        model = Doubler()
        b.post(40, model)
        await b.settle()
        assert not b.engine.windows
        b.post(24, model)
        assert (await b.engine.next()).rows == 64


@on_loop
async def test_a_full_window_of_one_model_does_not_wait_for_anothers_timer() -> None:
    async with bench(max_wait_s=30.0) as b:
        waiting, full = Doubler("waiting"), Doubler("full")
        b.post(1, waiting)
        await b.settle()
        b.post(64, full)
        assert (await b.engine.next()).model is full


@on_loop
async def test_models_take_turns() -> None:
    async with bench() as b:
        one, other = Doubler("one"), Doubler("other")
        b.post(1, one)
        first = await b.engine.next()
        b.now[0] = 1.0
        b.post(1, other)
        await b.settle()
        b.now[0] = 2.0
        b.post(1, one)
        await b.settle()
        b.engine.finish(first, compute_s=0.01)
        second = await b.engine.next()
        assert second.model is other
        b.engine.finish(second)
        assert (await b.engine.next()).model is one


@on_loop
async def test_a_request_larger_than_the_budget_is_cut_and_put_together_again() -> None:
    async with bench() as b:
        task = b.post(150, Doubler())
        sizes = []
        while not task.done():
            window = await b.engine.next()
            sizes.append(window.rows)
            b.engine.finish(window)
            await b.settle()
        assert sizes == [64, 64, 22]
        want = 2 * np.random.default_rng(150).standard_normal((150, D), dtype=np.float32)
        np.testing.assert_array_equal((await task).out, want)


@on_loop
async def test_sequences_travel_with_their_lengths() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(5, model, lens=[2, 3])
        b.post(60, model, lens=[30, 30])
        first = await b.engine.next()
        assert first.seq_lens is not None
        assert first.seq_lens.tolist() == [2, 3]
        b.engine.finish(first)
        second = await b.engine.next()
        assert second.seq_lens is not None
        assert second.seq_lens.tolist() == [30, 30]


@on_loop
async def test_the_queue_is_bounded_in_tokens_and_counts_what_is_running() -> None:
    async with bench(queue_tokens=100) as b:
        model = Doubler()
        b.post(60, model)
        running = await b.engine.next()
        b.post(40, model)
        await b.settle()
        with pytest.raises(QueueFull, match="100 tokens wait; 1 more would exceed max_queue_tokens, 100"):
            await b.post(1, model)
        b.engine.finish(running)
        await b.settle()
        b.post(60, model)
        await b.settle()
        assert b.batcher.open_tokens == 100


@on_loop
async def test_what_could_never_be_admitted_is_too_large_rather_than_too_many() -> None:
    async with bench(queue_tokens=100) as b:
        with pytest.raises(TooLarge, match="101 in one request, the queue holds 100"):
            await b.post(101, Doubler())
        with pytest.raises(TooLarge, match="a sequence of 101 tokens, the longest allowed is 100"):
            await asyncio.create_task(
                Batcher(b.engine.submit, Bounds(1000, 100, 1.0), b.metrics, asyncio.get_running_loop()).submit(
                    Doubler(), np.zeros((101, D), np.float32), np.array([101]), Client()
                )
            )


@on_loop
async def test_a_sequence_beyond_a_model_s_own_table_is_too_large_for_it_alone() -> None:
    async with bench() as b:
        with pytest.raises(TooLarge, match="a sequence of 9 tokens, the longest this model takes is 8"):
            await asyncio.create_task(
                Batcher(b.engine.submit, Bounds(1000, 100, 1.0), b.metrics, asyncio.get_running_loop()).submit(
                    Doubler(limits=Limits(64, sequence_tokens=8)), np.zeros((9, D), np.float32), np.array([9]), Client()
                )
            )


@on_loop
async def test_a_request_whose_client_left_is_dropped_before_packing() -> None:
    async with bench() as b:
        model, gone = Doubler(), Client()
        b.post(1, model)
        first = await b.engine.next()
        left, stays = b.post(8, model, client=gone), b.post(2, model)
        await b.settle()
        gone.disconnected = True
        b.engine.finish(first)
        assert (await b.engine.next()).rows == 2
        with pytest.raises(ClientGone):
            await left
        assert not stays.done()


@on_loop
async def test_a_cancelled_request_is_dropped_before_packing() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(1, model)
        first = await b.engine.next()
        cancelled = b.post(8, model)
        await b.settle()
        cancelled.cancel()
        await b.settle()
        b.post(3, model)
        b.engine.finish(first)
        assert (await b.engine.next()).rows == 3


@on_loop
async def test_a_deadline_passes_on_time_in_the_queue_and_while_its_window_runs() -> None:
    async with bench(timeout_s=0.01) as b:
        model = Doubler()
        running = b.post(1, model)
        window = await b.engine.next()
        queued = b.post(1, model)
        await b.settle()
        b.now[0] = 0.05
        with pytest.raises(DeadlineExceeded, match="in its window"):
            await running
        with pytest.raises(DeadlineExceeded, match="in the queue"):
            await queued
        b.engine.finish(window)
        await b.settle()
        assert not b.engine.windows, "nothing is computed for those that were told no"


@on_loop
async def test_a_request_may_shorten_the_timeout_but_not_lengthen_it() -> None:
    async with bench(timeout_s=0.5) as b:
        model = Doubler()
        b.post(1, model)
        await b.engine.next()
        short, long = b.post(1, model, timeout_s=0.001), b.post(1, model, timeout_s=9.0)
        await b.settle()
        b.now[0] = 0.1
        with pytest.raises(DeadlineExceeded):
            await short
        assert not long.done()
        b.now[0] = 0.6
        with pytest.raises(DeadlineExceeded):
            await long


@on_loop
async def test_a_failed_window_fails_its_own_requests_and_no_others() -> None:
    async with bench() as b:
        model = Doubler()
        victim = b.post(1, model)
        window = await b.engine.next()
        other = b.post(2, model)
        await b.settle()
        b.engine.finish(window, RuntimeError("boom"))
        with pytest.raises(EngineFailed):
            await victim
        b.engine.finish(await b.engine.next())
        assert await rows_of(other) == 2


@on_loop
async def test_rows_are_given_to_nobody_when_the_engine_returns_another_count() -> None:
    async with bench() as b:
        model = Doubler()
        one, two = b.post(1, model), b.post(2, model)
        for rows in (4, 0, 5):  # together, and then each alone
            window = await b.engine.next()
            window.out = np.zeros((rows, D), np.float32)
            window.done(window)
        for task in (one, two):
            with pytest.raises(EngineFailed):
                await task


@on_loop
async def test_windows_off_runs_one_request_at_a_time() -> None:
    async with bench() as b:
        model = Doubler(limits=Limits(64, requests=1, divisible=False))
        tasks = [b.post(n, model) for n in (1, 2, 100)]
        sizes = []
        for _ in tasks:
            window = await b.engine.next()
            sizes.append(window.rows)
            b.engine.finish(window)
        assert sizes == [1, 2, 100]
        assert [await rows_of(task) for task in tasks] == [1, 2, 100]


@on_loop
async def test_a_huge_request_of_one_model_does_not_starve_another_model() -> None:
    async with bench() as b:
        huge, other = Doubler("huge"), Doubler("other")
        b.post(640, huge)
        first = await b.engine.next()
        b.now[0] = 1.0
        b.post(1, other)
        await b.settle()
        b.now[0] = 2.0
        b.engine.finish(first)
        order = []
        for _ in range(3):
            window = await b.engine.next()
            order.append(window.model.label)  # type: ignore[attr-defined]
            b.now[0] += 1.0
            b.engine.finish(window)
        assert order == ["huge", "other", "huge"] or order == ["other", "huge", "huge"]


@on_loop
async def test_a_request_that_timed_out_in_the_queue_no_longer_holds_its_body() -> None:
    async with bench(timeout_s=0.01) as b:
        model = Doubler()
        b.post(1, model)
        window = await b.engine.next()
        body = np.zeros((50, D), np.float32)
        held = weakref.ref(body)
        task = asyncio.create_task(b.batcher.submit(model, body, None, Client()))
        del body
        await b.settle()
        b.now[0] = 1.0
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, DeadlineExceeded)
        del task, outcome
        await b.settle()
        assert held() is None
        assert b.batcher.open_tokens == 0
        b.engine.finish(window)


@on_loop
async def test_those_who_left_take_no_room_in_a_window() -> None:
    async with bench() as b:
        model, gone = Doubler(), Client()
        b.post(1, model)
        first = await b.engine.next()
        b.post(2, model)
        left = b.post(60, model, client=gone)
        b.post(50, model)
        await b.settle()
        gone.disconnected = True
        b.engine.finish(first)
        assert (await b.engine.next()).rows == 52
        with pytest.raises(ClientGone):
            await left


@on_loop
async def test_a_request_that_was_told_no_is_not_counted_as_answered() -> None:
    async with bench(timeout_s=0.01) as b:
        late = b.post(1, Doubler())
        window = await b.engine.next()
        b.now[0] = 1.0
        with pytest.raises(DeadlineExceeded):
            await late
        b.engine.finish(window)
        await b.settle()
        assert not b.metrics.registry.get_sample_value("tokenslab_requests_total", {"model": "doubler"})
        assert b.metrics.registry.get_sample_value("tokenslab_windows_total", {"model": "doubler"}) == 1


@on_loop
async def test_metrics_count_requests_tokens_and_windows() -> None:
    async with bench() as b:
        model = Doubler()
        tasks = [b.post(3, model) for _ in range(4)]
        b.engine.finish(await b.engine.next())
        await asyncio.gather(*tasks)
        sample = b.metrics.registry.get_sample_value
        assert sample("tokenslab_requests_total", {"model": "doubler"}) == 4
        assert sample("tokenslab_tokens_total", {"model": "doubler"}) == 12
        assert sample("tokenslab_windows_total", {"model": "doubler"}) == 1
        assert sample("tokenslab_window_tokens_sum", {"model": "doubler"}) == 12
        assert sample("tokenslab_queue_seconds_count", {"model": "doubler"}) == 4
