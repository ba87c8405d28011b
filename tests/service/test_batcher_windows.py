"""The batcher on a fake engine and an injected clock: when a window starts, and what shares it."""

from __future__ import annotations

import asyncio

import numpy as np

from service.packing import Limits
from tests.service.batching import D, Doubler, bench, on_loop, rows_of


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
            order.append(window.model)
            b.now[0] += 1.0
            b.engine.finish(window)
        assert order == [huge, other, huge] or order == [other, huge, huge]
