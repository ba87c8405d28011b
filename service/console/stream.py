"""A stream of server-sent events as an answer: ends when its reader leaves, reads nothing, or has had its time."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.asgi import Receive, Scope, Send
from service.console.events import STREAM_S, Feed
from service.slow_reader import written

_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class EventStream(Response):
    """The events of `feed`, from now on; being written, it first raises what `Feed.subscribe` does."""

    def __init__(self, feed: Feed, write_timeout_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self._feed = feed
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write events until there is a reason not to."""
        subscriber = self._feed.subscribe()
        leaving = asyncio.create_task(_left(receive))
        leaving.add_done_callback(lambda _: subscriber.end())
        over = asyncio.get_running_loop().call_later(STREAM_S, subscriber.end)
        cycle = getattr(receive, "__self__", None)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while (frame := await subscriber.next()) is not None:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                if isinstance(cycle, RequestResponseCycle) and not await written(cycle, self._write_timeout_s):
                    await leaving  # it was cut off, and nothing more can be written to it
                    return
            await send({"type": "http.response.body", "body": b""})
        finally:
            over.cancel()
            leaving.cancel()
            self._feed.leave(subscriber)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
