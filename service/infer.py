"""Infer, the hot path: one plain ASGI coroutine from the request's bytes to the answer's, ahead of any router.

It reads the body, asks protocol for arrays, awaits the batcher and writes the answer. A disconnect is read off the
server's own state when the window is planned, so no task watches a request.
"""

from __future__ import annotations

import asyncio
import logging
from math import prod
from typing import Final
from urllib.parse import parse_qs

import numpy as np
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.asgi import JSON, Receive, Scope, Send, peer_of, refuse
from service.auth import Gate
from service.batcher import Batcher
from service.body import ENCODINGS, BodyBudget, BodyLimits, BodyLost, RequestBody
from service.errors import (
    InternalFault,
    InvalidInput,
    MethodNotAllowed,
    NotReady,
    RequestError,
    Stopped,
    TooLarge,
    UnsupportedEncoding,
    UnsupportedMedia,
)
from service.http import written
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.model import Model
from service.protocol import Decoded, Signature, decode, decode_npy, encode, encode_npy
from service.repository import Repository
from service.request import Answer, Client, ClientGone
from service.settings import Settings

log = logging.getLogger("tokenslab.infer")

OCTETS: Final = b"application/octet-stream"
NPY: Final = b"application/x-npy"
JOIN_BYTES: Final = 1 << 16  # below it a copy costs less than another write


