"""Infer, the hot path: one plain ASGI coroutine from the request's bytes to the answer's, ahead of any router.

It reads the body, asks protocol for arrays, awaits the batcher and writes the answer. A disconnect is read off the
server's own state when the window is planned, so no task watches a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qs

import numpy as np
import orjson

from service.batcher import Answer, Batcher, Client, ClientGone
from service.errors import (
    BodyTimeout,
    InvalidInput,
    MethodNotAllowed,
    NotReady,
    RequestError,
    TooLarge,
    Unsupported,
    UnsupportedMedia,
)
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.protocol import Decoded, Signature, decode, decode_npy, encode, encode_npy
from service.repository import Model, Repository
from service.settings import Settings

log = logging.getLogger("tokenslab.infer")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON: Final = b"application/json"
OCTETS: Final = b"application/octet-stream"
NPY: Final = b"application/x-npy"
# After a refusal, how much of an unread body is taken off the connection so that the client sees the answer and not a
# reset: what a fast client has sent before it reads, no more.
DISCARD_BYTES: Final = 8 << 20
DISCARD_S: Final = 2.0


class Infer:
    """`POST /v2/models/{name}[/versions/{version}]/infer`."""

    def __init__(
        self, repository: Repository, batcher: Batcher, metrics: Metrics, settings: Settings, lifecycle: Lifecycle
    ) -> None:
        self._repository = repository
        self._batcher = batcher
        self._metrics = metrics
        self._settings = settings
        self._lifecycle = lifecycle
        self._routes: dict[str, tuple[Model, Signature]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one infer request; every fault becomes `{"error": ...}` with its status."""
        body = _Body(receive)
        try:
            model, signature = self._route(scope["path"])
            headers = _Headers(scope)
            data = await body.read(headers, self._settings)
            request = headers.decode(signature, data, scope["query_string"], self._settings.max_json_bytes)
            answer = await self._run(model, request, body.client)
            parts, extra = _encode(signature, request, answer)
        except ClientGone:
            self._metrics.disconnects.labels("queue").inc()
            return
        except _BodyLost:
            self._metrics.disconnects.labels("body").inc()
            return
        except RequestError as error:
            self._metrics.rejections.labels(error.reason).inc()
            await _refuse(error, body, send, closing=self._lifecycle.draining)
            return
        await _answer(parts, extra, send, closing=self._lifecycle.draining)

    def _route(self, path: str) -> tuple[Model, Signature]:
        if not self._lifecycle.started:
            raise NotReady("the service is starting")
        route = self._routes.get(path)
        if route is None:
            parts = path.split("/")  # '', v2, models, NAME, [versions, VERSION,] infer
            name, version = parts[3], parts[5] if len(parts) == 7 else None
            model = self._repository.get(name, version)
            manifest = model.manifest
            signature = Signature(name, model.version, manifest.d_in, manifest.d_out, model.has_sequences)
            route = self._routes[path] = (model, signature)  # known paths only, so it cannot grow without bound
        return route

    async def _run(self, model: Model, request: Decoded, client: Client) -> Answer:
        if not len(request.tokens):
            return Answer(np.empty((0, model.manifest.d_out), np.float32), 0.0, 0.0, 0)
        return await self._batcher.submit(model, request.tokens, request.seq_lens, client, request.timeout_s)


def is_infer(path: str) -> bool:
    """Whether `path` is the infer path of some model, known or not."""
    if not (path.startswith("/v2/models/") and path.endswith("/infer")):
        return False
    slashes = path.count("/")
    return slashes == 4 or (slashes == 6 and path.split("/")[4] == "versions")


class _BodyLost(Exception):
    """The connection ended within the body."""


class _Headers:
    """The few request headers that matter here."""

    __slots__ = ("content_type", "json_length", "length")

    def __init__(self, scope: Scope) -> None:
        if scope["method"] != "POST":
            raise MethodNotAllowed(f"method {scope['method']}: infer takes POST")
        self.content_type = b""
        self.json_length: bytes | None = None
        self.length: int | None = None
        encoding = b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                self.length = int(value)  # the server's parser has checked it
            elif name == b"content-type":
                self.content_type = value.partition(b";")[0].strip().lower()
            elif name == b"inference-header-content-length":
                self.json_length = value
            elif name == b"content-encoding":
                encoding = value.strip().lower()
        if encoding not in (b"", b"identity"):
            raise Unsupported(f"Content-Encoding: found {encoding[:40].decode('latin-1')!r}, expected identity")
        if self.content_type not in (b"", JSON, OCTETS, NPY):
            raise UnsupportedMedia(
                f"Content-Type: found {self.content_type[:80].decode('latin-1')!r}, expected application/json, "
                "application/octet-stream or application/x-npy"
            )

    def decode(self, signature: Signature, body: memoryview, query: bytes, max_json: int) -> Decoded:
        """The body as arrays, by its content type."""
        if self.content_type == NPY:
            seq_lens = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("seq_lens", [None])
            return decode_npy(signature, body, seq_lens[0])
        if self.content_type == OCTETS and self.json_length is None:
            raise InvalidInput(
                "Inference-Header-Content-Length: missing; binary tensors need it (0: the body is `tokens` alone)"
            )
        return decode(signature, body, self.json_length, max_json)


