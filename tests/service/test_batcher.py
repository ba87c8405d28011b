"""The batcher on a fake engine and an injected clock: what becomes of a request, and what is counted of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from service.errors import EngineFailed
from service.request import Answer, Outcome
from tests.service.batching import Client, D, Doubler, bench, on_loop, rows_of


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
