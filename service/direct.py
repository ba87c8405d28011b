"""The direct way of an infer request: from the parser to the batcher and back, without a task or an ASGI message.

It takes what nearly all requests are: a POST with a Content-Length, whose body is small JSON, binary tensors or npy.
All else goes the ASGI way, through `infer`, which answers the same: other methods, chunked or coded bodies, `Expect`,
a query, requests that are traced, requests behind another one or behind an answer that is read slowly. So does a body
for which the budget has no room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import ClassVar, Final, Protocol

import numpy as np

from service.asgi import error_response
from service.body import patience_ends, stalled
from service.errors import InternalFault, RequestError, Stopped
from service.head import InferHead, is_infer
from service.infer import JOIN_BYTES, Infer, encode_reply, encode_slowly, encodes_slowly
from service.json_decoder import INLINE_JSON
from service.packing import kept
from service.protocol import Decoded, Signature
from service.request import Answer, ClientGone, Outcome, Request
from service.request_id import HEADER, request_id
from service.slow_reader import SlowReader, written

log = logging.getLogger("tokenslab.infer")

KNOWN_HEADS: Final = 1024
HEAD_BYTES: Final = 2048  # more than the JSON before an answer's tensor, unless the client's own id is in it

Headers = list[tuple[bytes, bytes]]


class Connection(Protocol):
    """Where a request came from, and its answer goes."""

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
        """Write it; `size` is that of `parts` together. Of more than JOIN_BYTES, they may be kept."""


class DirectHead:
    """A head that goes the direct way, whoever sends it."""

    __slots__ = ("head", "headers", "length", "named", "path")

    def __init__(self, path: str, head: InferHead, length: int, headers: Headers) -> None:
        self.path = path
        self.head = head
        self.length = length
        self.headers = headers
        self.named = any(name == HEADER for name, _ in headers)


class Direct:
    """What all direct requests share; and the heads seen, since clients send the same head again and again."""

    def __init__(self, infer: Infer, loop: asyncio.AbstractEventLoop, *, traced: bool = False) -> None:
        self.infer = infer
        self.loop = loop
        self.traced = traced
        self.known: dict[bytes, DirectHead] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    def head(self, method: bytes, url: bytes, headers: Headers) -> DirectHead | None:
        """The head of a direct request, None for one that goes the ASGI way; header names are in lower case."""
        path = url.decode("latin-1")
        if self.traced or method != b"POST" or not is_infer(path) or "%" in path or "?" in path:
            return None
        if any(name in (b"transfer-encoding", b"expect") for name, _ in headers):
            return None
        try:
            self.infer.route(path)
            head = InferHead("POST", headers, b"")
        except RequestError:  # it deserves a refusal, before its body is read
            return None
        length = head.length
        if length is None or head.encoding or length > self.infer.limits.size:
            return None
        if head.json_size(length) > INLINE_JSON:
            return None
        return DirectHead(path, head, length, headers)

    def client(self, head: DirectHead, peer: str | None) -> str | None:
        """Whose share a request with this head takes, by the keys that are in force now; None: it goes the ASGI way,
        to be refused.
        """
        gate = self.infer.gate
        if not gate.guarded:
            return ""
        try:
            return gate.client(head.headers, peer)
        except RequestError:
            return None

    def learn(self, data: bytes, head: DirectHead) -> None:
        """Remember the bytes that the parser took for `head`, for as long as there is room."""
        if len(self.known) >= KNOWN_HEADS:
            self.known.clear()
        self.known[data] = head

    def start(self, work: Coroutine[None, None, None]) -> None:
        """What is too long for one turn of the loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def follow(self, client: SlowReader, size: int) -> None:
        """Stay with an answer that its client reads slowly: its bytes count, and who reads nothing is cut off."""
        self.infer.budget.give(-size)
        try:
            if not await written(client, self.infer.write_timeout_s):
                self.infer.metrics.disconnects.labels("reply").inc()
        finally:
            self.infer.budget.give(size)


class _Unawaited:
    def set(self) -> None:
        """Nobody waits for it."""


