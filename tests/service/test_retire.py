"""A model that leaves: what was accepted is answered, and then nothing holds it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from service.engine import Engine, EngineStopped, Window
from service.errors import QueueFull
from service.memory import Memory
from service.packing import Float32, Int64
from tests.service.batching import D, Doubler, bench, on_loop


@on_loop
async def test_a_model_retires_when_its_last_request_is_answered_and_is_then_forgotten() -> None:
    async with bench() as b:
        model = Doubler()
        gone = weakref.ref(model)
        running, waiting = b.post(2, model), None
        first = await b.engine.next()
        waiting = b.post(3, model)
        await b.settle()
        retired = asyncio.create_task(b.batcher.retire(model))
        await b.settle()
        b.engine.finish(first)
        await running
        assert not retired.done(), "one request still waits"
        b.engine.finish(await b.engine.next())
        assert len((await waiting).out) == 3
        await retired
        del model, first
        b.tasks.clear()
        await b.settle()
        assert gone() is None


@on_loop
async def test_a_request_that_had_found_the_model_before_it_retired_is_still_answered() -> None:
    async with bench() as b:
        model = Doubler()
        gone = weakref.ref(model)
        await b.batcher.retire(model)
        late = b.post(2, model)
        b.engine.finish(await b.engine.next())
        assert len((await late).out) == 2
        del model, late
        b.tasks.clear()
        await b.settle()
        assert gone() is None


@on_loop
async def test_a_refused_request_keeps_no_model_from_retiring() -> None:
    async with bench(queue_tokens=4) as b:
        model = Doubler()
        with pytest.raises(QueueFull):
            await asyncio.gather(b.post(4, model), b.post(4, model))
        b.engine.finish(await b.engine.next())
        await b.batcher.retire(model)


def test_the_engine_runs_other_work_between_windows_and_hands_back_its_outcome() -> None:
    engine, order, let_go, done = Engine(), list[str](), threading.Event(), threading.Event()
    engine.start()

    class Waiting(Doubler):
        def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32:
            let_go.wait(10)
            order.append("window")
            return super().run(tokens, seq_lens)

    def job() -> str:
        order.append("job")
        return threading.current_thread().name

    try:
        with ThreadPoolExecutor(1) as pool:
            part = np.ones((2, D), np.float32)
            engine.submit(Window(Waiting(), [part], None, 2, lambda _: done.set()))
            outcome = pool.submit(engine.between, job)
            let_go.set()
            assert outcome.result(10) == "tokenslab-engine"
            assert done.wait(10)
            assert order == ["window", "job"]
            with pytest.raises(ZeroDivisionError):
                pool.submit(engine.between, lambda: 1 / 0).result(10)
    finally:
        assert engine.stop(10)
    with pytest.raises(EngineStopped):
        engine.between(job)
