"""uvicorn's HTTP/1.1 connection with what it lacks: bounds on a request's head, and on the connections themselves;
faults in our own form, after the answers before them; an eye on pipelined requests whose client left; an end that is
said by the answer to the last request that was accepted; no ear for an `Upgrade` header, as RFC 9110 wants (Java's
client sends one). Knows no application and no infer request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.asgi import error_response
from service.errors import HeadTooLarge, InvalidInput, RequestError, TooManyConnections
from service.parting import Parting
from service.turned_away import Doorman

HEAD_END: Final = b"\r\n\r\n"
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Open connections; bytes of a request's head; seconds from a connection's first byte to its whole head."""

    connections: int
    head_bytes: int
    head_timeout_s: float


class Awaited(Protocol):
    """Who waits to be told that a request's client has left."""

    def set(self) -> None:
        """It has."""


class Cycle(Protocol):
    """One request and its answer, as far as a connection asks: uvicorn's, or what stands in for it."""

    disconnected: bool
    response_complete: bool

    @property
    def message_event(self) -> Awaited:
        """To be set after `disconnected`."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, whose requests are uvicorn's; a subclass may answer some in its own way.

    `refused` is called with the reason of each refusal that no application sees; `doormen` are one an event loop.

    A request is accepted once its whole head has been read, unless the service is `stopping` and another before it, on
    the same connection, is unanswered: then that one is the last, and its answer says so with `Connection: close`. What
    is sent behind it is not run, as RFC 9112 (9.6) wants, and `unheard` is called, once a connection.
    """

    limits: ConnectionLimits
    refused: Callable[[str], None]
    stopping: Callable[[], bool]
    unheard: Callable[[], None]
    doormen: dict[asyncio.AbstractEventLoop, Doorman]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._unparsed = 0  # bytes since the last head, or the last piece of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._active: Cycle | None = None
        self._refusal: RequestError | None = None  # the last answer of this connection, once those before it are given
        self._begun = False  # what is refused was being answered already
        self._deaf = False  # the last request has been accepted: what comes is not even parsed
        self._left_unheard = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection that never sends its first head is closed as one that stalls in it."""
        self._parting = Parting(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._parting))
        if len(self.connections) > self.limits.connections:
            self.connections.discard(self)
            limit = f"{self.limits.connections} connections are open, the most there may be (max_connections)"
            self._doorman().turn_away(transport, self._response(TooManyConnections(limit)))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Everyone on this connection has left: the request that runs and those queued behind it."""
        self._cancel_head_timer()
        for cycle in (self._active, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._parting.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """What comes behind the last request is forgotten."""
        if self.transport.is_closing() or self._refusal is not None:
            if self._refusal is None and self._in_head and self.stopping():
                self._leave_unheard()
            self._parting.forget(len(data))
        elif self._deaf:
            self.flow.pause_reading()  # again: whatever is answered lets the connection read on
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Bytes of a connection that still reads."""
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which itself has no bounds, no more than a head or a trailer may be."""
        if self._unparsed > self.limits.head_bytes:
            self._refuse_head()
            return
        self._unparsed += len(data)
        if self._in_head:
            data = without_upgrade(data)
        super().data_received(data)
        if self._in_head and self._unparsed and self._head_timer is None and self._refusal is None:
            self._await_head()

    def on_message_begin(self) -> None:
        """The scope waits until it is known that the request goes the ASGI way."""
        self._unparsed = max(1, self._unparsed)  # a head may begin in one read with the body before it
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers, which come after the head was judged, are no headers (RFC 9110, 6.5.1)."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            raise _Refused  # an answer before it, in the same read, was the last
        # It may have come in one read with what the parser was still allowed.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self.limits.head_bytes:
            self._refuse_head()
            raise _Refused
        if self._answering and self.stopping():
            self._deaf = True
            self.flow.pause_reading()
            self._leave_unheard()
            raise _Refused
        self._dispatch()  # it may fail, on a target that is none: until here it is the head that is wrong
        self._in_head = False
        self._unparsed = 0
        self._cancel_head_timer()

    def _dispatch(self) -> None:
        """Begin the request whose head has been read: the scope, and its task."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.scope["headers"] = self.headers = headers
        self.url, self.expect_100_continue = url, expects
        super().on_headers_complete()
        if self.stopping():
            self.cycle.keep_alive = False

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

    def wind_down(self) -> None:
        """The service begins to stop: the newest request here is the last."""
        if self._answering:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """The listener is closed: an idle connection ends at once, any other with its answer."""
        if self.transport.is_closing():
            return  # its last answer is on its way
        if self.cycle is None or self.cycle.response_complete:
            self._parting.close_now()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, in the one form of our errors."""
        if not self._deaf:
            self._refuse(InvalidInput(f"HTTP: {msg}"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.stopping() and (self.pipeline or (self._in_head and self._unparsed)):
            self._leave_unheard()
        if self._refusal is not None and not self._answering:
            self._end(self._refusal)

    @property
    def _answering(self) -> bool:
        return bool(self.pipeline) or (self._active is not None and not self._active.response_complete)

    def _leave_unheard(self) -> None:
        self._cancel_head_timer()
        if not self._left_unheard:
            self._left_unheard = True
            self.unheard()

    def _refuse_head(self) -> None:
        self._refuse(HeadTooLarge(f"head: more than {self.limits.head_bytes} bytes (max_head_kib)"))

    def _refuse(self, error: RequestError) -> None:
        """Read no further; say why once the requests before it are answered, so that no answer is taken for another."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._cancel_head_timer()
        if not self._in_head:
            self._abandon()
        if not self._answering:
            self._end(error)

    def _abandon(self) -> None:
        """The newest request has a body that cannot be read: nothing else answers it, unless its answer has begun."""
        cycle = self.cycle
        self._begun = cycle.response_started
        cycle.disconnected = True
        cycle.message_event.set()
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        else:
            self._active = None

    def _end(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if not self._begun:
            self.transport.write(self._response(error))
        self.transport.close()

    def _response(self, error: RequestError) -> bytes:
        self.refused(error.reason)
        status, headers, text = error_response(error)
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[status] + lines + b"connection: close\r\n\r\n" + text

    def _doorman(self) -> Doorman:
        return self.doormen.setdefault(self.loop, Doorman(self.loop))

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_stalled)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_stalled(self) -> None:
        self._head_timer = None
        if self._in_head and self._answering:
            self._await_head()  # the requests before it are answered first
        elif self._in_head:
            self.transport.close()


class _Refused(Exception):
    """Ends the parsing of what will not be answered, or has been."""


def without_upgrade(data: bytes) -> bytes:
    """The head at the start of `data` with no `Upgrade` in it; `data` itself if there was none."""
    if b"pgrade" not in data and b"PGRADE" not in data:
        return data
    end = data.find(HEAD_END)
    head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
    return _UPGRADE.sub(b"\r\nx-ignored-upgrade:", head) + rest