class DirectRequest:
    """One request. To uvicorn it is a cycle, so that requests may queue behind it."""

    __slots__ = (
        *("_at", "_began", "_body", "_connection", "_decoded", "_direct", "_id", "_last", "_patience", "_signature"),
        *("_waiting", "client_id", "disconnected", "head", "keep_alive", "left", "response_complete"),
    )

    message_event: ClassVar = _Unawaited()

    def __init__(self, direct: Direct, connection: Connection, head: DirectHead, client_id: str) -> None:
        self._direct = direct
        self._connection = connection
        self.head = head
        self.client_id = client_id
        self.left = head.length  # bytes of the body that are still to come
        self.keep_alive = True
        self.disconnected = False
        self.response_complete = False
        self._at = 0
        self._id = b""
        self._body: memoryview | None = None
        self._decoded: Decoded | None = None
        self._signature: Signature | None = None
        self._waiting: Request | None = None
        self._patience: asyncio.TimerHandle | None = None

    def feed(self, chunk: bytes | memoryview) -> None:
        """Take a piece of the body, no more than is `left`; raises BodiesFull, and has taken nothing then."""
        budget, size = self._direct.infer.budget, len(chunk)
        budget.take(size)
        budget.chunks += 1
        if size == self.head.length:  # it came whole: no timer, no copy
            self._body = memoryview(chunk)
        else:
            if self._body is None:
                # Untouched pages of an empty array cost no memory, so a length alone claims none.
                self._body = np.empty(self.head.length, np.uint8).data
                self._began = self._direct.loop.time()
                self._await(self._direct.infer.limits.silence_s)
            self._body[self._at : self._at + size] = chunk
            self._last = self._direct.loop.time()
        self._at += size
        self.left -= size

    def complete(self) -> None:
        """The body is there: decode it and give it to the batcher."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        infer, body = self._direct.infer, self._body if self._body is not None else memoryview(b"")
        self._body = None
        try:
            model, self._signature = infer.route(self.head.path)
            self._decoded = decoded = self.head.head.decode(self._signature, body, infer.max_json)
            answer = infer.at_once(model, decoded)
            if answer is None:
                self._waiting = infer.batcher.enqueue(
                    model,
                    decoded.tokens,
                    decoded.seq_lens,
                    self,
                    decoded.timeout_s,
                    decoded.memory,
                    priority=decoded.priority,
                    isolate=decoded.isolate,
                    client_id=self.client_id,
                    done=self._done,
                )
                return
        except Exception as fault:  # noqa: BLE001 - whatever it is, it is this request's answer
            self._done(fault)
        else:
            self._done(answer)

    def received(self) -> bytes:
        """What is there of the body, and no claim on the budget any more: for whoever takes the request over."""
        received = b"" if self._body is None else bytes(self._body[: self._at])
        self.response_complete = True
        self._release()
        return received

    def lost(self) -> None:
        """The client has left."""
        self.disconnected = True
        if self.left and not self.response_complete:
            self._direct.infer.metrics.disconnects.labels("body").inc()
            self._release()

    def stop(self) -> None:
        """The service stops before the answer is there."""
        if self._waiting is not None:
            self._direct.infer.batcher.withdraw(self._waiting)
        log.error("%s: stopped before it was answered", self.head.path, extra={"request_id": self._name()})
        self._refuse(Stopped("the service stopped before this request was answered"))

    def _done(self, outcome: Outcome) -> None:
        self._waiting = None
        if self.disconnected:
            if isinstance(outcome, ClientGone):
                self._direct.infer.metrics.disconnects.labels("queue").inc()
            self._release()
            return
        if isinstance(outcome, Answer) and self._decoded is not None and self._signature is not None:
            if outcome.out.nbytes > JOIN_BYTES - HEAD_BYTES or self._decoded.id is not None:
                outcome.out = kept(outcome.out)  # smaller ones are copied when they are written
            if encodes_slowly(self._decoded, outcome):
                self._direct.start(self._encode(self._signature, self._decoded, outcome))
                return
            try:
                parts, headers = encode_reply(self._signature, self._decoded, outcome)
            except Exception as fault:  # noqa: BLE001 - as above
                outcome = fault
            else:
                self._reply(parts, headers)
                return
        self._refuse(outcome)

    async def _encode(self, signature: Signature, decoded: Decoded, answer: Answer) -> None:
        fault: Exception | None = None
        try:
            parts, headers = await encode_slowly(signature, decoded, answer)
        except Exception as error:  # noqa: BLE001 - as above
            fault = error
        if self.disconnected or self.response_complete:  # it left, or was told that the service stops
            self._release()
        elif fault is not None:
            self._refuse(fault)
        else:
            self._reply(parts, headers)

    def _reply(self, parts: list[bytes | memoryview], headers: Headers) -> None:
        size = sum(map(len, parts))
        headers.append((b"content-length", b"%d" % size))
        self._send(200, headers, parts, size, close=False)

    def _name(self) -> str:
        """Its id, which its answer will have too."""
        self._id = request_id(self.head.headers)
        return self._id.decode("ascii")

    def _refuse(self, fault: Outcome) -> None:
        if not isinstance(fault, RequestError):
            error = fault if isinstance(fault, Exception) else None
            log.error("infer failed on %s", self.head.path, exc_info=error, extra={"request_id": self._name()})
            fault = InternalFault("internal error; see the service's log")
        self._direct.infer.metrics.rejections.labels(fault.reason).inc()
        status, headers, text = error_response(fault)
        self._send(status, headers, [text], len(text), close=fault.close)

    def _send(
        self, status: int, headers: Headers, parts: Sequence[bytes | memoryview], size: int, *, close: bool
    ) -> None:
        self._release()
        headers.append((HEADER, self._id or request_id(self.head.headers if self.head.named else ())))
        self._connection.answer(self, status, headers, parts, size, close=close)

    def _release(self) -> None:
        """Its bytes are free again; the connection may keep this object for as long as it idles."""
        if self._patience is not None:
            self._patience.cancel()
        self._direct.infer.budget.give(self._at)
        self._at = 0
        self._body = self._decoded = self._waiting = self._patience = None

    def _await(self, seconds: float) -> None:
        self._patience = self._direct.loop.call_later(seconds, self._check_patience)

    def _check_patience(self) -> None:
        limits, now = self._direct.infer.limits, self._direct.loop.time()
        left = patience_ends(self._began, self._last, self._at, limits) - now
        if left > 0:
            self._await(left)
            return
        self._patience = None
        self._refuse(stalled(self._at, now - self._began, limits))
