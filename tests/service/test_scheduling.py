"""The batcher's choices on a fake engine: who goes first, who is cut, who is refused before any work is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from service.engine import Window
from service.errors import DeadlineExceeded, DeadlineUnreachable, InvalidInput, QueueFull, TooLarge
from service.packing import Limits
from service.request import Timing
from tests.service.batching import Bench, Client, Doubler, bench, on_loop, rows_of

MS = 1e-3
TIMINGS = (Timing(1, 0, 1 * MS), Timing(50, 0, 50 * MS), Timing(10, 0, 10 * MS)) * 5  # 1 ms a token


def paced(**rest: Any) -> Doubler:
    """A model whose tokens take a millisecond each, as its warm-up has shown."""
    return Doubler(timings=TIMINGS, **rest)


def run(b: Bench, window: Window) -> None:
    """Let a window take the time that its model's tokens take."""
    b.now[0] += window.rows * MS
    b.engine.finish(window, compute_s=window.rows * MS)


async def sizes(b: Bench, tasks: list[asyncio.Task[Any]]) -> Iterator[int]:
    """Rows of the windows until all `tasks` are done."""
    seen = []
    while not all(task.done() for task in tasks):
        window = await b.engine.next()
        seen.append(window.rows)
        run(b, window)
        await b.settle()
    return iter(seen)


@on_loop
async def test_a_large_request_runs_in_chunks_of_predicted_compute_and_its_rows_come_back_in_order() -> None:
    async with bench(chunk_s=10 * MS) as b:
        model = paced()
        task = b.post(60, model)
        assert max(await sizes(b, [task])) <= 10
        want = 2 * np.random.default_rng(60).standard_normal((60, 3), dtype=np.float32)
        np.testing.assert_array_equal((await task).out, want)
        assert (b.metrics.registry.get_sample_value("tokenslab_chunks_total", {"model": "doubler"}) or 0) >= 6


@on_loop
async def test_a_small_request_waits_for_one_chunk_of_a_large_one_and_not_for_all() -> None:
    async with bench(chunk_s=10 * MS) as b:
        model = paced()
        large = b.post(500, model)
        first = await b.engine.next()
        small = b.post(2, model)
        await b.settle()
        run(b, first)
        run(b, await b.engine.next())
        assert await rows_of(small) == 2
        assert b.now[0] <= 25 * MS
        assert not large.done()


@on_loop
async def test_a_higher_priority_goes_first_and_the_default_is_between() -> None:
    async with bench(levels=3, default_level=2) as b:
        model = Doubler(limits=Limits(10))
        b.post(10, model)
        running = await b.engine.next()
        tasks = {p: b.post(8, model, priority=p) for p in (3, 0, 1)}
        await b.settle()
        b.engine.finish(running)
        for priority in (1, 0, 3):
            b.engine.finish(await b.engine.next())
            await b.settle()
            assert [p for p, task in tasks.items() if task.done()][-1:] or tasks[priority].done()
            assert tasks.pop(priority).done()


@on_loop
async def test_a_priority_that_does_not_exist_is_refused_by_name() -> None:
    async with bench(levels=3) as b:
        with pytest.raises(InvalidInput, match=r"parameters\.priority: found 4, expected 0 to 3"):
            await b.post(1, Doubler(), priority=4)


@on_loop
async def test_each_priority_has_a_bound_of_its_own() -> None:
    async with bench(levels=2, default_level=2, level_tokens=(100, 20)) as b:
        model = Doubler()
        b.post(15, model)
        await b.settle()
        with pytest.raises(
            QueueFull, match="15 tokens of priority 2 wait; 6 more would exceed max_priority_tokens, 20"
        ):
            await b.post(6, model)
        with pytest.raises(TooLarge, match="priority 2 holds 20"):
            await b.post(21, model)
        urgent = b.post(60, model, priority=1)
        await sizes(b, [urgent])
        assert await rows_of(urgent) == 60


@on_loop
async def test_clients_share_the_windows_of_a_level() -> None:
    async with bench() as b:
        model = Doubler(limits=Limits(10))
        b.post(10, model)
        running = await b.engine.next()
        flood = [b.post(5, model, client_id="flood") for _ in range(20)]
        await b.settle()
        other = b.post(5, model, client_id="other")
        await b.settle()
        b.engine.finish(running)
        b.engine.finish(await b.engine.next())
        assert await rows_of(other) == 5
        assert sum(task.done() for task in flood) == 1


@on_loop
async def test_an_isolated_request_shares_its_window_with_nobody() -> None:
    async with bench() as b:
        model = Doubler()
        b.post(1, model)
        running = await b.engine.next()
        tasks = [b.post(2, model), b.post(3, model, isolate=True), b.post(4, model), b.post(5, model)]
        await b.settle()
        b.engine.finish(running)
        assert list(await sizes(b, tasks)) == [2, 3, 9]


@on_loop
async def test_a_request_that_would_be_late_is_refused_at_once_and_never_runs() -> None:
    async with bench() as b:
        model = paced()
        await sizes(b, [b.post(10, model)])
        with pytest.raises(DeadlineUnreachable, match=r"timeout: 0\.010000 s are left, it would take"):
            await b.post(40, model, timeout_s=10 * MS)
        assert not b.engine.windows
        assert b.batcher.open_tokens == 0
        assert DeadlineUnreachable.status == 504


