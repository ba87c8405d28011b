"""Windows that fail: only who is to blame gets the error, and a model that cannot run is not asked until it can."""

from __future__ import annotations

import asyncio
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service import faults
from service.errors import EngineFailed, ModelFailing
from service.packing import Piece, pack
from service.request import Answer
from service.scheduling.health import SUSPICION, Health
from service.scheduling.retries import halves, patience_s
from tests.service.batching import Bench, Client, Doubler, bench, on_loop, rows_of

POISON = 666.0


def has_poison(parts: list[np.ndarray]) -> bool:
    return any((part == POISON).any() for part in parts)


async def serve(b: Bench, tasks: list[asyncio.Task[Answer]]) -> int:
    """Run windows until `tasks` are done, failing each that holds poison; returns how many ran."""
    ran = 0
    while not all(task.done() for task in tasks):
        window = await b.engine.next()
        ran += 1
        error = RuntimeError("poison") if has_poison(window.parts) else None
        if window.parts:
            b.engine.finish(window, error)
        else:
            window.model.try_out()
            window.done(window)
        await b.settle()
    return ran


def post(b: Bench, model: Doubler, value: float) -> asyncio.Task[Answer]:
    async def ask() -> Answer:
        return await b.batcher.submit(model, np.full((1, 3), value, np.float32), None, Client())

    task: asyncio.Task[Answer] = asyncio.create_task(ask())
    b.tasks.append(task)
    return task


@pytest.mark.parametrize("requests", [2, 3, 7, 16, 33])
@on_loop
async def test_only_the_culprit_gets_the_error_after_at_most_a_logarithm_of_windows(requests: int) -> None:
    async with bench() as b:
        model = Doubler()
        culprit = int(np.random.default_rng().integers(requests))
        tasks = [post(b, model, POISON if i == culprit else float(i)) for i in range(requests)]
        ran = await serve(b, tasks)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for i, outcome in enumerate(outcomes):
            if i == culprit:
                assert isinstance(outcome, EngineFailed)
            else:
                assert isinstance(outcome, Answer)
                assert outcome.out[0, 0] == 2 * i
        assert ran <= 1 + 2 * ceil(log2(requests))
        assert b.batcher.failing(model) is None


@on_loop
async def test_a_large_request_of_which_one_chunk_fails_fails_as_a_whole_and_its_rest_is_not_run() -> None:
    async with bench() as b:
        model = Doubler()
        task = b.post(300, model)
        b.engine.finish(await b.engine.next())
        b.engine.finish(await b.engine.next(), RuntimeError("boom"))
        with pytest.raises(EngineFailed):
            await task
        await b.settle()
        assert not b.engine.windows
        assert b.batcher.open_tokens == 0


@on_loop
async def test_retries_end_when_their_time_is_over() -> None:
    async with bench() as b:
        model = Doubler()
        tasks = [post(b, model, POISON) for _ in range(8)]
        b.engine.finish(await b.engine.next(), RuntimeError("boom"))
        await b.settle()
        b.now[0] += 2.0
        for _ in range(2):
            b.engine.finish(await b.engine.next(), RuntimeError("boom"))
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineFailed)


@on_loop
async def test_poisonous_requests_alone_make_no_model_unready() -> None:
    async with bench() as b:
        model = Doubler()
        for _ in range(3 * SUSPICION):
            await serve(b, [post(b, model, POISON)])
        assert b.batcher.failing(model) is None
        assert await rows_of(asyncio.ensure_future(_served(b, model))) == 1


async def _served(b: Bench, model: Doubler) -> Answer:
    task = post(b, model, 1.0)
    await serve(b, [task])
    return await task


@on_loop
async def test_a_model_that_cannot_run_is_not_asked_until_its_trial_runs_and_others_go_on() -> None:
    async with bench() as b:
        broken, other = Doubler("broken"), Doubler("other")
        tasks = [post(b, broken, float(i)) for i in range(5)]
        while not b.batcher.failing(broken):
            b.engine.finish(await b.engine.next(), RuntimeError("out of memory"))
            await b.settle()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineFailed | ModelFailing)
        assert b.batcher.failing(broken) == "its warm-up input fails too: RuntimeError: out of memory"
        assert b.metrics.registry.get_sample_value("tokenslab_model_failing", {"model": "broken"}) == 1
        with pytest.raises(ModelFailing, match="broken: not ready: its warm-up input fails too"):
            await post(b, broken, 1.0)
        assert await rows_of(asyncio.ensure_future(_served(b, other))) == 1
        lane = b.batcher._lanes.get(broken)
        assert lane is not None
        b.batcher._faults._try_again(lane)  # the timer, which rings in TRIAL_S
        trial = await b.engine.next()
        assert not trial.parts
        trial.done(trial)
        await b.settle()
        assert b.batcher.failing(broken) is None
        assert await rows_of(asyncio.ensure_future(_served(b, broken))) == 1
        assert faults.TRIAL_S > 0


@settings(deadline=None)
@given(st.lists(st.sampled_from(["ran", "failed alone", "trial ran", "trial failed"]), max_size=40))
def test_a_model_is_failing_only_after_a_trial_that_failed_and_until_one_that_ran(events: list[str]) -> None:
    health, expected = Health(), False
    for event in events:
        if event == "ran":
            health.ran()
        elif event == "failed alone":
            health.failed_alone()
        else:
            health.tried(None if event == "trial ran" else RuntimeError("no"))
            expected = event == "trial failed"
        assert (health.reason is not None) == expected


@settings(deadline=None)
@given(st.integers(2, 300))
def test_halves_hold_every_piece_once_in_order_and_are_halves(count: int) -> None:
    pieces = [Piece(i, 0, 1) for i in range(count)]
    first, second = halves(pieces, 1.0)
    assert first.pieces + second.pieces == pieces
    assert abs(len(first.pieces) - len(second.pieces)) <= 1
    assert patience_s(count, 0.1) >= 0.1 * log2(count)


def test_a_window_may_be_packed_again_after_it_failed() -> None:
    slab, part = np.empty((4, 3), np.float32), np.ones((2, 3), np.float32)
    assert (pack([part], slab) == pack([part], slab)).all()
