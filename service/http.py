"""uvicorn's HTTP/1.1 protocol with what it lacks: bounds on a request's head, faults in our own form, an eye on
pipelined requests whose client left, no ear for an `Upgrade` header, as RFC 9110 wants (Java's client sends one), and a
direct way for infer requests.

A head that the parser has read before need not be parsed again: parsing is a function of the bytes, and clients send
the same head many times. So a known head, and the body behind it, pass the parser by.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.asgi import error_response
from service.direct import Direct, DirectHead, DirectRequest, Headers
from service.errors import BodiesFull, HeadTooLarge, InvalidInput, RequestError, TooManyConnections
from service.infer import JOIN_BYTES
from service.parting import Parting
from service.turned_away import Doorman

_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
_END: Final = b"\r\n\r\n"
KNOWN_HEAD_BYTES: Final = 2048  # a longer one is parsed anew; bounds what known heads take


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Open connections; bytes of a request's head; seconds from a connection's first byte to its whole head."""

    connections: int
    head_bytes: int
    head_timeout_s: float


class HttpProtocol(HttpToolsProtocol):
    """One connection. Subclasses made by `http_protocol` carry the limits."""

    limits: ConnectionLimits
    direct: Callable[[], Direct | None]
    refused: Callable[[str], None]
    doormen: dict[asyncio.AbstractEventLoop, Doorman]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct = type(self).direct()
        self._in_head = True
        self._unparsed = 0  # bytes since the last head, or the last piece of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._active: RequestResponseCycle | DirectRequest | None = None
        self._raw: tuple[DirectRequest, bytes] | None = None  # its body arrives past the parser; and its head's bytes
        self._parsed: DirectRequest | None = None  # its body arrives through the parser
        self._answered = 0  # bytes of the last direct answer, while none of another kind followed
        self._idle_since: float | None = None  # the time of the last direct answer, while nothing follows
        self._idle_timer: asyncio.TimerHandle | None = None
        self._defaults: tuple[Headers, bytes] = ([], b"")
        self._refusal: RequestError | None = None  # the last answer of this connection, once those before it are given
        self._begun = False  # what is refused was being answered already

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
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if isinstance(self._active, DirectRequest):
            self._active.lost()
        for cycle in (self._active, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._raw = self._parsed = None
        self.pipeline.clear()
        self._parting.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Known heads and their bodies go the direct way; the parser gets the rest."""
        if self._refusal is not None or self.transport.is_closing():
            self._parting.forget(len(data))
            return
        self._idle_since = None
        while data and not self.transport.is_closing():
            if self._raw is not None:
                data = self._feed_raw(data, 0)
                continue
            if not (self._in_head and not self._unparsed and self._direct is not None and self._free):
                self._parse(data)
                return
            end = data.find(_END, 0, KNOWN_HEAD_BYTES) + len(_END)
            if end < len(_END):
                self._parse(data)
                return
            head = data[:end]
            known = self._direct.known.get(head)
            client_id = None if known is None else self._direct.client(known, self._peer)
            if known is None or client_id is None:
                data = self._learn(head, data)
                continue
            self._unset_keepalive_if_required()
            self._cancel_head_timer()
            self._raw = self._begin(known, client_id), head
            data = self._feed_raw(data, end)

    @property
    def _free(self) -> bool:
        """Whether a request that comes now is the only one on this connection."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline and not self.flow.write_paused

    @property
    def _peer(self) -> str | None:
        return self.client[0] if self.client else None

    def _begin(self, head: DirectHead, client_id: str) -> DirectRequest:
        assert self._direct is not None, "a direct head without the direct way"
        request = DirectRequest(self._direct, self, head, client_id)
        self._active = self.cycle = request  # type: ignore[assignment]  # a cycle, as far as uvicorn asks one
        return request

    def _feed_raw(self, data: bytes, start: int) -> bytes:
        """Give `data[start:]` to the request whose body arrives past the parser; returns what is not part of it."""
        assert self._raw is not None, "only called while a body arrives"
        request, head = self._raw
        stop = start + request.left
        try:
            if start < len(data):
                request.feed(data if start == 0 and stop >= len(data) else memoryview(data)[start:stop])
        except BodiesFull:
            self._raw = None
            self._hand_over(head, request.received(), data[start:])
            return b""
        if request.left:
            return b""
        self._raw = None
        request.complete()
        return data[stop:]

    def _hand_over(self, head: bytes, *body: bytes) -> None:
        """Let a request go the ASGI way after all, from its first byte."""
        direct, self._direct = self._direct, None
        for data in (head, *body):
            if data and not self.transport.is_closing():
                self._parse(data)
        self._direct = direct

    def _learn(self, head: bytes, data: bytes) -> bytes:
        """Parse a head that is not known yet, alone; returns what follows it.

        It is known from now on if just these bytes made a direct head of it: not fewer, and not more.
        """
        plain = _without_upgrade(head) is head
        self._parse(head)
        request = self._parsed
        if request is not None and plain and self._direct is not None and request.left == request.head.length:
            self._direct.learn(head, request.head)
        return b"" if self.transport.is_closing() else data[len(head) :]

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which itself has no bounds, no more than a head or a trailer may be."""
        if self._unparsed > self.limits.head_bytes:
            self._refuse_head()
            return
        self._unparsed += len(data)
        if self._in_head:
            data = _without_upgrade(data)
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
        if not self._goes_direct():
            self._as_asgi()  # it may fail, on a target that is none: until here it is the head that is wrong
        self._in_head = False
        self._unparsed = 0
        self._cancel_head_timer()

    def _goes_direct(self) -> bool:
        """Whether this request goes the direct way; it has begun then."""
        if self._direct is None or not self._free or not self._goes_on():
            return False
        head = self._direct.head(self.parser.get_method(), self.url, self.headers)
        client_id = None if head is None else self._direct.client(head, self._peer)
        if head is None or client_id is None:
            return False
        self._parsed = self._begin(head, client_id)
        return True

    def _goes_on(self) -> bool:
        return self.parser.get_http_version() == "1.1" and bool(self.parser.should_keep_alive())

    def _as_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.scope["headers"] = self.headers = headers
        self.url, self.expect_100_continue = url, expects
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        request = self._parsed
        if request is None:
            super().on_body(body)
            return
        try:
            request.feed(body)
        except BodiesFull:
            self._parsed = None
            received = request.received()
            self._as_asgi()
            super().on_body(received + body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._unparsed = 0
        request, self._parsed = self._parsed, None
        if request is None:
            super().on_message_complete()
        else:
            request.complete()

    def answer(
        self,
        request: DirectRequest,
        status: int,
        headers: Headers,
        parts: Sequence[bytes | memoryview],
        size: int,
        *,
        close: bool,
    ) -> None:
        """Write the answer of a direct request, whose length is among its headers, in one go."""
        self._raw = self._parsed = None
        request.response_complete = True
        close = close or not request.keep_alive
        if not self.transport.is_closing():
            head = [STATUS_LINE[status], self._default_lines()]
            head += [b"%b: %b\r\n" % line for line in headers]
            head.append(b"connection: close\r\n\r\n" if close else b"\r\n")
            self._answered = size
            if size <= JOIN_BYTES:
                self.transport.write(b"".join([*head, *parts]))
            else:
                self.transport.writelines([b"".join(head), *parts])
            if close:
                self.transport.close()
        if self.pipeline or close or self._refusal is not None:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1
            self._rest()

    def _default_lines(self) -> bytes:
        """uvicorn's default headers, which it makes anew every second: the date."""
        headers = self.server_state.default_headers
        if self._defaults[0] is not headers:
            self._defaults = headers, b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return self._defaults[1]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answered and self._direct is not None and self._active is not None:
            task = self.loop.create_task(self._direct.follow(_Reader(self), self._answered))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            self._answered = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        self._answered = 0
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """The listener is closed: an idle connection ends at once, any other with its answer."""
        if self.transport.is_closing():
            return  # its last answer is on its way
        if self.cycle is None or self.cycle.response_complete:
            self._parting.close_now()
        else:
            super().shutdown()

    def stop(self) -> None:
        """The service stops now: whoever still waits on the direct way is told."""
        if isinstance(self._active, DirectRequest) and not self._active.response_complete:
            self._active.stop()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read, in the one form of our errors."""
        self._refuse(InvalidInput(f"HTTP: {msg}"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None and not self._answering:
            self._end(self._refusal)

    @property
    def _answering(self) -> bool:
        return bool(self.pipeline) or (self._active is not None and not self._active.response_complete)

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

    def _rest(self) -> None:
        """The keep-alive timeout, by a timer that is seldom set: setting one costs more than reading a clock."""
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since is None:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._check_idle)
        else:
            self.transport.close()

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


class _Reader:
    """A connection as the reader of its last answer."""

    def __init__(self, connection: HttpProtocol) -> None:
        self._connection = connection
        self.transport = connection.transport
        self.flow = connection.flow

    @property
    def disconnected(self) -> bool:
        return self._connection not in self._connection.connections


def http_protocol(
    limits: ConnectionLimits, direct: Callable[[], Direct | None], refused: Callable[[str], None]
) -> type[HttpProtocol]:
    """The protocol with its limits; uvicorn makes one instance a connection, after `direct` is there to ask.

    `refused` is called with the reason of each refusal that no application sees.
    """
    parts = {"limits": limits, "direct": staticmethod(direct), "refused": staticmethod(refused), "doormen": {}}
    return type("LimitedHttpProtocol", (HttpProtocol,), parts)


def _without_upgrade(data: bytes) -> bytes:
    if b"pgrade" not in data and b"PGRADE" not in data:
        return data
    end = data.find(_END)
    head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
    return _UPGRADE.sub(b"\r\nx-ignored-upgrade:", head) + rest