class Infer:
    """`POST /v2/models/{name}[/versions/{version}]/infer`."""

    def __init__(
        self,
        repository: Repository,
        batcher: Batcher,
        metrics: Metrics,
        settings: Settings,
        lifecycle: Lifecycle,
        budget: BodyBudget,
        gate: Gate,
    ) -> None:
        self._repository = repository
        self._batcher = batcher
        self._metrics = metrics
        self._max_json = settings.max_json_bytes
        self._limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s, "max_body_mib")
        self._budget = budget
        self._write_timeout_s = settings.write_timeout_s
        self._max_rows = settings.max_queue_tokens
        self._lifecycle = lifecycle
        self._gate = gate
        self._routes: dict[str, tuple[Model, Signature]] = {}
        repository.watch(self._routes.clear)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one infer request; every fault becomes `{"error": ...}` with its status."""
        body = RequestBody(receive, self._budget)
        try:
            parts, headers = await self._answer(scope, body)
        except ClientGone:
            self._metrics.disconnects.labels("queue").inc()
        except BodyLost:
            self._metrics.disconnects.labels("body").inc()
        except RequestError as error:
            await self._refuse(error, body, send)
        except asyncio.CancelledError:  # the server's drain limit is over, or it was told to stop at once
            log.error("%s: stopped before it was answered", scope["path"])
            await self._refuse(Stopped("the service stopped before this request was answered"), body, send)
        except Exception:
            log.exception("infer failed on %s", scope["path"])
            await self._refuse(InternalFault("internal error; see the service's log"), body, send)
        else:
            size = sum(map(len, parts))
            await self._until_written(body, size)  # an earlier answer on the same connection
            await _send(parts, headers, send, closing=self._lifecycle.draining)
            await self._until_written(body, size)
        finally:
            body.release()

    async def _answer(
        self, scope: Scope, body: RequestBody
    ) -> tuple[list[bytes | memoryview], list[tuple[bytes, bytes]]]:
        if self._gate.guarded:
            self._gate.client(scope["headers"], peer_of(scope))
        model, signature = self._route(scope["path"])
        headers = _Headers(scope)
        data = await body.read(headers.length, self._limits)
        if headers.encoding:
            data = await body.inflate(data, headers.encoding, self._limits)
        request = headers.decode(signature, data, scope["query_string"], self._max_json)
        return _encode(signature, request, await self._run(model, request, body.client))

    async def _until_written(self, body: RequestBody, size: int) -> None:
        """Stay with an answer that its client reads slowly: its bytes count, and who reads nothing is cut off."""
        client = body.client
        if isinstance(client, RequestResponseCycle) and client.flow.write_paused:
            body.charge(size)
            if not await written(client, self._write_timeout_s):
                self._metrics.disconnects.labels("reply").inc()

    def _route(self, path: str) -> tuple[Model, Signature]:
        if not self._lifecycle.started:
            raise NotReady("the service is starting")
        route = self._routes.get(path)
        if route is None:
            parts = path.split("/")  # '', v2, models, NAME, [versions, VERSION,] infer
            name, version = parts[3], parts[5] if len(parts) == 7 else None
            model = self._repository.get(name, version)
            manifest = model.manifest
            signature = Signature(
                name, model.version, manifest.d_in, manifest.d_out, model.has_sequences, manifest.d_memory
            )
            route = self._routes[path] = (model, signature)  # known paths only, so it cannot grow without bound
        return route

    async def _refuse(self, error: RequestError, body: RequestBody, send: Send) -> None:
        self._metrics.rejections.labels(error.reason).inc()
        await refuse(error, body, send, closing=self._lifecycle.draining)

    async def _run(self, model: Model, request: Decoded, client: Client) -> Answer:
        if request.batch is not None and prod(request.batch) > self._max_rows:
            raise TooLarge(
                f"tokens: {request.batch[0]} x {request.batch[1]} rows with their padding, "
                f"the queue holds {self._max_rows} (max_queue_tokens)"
            )
        if not len(request.tokens):
            return Answer(np.empty((0, model.manifest.d_out), np.float32), 0.0, 0.0, 0)
        return await self._batcher.submit(
            model, request.tokens, request.seq_lens, client, request.timeout_s, request.memory
        )


def is_infer(path: str) -> bool:
    """Whether `path` is the infer path of some model, known or not."""
    if not (path.startswith("/v2/models/") and path.endswith("/infer")):
        return False
    slashes = path.count("/")
    return slashes == 4 or (slashes == 6 and path.split("/")[4] == "versions")


class _Headers:
    """The few request headers that matter here."""

    __slots__ = ("content_type", "encoding", "json_length", "length")

    def __init__(self, scope: Scope) -> None:
        if scope["method"] != "POST":
            raise MethodNotAllowed(f"method {scope['method']}: infer takes POST")
        self.content_type = b""
        self.json_length: bytes | None = None
        self.length: int | None = None
        self.encoding = ""  # gzip or deflate, if any
        for name, value in scope["headers"]:
            if name == b"content-length":
                self.length = int(value)  # the server's parser has checked it, and that there is one
            elif name == b"content-type":
                self.content_type = value.partition(b";")[0].strip().lower()
            elif name == b"inference-header-content-length":
                if self.json_length is not None:
                    raise InvalidInput("Inference-Header-Content-Length: found twice, expected once")
                self.json_length = value
            elif name == b"content-encoding":
                if self.encoding:
                    raise UnsupportedEncoding("Content-Encoding: found twice, expected one coding")
                self.encoding = value.strip().lower().decode("latin-1")
        if self.encoding == "identity":
            self.encoding = ""
        if self.encoding and self.encoding not in ENCODINGS:
            raise UnsupportedEncoding(
                f"Content-Encoding: found {self.encoding[:40]!r}, expected {' or '.join(ENCODINGS)}"
            )
        if self.content_type not in (b"", JSON, OCTETS, NPY):
            raise UnsupportedMedia(
                f"Content-Type: found {self.content_type[:80].decode('latin-1')!r}, expected application/json, "
                "application/octet-stream or application/x-npy"
                + ("; curl sends this unless -H names another" if b"form-urlencoded" in self.content_type else "")
            )

    def decode(self, signature: Signature, body: memoryview, query: bytes, max_json: int) -> Decoded:
        """The body as arrays, by its content type."""
        if self.content_type == NPY:
            seq_lens = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("seq_lens", [])
            if len(seq_lens) > 1:
                raise InvalidInput(f"seq_lens: {len(seq_lens)} times in the query, expected once")
            return decode_npy(signature, body, seq_lens[0] if seq_lens else None)
        if self.content_type == OCTETS and self.json_length is None:
            raise InvalidInput(
                "Inference-Header-Content-Length: missing; binary tensors need it (0: the body is `tokens` alone)"
            )
        return decode(signature, body, self.json_length, max_json)


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


async def _send(
    parts: list[bytes | memoryview], headers: list[tuple[bytes, bytes]], send: Send, *, closing: bool
) -> None:
    size = sum(map(len, parts))
    headers.append((b"content-length", b"%d" % size))
    if closing:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if size <= JOIN_BYTES:
        parts = [b"".join(parts)]
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})
