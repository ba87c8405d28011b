"""The stream as an answer: it ends when its reader leaves, reads nothing, or has had its time, and frees its place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.console import stream
from service.console.events import Feed
from service.console.stream import EventStream
from tests.service.batching import bench, on_loop
from tests.service.console.test_events import feed_of


class Reader(RequestResponseCycle):
    """A client that is there until `gone`, on a connection that takes everything unless it is `stuck`."""

    def __init__(self, *, stuck: bool = False) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self.disconnected = False
        never = asyncio.Event()
        self.flow: Any = SimpleNamespace(write_paused=stuck, drain=never.wait)
        self.transport: Any = SimpleNamespace(get_write_buffer_size=lambda: 99, abort=self.gone.set)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def follow(feed: Feed, reader: Reader) -> None:
    await EventStream(feed, 0.05)({}, reader.receive, reader.send)
    assert not feed._subscribers, "its place is free"


@on_loop
async def test_it_ends_when_its_reader_leaves() -> None:
    async with bench() as b:
        feed, reader = feed_of(b), Reader()
        following = asyncio.create_task(follow(feed, reader))
        await b.settle()
        assert len(feed._subscribers) == 1
        reader.gone.set()
        await following
        assert [m["body"].split(b"\n")[0] for m in reader.sent[1:4]] == [
            b"event: hello",
            b"event: models",
            b"event: history",
        ]


@on_loop
async def test_a_reader_that_reads_nothing_is_cut_off() -> None:
    async with bench() as b:
        reader = Reader(stuck=True)
        await follow(feed_of(b), reader)
        assert reader.gone.is_set()


def test_it_ends_as_an_answer_should_when_it_has_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "STREAM_S", 0.05)

    @on_loop
    async def test() -> None:
        async with bench() as b:
            reader = Reader()
            await follow(feed_of(b), reader)
            assert reader.sent[-1] == {"type": "http.response.body", "body": b""}
            assert not reader.gone.is_set()

    test()


@on_loop
async def test_a_server_that_stops_at_once_cancels_it_and_its_place_is_free() -> None:
    async with bench() as b:
        feed = feed_of(b)
        following = asyncio.create_task(follow(feed, Reader()))
        await b.settle()
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert not feed._subscribers
        assert b.batcher._watchers == []
