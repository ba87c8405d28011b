"""A connection with a direct way for infer requests.

A head that the parser has read before need not be parsed again: parsing is a function of the bytes, and clients send
the same head many times. So a known head, and the body behind it, pass the parser by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from service.bounded_http import HEAD_END, BoundedHttpProtocol, ConnectionLimits, without_upgrade
from service.direct import Direct, DirectHead, DirectRequest, Headers
from service.errors import BodiesFull
from service.infer import JOIN_BYTES

KNOWN_HEAD_BYTES: Final = 2048  # a longer one is parsed anew; bounds what known heads take


class HttpProtocol(BoundedHttpProtocol):
    """One connection. Subclasses made by `http_protocol` carry the limits."""

    direct: Callable[[], Direct | None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct = type(self).direct()
        self._raw: tuple[DirectRequest, bytes] | None = None  # its body arrives past the parser; and its head's bytes
        self._parsed: DirectRequest | None = None  # its body arrives through the parser
        self._answered = 0  # bytes of the last direct answer, while none of another kind followed
        self._idle_since: float | None = None  # the time of the last direct answer, while nothing follows
        self._idle_timer: asyncio.TimerHandle | None = None
        self._defaults: tuple[Headers, bytes] = ([], b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """A direct request is told itself, because nothing awaits its event."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if isinstance(self._active, DirectRequest):
            self._active.lost()
        self._raw = self._parsed = None
        super().connection_lost(exc)

    def _take(self, data: bytes) -> None:
        """Known heads and their bodies go the direct way; the parser gets the rest."""
        self._idle_since = None
        while data and not self.transport.is_closing():
            if self._raw is not None:
                data = self._feed_raw(data, 0)
                continue
            if not (self._in_head and not self._unparsed and self._direct is not None and self._free):
                self._parse(data)
                return
            end = data.find(HEAD_END, 0, KNOWN_HEAD_BYTES) + len(HEAD_END)
            if end < len(HEAD_END):
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
        request.keep_alive = not self.stopping()
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
        plain = without_upgrade(head) is head
        self._parse(head)
        request = self._parsed
        if request is not None and plain and self._direct is not None and request.left == request.head.length:
            self._direct.learn(head, request.head)
        return b"" if self.transport.is_closing() else data[len(head) :]

    def _dispatch(self) -> None:
        if not self._goes_direct():
            super()._dispatch()

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

    def on_body(self, body: bytes) -> None:
        request = self._parsed
        if request is None:
            super().on_body(body)
            return
        self._unparsed = 0
        try:
            request.feed(body)
        except BodiesFull:
            self._parsed = None
            received = request.received()
            super()._dispatch()
            super().on_body(received + body)

    def on_message_complete(self) -> None:
        request, self._parsed = self._parsed, None
        if request is None:
            super().on_message_complete()
            return
        self._in_head = True
        self._unparsed = 0
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
        self._answered = 0
        super()._start_asgi_task(cycle, app)

    def stop(self) -> None:
        """The service stops now: whoever still waits on the direct way is told."""
        if isinstance(self._active, DirectRequest) and not self._active.response_complete:
            self._active.stop()

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
    limits: ConnectionLimits,
    direct: Callable[[], Direct | None],
    refused: Callable[[str], None],
    stopping: Callable[[], bool],
    unheard: Callable[[], None],
) -> type[HttpProtocol]:
    """The protocol with its limits; uvicorn makes one instance a connection, after `direct` is there to ask.

    `refused`, `stopping` and `unheard` are as `BoundedHttpProtocol` has them.
    """
    parts = {
        "limits": limits,
        "direct": staticmethod(direct),
        "refused": staticmethod(refused),
        "stopping": staticmethod(stopping),
        "unheard": staticmethod(unheard),
        "doormen": {},
    }
    return type("LimitedHttpProtocol", (HttpProtocol,), parts)
