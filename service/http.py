"""uvicorn's HTTP/1.1 protocol with what it lacks: bounds on a request's head, faults in our own form, an eye on
pipelined requests whose client left, and no ear for an `Upgrade` header, as RFC 9110 wants (Java's client sends one).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.asgi import error_response
from service.errors import HeadTooLarge, InvalidInput, RequestError

_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One connection. Subclasses made by `http_protocol` carry the limits."""

    head_bytes: int
    head_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._unparsed = 0  # bytes since the last head, or the last piece of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that never sends its first head is closed as one that stalls in it."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Everyone on this connection has left: the request that runs and those queued behind it."""
        self._cancel_head_timer()
        for cycle in (self._active, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, which itself has no bounds, no more than a head or a trailer may be."""
        if self._unparsed > self.head_bytes:
            self._refuse(HeadTooLarge(f"head: more than {self.head_bytes} bytes (max_head_kib)"))
            return
        self._unparsed += len(data)
        if self._in_head:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head and self._unparsed and self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unparsed = 0
        self._cancel_head_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._unparsed = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, in the one form of our errors."""
        self._refuse(InvalidInput(f"HTTP: {msg}"))

    def _refuse(self, error: RequestError) -> None:
        if not self.transport.is_closing():
            status, headers, text = error_response(error)
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[status] + lines + b"connection: close\r\n\r\n" + text)
            self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_stalled)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_stalled(self) -> None:
        self._head_timer = None
        if self._in_head:
            self.transport.close()


def http_protocol(head_bytes: int, head_timeout_s: float) -> type[HttpProtocol]:
    """The protocol with its limits; uvicorn makes one instance a connection."""
    return type("LimitedHttpProtocol", (HttpProtocol,), {"head_bytes": head_bytes, "head_timeout_s": head_timeout_s})


async def written(cycle: RequestResponseCycle, timeout_s: float) -> bool:
    """Wait until the client has read its answer but for a small rest.

    False once it has read nothing for `timeout_s`, or when the service stops first: then it is cut off.
    """
    while cycle.flow.write_paused and not cycle.disconnected:
        before = cycle.transport.get_write_buffer_size()
        try:
            async with asyncio.timeout(timeout_s):
                await cycle.flow.drain()
        except TimeoutError:
            if cycle.transport.get_write_buffer_size() >= before:
                cycle.transport.abort()
                return False
        except (
            asyncio.CancelledError
        ):  # by the server, whose drain limit is over: there is nothing to clean up but this
            cycle.transport.abort()
            return False
    return True


def _without_upgrade(data: bytes) -> bytes:
    if b"pgrade" not in data and b"PGRADE" not in data:
        return data
    end = data.find(b"\r\n\r\n")
    head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
    return _UPGRADE.sub(b"\r\nx-ignored-upgrade:", head) + rest
