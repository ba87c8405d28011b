"""The batcher on a fake engine and an injected clock: who is refused, who is dropped, who is late."""

from __future__ import annotations

import asyncio
import weakref

import numpy as np
import pytest

from service.errors import DeadlineExceeded, QueueFull, TooLarge
from service.packing import Limits
from service.request import ClientGone
from tests.service.batching import Client, D, Doubler, bench, on_loop, rows_of


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
    async with bench(sequence_tokens=100) as b:
        with pytest.raises(TooLarge, match="a sequence of 101 tokens, the longest allowed is 100"):
            await b.post(101, Doubler(), lens=[101])


@on_loop
async def test_a_sequence_beyond_a_model_s_own_table_is_too_large_for_it_alone() -> None:
    async with bench() as b:
        with pytest.raises(TooLarge, match="a sequence of 9 tokens, the longest this model takes is 8"):
            await b.post(9, Doubler(limits=Limits(64, sequence_tokens=8)), lens=[9])
        other = b.post(9, Doubler("other"), lens=[9])
        b.engine.finish(await b.engine.next())
        assert await rows_of(other) == 9


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