@on_loop
async def test_what_runs_and_waits_ahead_counts_when_a_deadline_is_judged() -> None:
    async with bench() as b:
        model = paced()
        await sizes(b, [b.post(10, model)])
        b.post(50, model)
        await b.engine.next()
        b.post(50, model)
        await b.settle()
        with pytest.raises(DeadlineUnreachable):
            await b.post(2, model, timeout_s=60 * MS)
        assert not b.post(2, model, timeout_s=110 * MS).done()


@on_loop
async def test_a_request_that_can_no_longer_make_it_is_dropped_before_its_window() -> None:
    async with bench() as b:
        model = paced(limits=Limits(50))
        await sizes(b, [b.post(10, model)])
        b.post(50, model)
        running = await b.engine.next()
        tight, loose = b.post(20, model, timeout_s=75 * MS), b.post(5, model)
        await b.settle()
        b.now[0] += 65 * MS  # the window took longer than predicted
        b.engine.finish(running, compute_s=65 * MS)
        assert (await b.engine.next()).rows == 5
        with pytest.raises(DeadlineUnreachable):
            await tight
        assert not loose.done()


@on_loop
async def test_a_prediction_that_nothing_confirms_refuses_nobody_for_ever() -> None:
    async with bench() as b:
        model = paced()
        await sizes(b, [b.post(10, model)])
        b.now[0] += 2.0
        task = b.post(40, model, timeout_s=10 * MS)
        window = await b.engine.next()
        b.engine.finish(window, compute_s=1 * MS)
        assert await rows_of(task) == 40


@on_loop
async def test_a_window_starts_early_when_waiting_longer_would_break_a_deadline() -> None:
    async with bench(max_wait_s=0.05, timeout_s=60) as b:
        model = paced()
        b.post(10, model, timeout_s=0.03)
        await b.settle()
        assert not b.engine.windows
        b.now[0] = 0.0201  # 10 ms of compute are left to its deadline
        assert (await b.engine.next()).rows == 10


@on_loop
async def test_a_heavy_model_leaves_half_of_the_engine_to_a_light_one() -> None:
    async with bench(chunk_s=10 * MS) as b:
        heavy, light = paced(label="heavy"), paced(label="light")
        b.post(1, light)
        running = await b.engine.next()
        for _ in range(15):
            b.post(16, heavy)
        await b.settle()
        run(b, running)
        used = {"heavy": 0, "light": 0}
        while used["heavy"] < 15 * 16:
            b.post(8, light)
            b.post(8, light)
            await b.settle()
            window = await b.engine.next()
            used["heavy" if window.model is heavy else "light"] += window.rows
            assert window.rows <= 20, "and no window holds the other up for longer than a chunk or a request"
            run(b, window)
            await b.settle()
        assert 0.5 <= used["light"] / used["heavy"] <= 2


@on_loop
async def test_a_window_that_hangs_is_told_and_one_that_is_slow_as_predicted_is_not() -> None:
    async with bench(hang_s=0.2) as b:
        model = paced()
        assert b.batcher.hanging() is None
        b.post(50, model)
        window = await b.engine.next()
        b.now[0] += 0.4
        assert b.batcher.hanging() is None, "ten times what was predicted are 0.5 s"
        b.now[0] += 0.2
        assert "doubler: a window has run for 0.6 s" in (b.batcher.hanging() or "")
        b.engine.finish(window)
        await b.settle()
        assert b.batcher.hanging() is None


@on_loop
async def test_what_waits_is_told_by_priority_with_its_age() -> None:
    async with bench(levels=2, default_level=2) as b:
        model = Doubler()
        b.post(1, model)
        running = await b.engine.next()
        b.post(3, model, priority=1)
        b.post(4, model)
        await b.settle()
        b.now[0] = 2.5
        b.post(5, model)
        await b.settle()
        sample = b.metrics.registry.get_sample_value
        told = [
            tuple(sample(f"tokenslab_waiting_{what}", {"priority": p}) for what in ("requests", "tokens", "seconds"))
            for p in ("1", "2")
        ]
        assert told == [(1, 3, 2.5), (2, 9, 2.5)]
        b.engine.finish(running)


@on_loop
async def test_statistics_and_metrics_tell_what_became_of_all_tokens() -> None:
    async with bench() as b:
        model, gone = Doubler(), Client()
        ok, late, left = b.post(3, model), b.post(4, model, timeout_s=0.01), b.post(5, model, client=gone)
        b.engine.finish(await b.engine.next(), compute_s=0.001)
        assert await rows_of(ok) == 3
        b.post(1, model)
        window = await b.engine.next()
        late, left = b.post(4, model, timeout_s=0.01), b.post(5, model, client=gone)
        await b.settle()
        gone.disconnected = True
        b.now[0] = 1.0
        with pytest.raises(DeadlineExceeded):
            await late
        b.engine.finish(window)
        await asyncio.gather(left, return_exceptions=True)
        sample = b.metrics.registry.get_sample_value
        told = {
            o: sample("tokenslab_outcome_tokens_total", {"model": "doubler", "outcome": o}) for o in ("late", "gone")
        }
        assert told == {"late": 4, "gone": 5}
        statistics = model.statistics
        assert (statistics.success.count, statistics.fail.count, statistics.windows) == (4, 2, 2)
        assert sample("tokenslab_window_fill_count", {"model": "doubler"}) == 2