class _AnyClient:
    """A client on a server that does not say when it leaves."""

    disconnected = False


class _Body:
    """The request's body as it arrives, and the client behind it."""

    __slots__ = ("_complete", "_receive", "client")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        # uvicorn's `receive` is a method of the request's own state, which knows whether the client is still there and
        # whether the body is complete; asking it costs nothing, where a task awaiting http.disconnect costs 49 us.
        cycle = getattr(receive, "__self__", None)
        if cycle is not None and hasattr(cycle, "disconnected") and hasattr(cycle, "more_body"):
            self.client: Client = cycle
            self._complete: bool = not cycle.more_body
        else:
            self.client, self._complete = _AnyClient(), False

    async def read(self, headers: _Headers, settings: Settings) -> memoryview:
        """The whole body. Raises TooLarge before reading when its length says so, BodyTimeout, _BodyLost."""
        limit = settings.max_body_bytes
        if headers.length is not None and headers.length > limit:
            raise TooLarge(f"body: {headers.length} bytes, the limit is {limit} (max_body_mib)")
        if self._complete:  # it came with its headers: no timer, no copy
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _BodyLost
            return memoryview(message["body"])
        buffer = bytearray() if headers.length is None else None
        # Untouched pages of an empty array cost no memory, so a length alone claims none.
        array = np.empty(headers.length or 0, np.uint8)
        view, at = array.data, 0
        while not self._complete:
            chunk = await self._next(settings.body_timeout_s, at)
            if buffer is not None:
                buffer += chunk
                if len(buffer) > limit:
                    raise TooLarge(f"body: more than {limit} bytes (max_body_mib)")
            else:
                view[at : at + len(chunk)] = chunk
            at += len(chunk)
        return memoryview(buffer) if buffer is not None else view

    async def _next(self, timeout_s: float, at: int) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._receive()
        except TimeoutError as cause:
            raise BodyTimeout(f"body: nothing arrived for {timeout_s:g} s after {at} bytes (body_timeout_s)") from cause
        if message["type"] == "http.disconnect":
            raise _BodyLost
        self._complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    async def discard(self) -> None:
        """Take a bounded rest of the body off the connection."""
        left = DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_S):
                while not self._complete and left > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return
                    self._complete = not message.get("more_body", False)
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return

    @property
    def complete(self) -> bool:
        return self._complete


def _encode(
    signature: Signature, request: Decoded, answer: Answer
) -> tuple[list[bytes | memoryview], list[tuple[bytes, bytes]]]:
    timing = (
        f"queue;dur={answer.queue_s * 1e3:.3f}, compute;dur={answer.compute_s * 1e3:.3f}, "
        f'window;desc="{answer.window_tokens}"'
    ).encode()
    if request.npy:
        return encode_npy(request, answer.out), [(b"server-timing", timing), (b"content-type", NPY)]
    json_length, parts = encode(signature, request, answer.out)
    if json_length is None:
        return parts, [(b"server-timing", timing), (b"content-type", JSON)]
    length = (b"inference-header-content-length", b"%d" % json_length)
    return parts, [(b"server-timing", timing), (b"content-type", OCTETS), length]


async def _answer(
    parts: list[bytes | memoryview], headers: list[tuple[bytes, bytes]], send: Send, *, closing: bool
) -> None:
    headers.append((b"content-length", b"%d" % sum(map(len, parts))))
    if closing:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})


async def _refuse(error: RequestError, body: _Body, send: Send, *, closing: bool) -> None:
    """Write the error first; an unread body then costs a bounded discard and the connection."""
    status, headers, text = error_response(error)
    unread = not body.complete
    if unread or error.close or closing:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if not unread:
        await send({"type": "http.response.body", "body": text})
        return
    await send({"type": "http.response.body", "body": text, "more_body": True})
    if not error.close:
        await body.discard()
    await send({"type": "http.response.body", "body": b""})


def error_response(error: RequestError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of a fault."""
    text = orjson.dumps({"error": str(error)})
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(text))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", b"POST"))
    if isinstance(error, Unsupported):
        headers.append((b"accept-encoding", b"identity"))
    return error.status, headers, text
