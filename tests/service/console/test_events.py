"""The feed: nothing while nobody looks, all there is to whoever comes, and nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from service.console import events
from service.console.events import BLOCKS, FRAMES, SUBSCRIBERS, WINDOWS, Feed, Subscriber
from service.errors import NotReady, Stopped, TooManyWatchers
from service.lifecycle import Lifecycle
from service.parts import Parts
from service.repository import Repository
from service.settings import Settings
from tests.service.batching import Bench, Doubler, bench, on_loop


def feed_of(b: Bench, lifecycle: Lifecycle | None = None) -> Feed:
    parts = Parts(Settings(), lifecycle or Lifecycle(started=True), b.metrics, Repository(), None, b.batcher)
    return Feed(parts)


async def told(subscriber: Subscriber) -> tuple[str, Any]:
    frame = await subscriber.next()
    assert frame is not None, "the stream ended"
    name, data = frame.removesuffix(b"\n\n").split(b"\n")
    return name.removeprefix(b"event: ").decode(), orjson.loads(data.removeprefix(b"data: "))


async def greeted(feed: Feed) -> Subscriber:
    subscriber = feed.subscribe()
    assert [(await told(subscriber))[0] for _ in range(3)] == ["hello", "models", "history"]
    return subscriber


async def run_window(b: Bench, model: Doubler, *rows: int, error: Exception | None = None) -> None:
    tasks = [b.post(n, model) for n in rows]
    while any(not task.done() for task in tasks):
        b.engine.finish(await b.engine.next(), error)
        await asyncio.wait(tasks, timeout=0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "TICK_S", 0.01)
    monkeypatch.setattr(events, "SAMPLE_S", 0.01)


@on_loop
async def test_the_batcher_is_watched_only_while_somebody_looks() -> None:
    async with bench() as b:
        feed = feed_of(b)
        assert b.batcher._watchers == []
        first, second = feed.subscribe(), feed.subscribe()
        assert len(b.batcher._watchers) == 1, "once for all who look"
        feed.leave(first)
        assert len(b.batcher._watchers) == 1
        feed.leave(second)
        assert b.batcher._watchers == []
        await run_window(b, Doubler(), 3)
        assert not feed._windows


def test_a_window_is_told_with_the_rows_of_each_of_its_requests(quick: None) -> None:
    @on_loop
    async def test() -> None:
        async with bench() as b:
            feed = feed_of(b)
            subscriber = await greeted(feed)
            await run_window(b, Doubler(), 2, 5, 3)
            name, data = await told(subscriber)
            assert (name, data["unseen"]) == ("windows", 0)
            (window,) = data["windows"]
            assert (window["model"], window["requests"], window["tokens"]) == ("doubler", 3, 10)
            assert (window["blocks"], window["budget"], window["failed"]) == ([2, 5, 3], 64, False)
            feed.leave(subscriber)

    test()


def test_a_window_that_failed_is_told_as_failed(quick: None) -> None:
    @on_loop
    async def test() -> None:
        async with bench() as b:
            feed = feed_of(b)
            subscriber = await greeted(feed)
            await run_window(b, Doubler(), 4, error=RuntimeError("boom"))
            assert (await told(subscriber))[1]["windows"][0]["failed"]
            feed.leave(subscriber)

    test()


@on_loop
async def test_more_windows_than_a_person_sees_are_counted_and_not_kept() -> None:
    async with bench() as b:
        feed = feed_of(b)
        subscriber = await greeted(feed)
        model = Doubler()
        for rows in range(1, WINDOWS + 6):
            await run_window(b, model, rows % 7 + 1)
        name, data = await told(subscriber)
        assert name == "windows"
        seen = len(data["windows"]) + data["unseen"]
        while seen < WINDOWS + 5:  # a tick may have fallen between
            data = (await told(subscriber))[1]
            assert len(data["windows"]) <= WINDOWS
            seen += len(data["windows"]) + data["unseen"]
        assert seen == WINDOWS + 5
        feed.leave(subscriber)


@on_loop
async def test_a_window_of_very_many_requests_tells_no_more_than_some_of_them_one_by_one() -> None:
    async with bench() as b:
        feed = feed_of(b)
        subscriber = feed.subscribe()
        model = Doubler()
        await run_window(b, model, *[1] * 40)
        assert max(len(window.blocks) for window in feed._windows) <= BLOCKS
        assert sum(window.requests for window in feed._windows) == 40
        feed.leave(subscriber)


@on_loop
async def test_a_reader_that_reads_nothing_holds_a_bounded_number_of_events_and_gets_the_newest() -> None:
    subscriber = Subscriber()
    for number in range(FRAMES + 3):
        subscriber.put(b"%d" % number)
    subscriber.end()
    got = []
    while (frame := await subscriber.next()) is not None:
        got.append(int(frame))
    assert got == list(range(3, FRAMES + 3))


@on_loop
async def test_no_more_may_look_than_there_are_places_and_a_place_that_is_left_is_free() -> None:
    async with bench() as b:
        feed = feed_of(b)
        places = [feed.subscribe() for _ in range(SUBSCRIBERS)]
        with pytest.raises(TooManyWatchers):
            feed.subscribe()
        feed.leave(places.pop())
        places.append(feed.subscribe())
        for place in places:
            feed.leave(place)


def test_draining_ends_every_stream_and_opens_none(quick: None) -> None:
    @on_loop
    async def test() -> None:
        async with bench() as b:
            lifecycle = Lifecycle(started=True)
            feed = feed_of(b, lifecycle)
            subscriber = await greeted(feed)
            lifecycle.draining = True
            assert (await told(subscriber))[0] == "bye"
            assert await subscriber.next() is None
            with pytest.raises(Stopped):
                feed.subscribe()
            feed.leave(subscriber)

    test()


@on_loop
async def test_before_anything_is_loaded_nobody_may_look() -> None:
    async with bench() as b:
        feed = Feed(Parts(Settings(), Lifecycle(), b.metrics, None, None, b.batcher))
        with pytest.raises(NotReady):
            feed.subscribe()


def test_whoever_comes_gets_the_samples_of_the_last_minutes(quick: None) -> None:
    @on_loop
    async def test() -> None:
        async with bench() as b:
            feed = feed_of(b)
            running = asyncio.create_task(feed.run())
            first = await greeted(feed)
            seen = 0
            while seen < 3:
                seen += (await told(first))[0] == "sample"
            feed.leave(first)
            subscriber = feed.subscribe()
            data = [await told(subscriber) for _ in range(3)][2][1]
            assert len(data) >= 3
            assert {"tokens", "latency_ms", "rejections"} <= set(data[0])
            feed.leave(subscriber)
            running.cancel()

    test()
