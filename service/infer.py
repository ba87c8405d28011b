"""Infer, the hot path: one plain ASGI coroutine from the request's bytes to the answer's, ahead of any router.

It reads the body, asks protocol for arrays, awaits the batcher and writes the answer. A disconnect is read off the
server's own state when the window is planned, so no task watches a request.
"""

from __future__ import annotations

import asyncio
import logging
from math import prod
from typing import Final

import numpy as np
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.asgi import JSON, Receive, Scope, Send, peer_of, refuse
from service.auth import Gate
from service.batcher import Batcher
from service.body import BodyBudget, BodyLimits, BodyLost, RequestBody
from service.errors import InternalFault, NotReady, RequestError, Stopped, TooLarge
from service.head import NPY, OCTETS, InferHead
from service.json_decoder import INLINE_JSON, JsonDecoder
from service.lifecycle import Lifecycle
from service.metrics import Metrics
from service.model import Model
from service.protocol import Decoded, Signature, encode, encode_json, encode_npy
from service.repository import Repository
from service.request import Answer, Client, ClientGone
from service.settings import Settings
from service.slow_reader import written

log = logging.getLogger("tokenslab.infer")

JSON_VALUES: Final = 1 << 16  # about 0.7 MiB of text, 4 ms
TRACE: Final = "tokenslab.trace"
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
        decoder: JsonDecoder,
    ) -> None:
        self._repository = repository
        self.batcher = batcher
        self.metrics = metrics
        self.max_json = settings.max_json_bytes
        self.limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s, "max_body_mib")
        self.budget = budget
        self.write_timeout_s = settings.write_timeout_s
        self._max_rows = settings.max_queue_tokens
        self.lifecycle = lifecycle
        self.gate = gate
        self.decoder = decoder
        self._routes: dict[str, tuple[Model, Signature]] = {}
        repository.watch(self._routes.clear)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one infer request; every fault becomes `{"error": ...}` with its status."""
        body = RequestBody(receive, self.budget)
        try:
            parts, headers = await self._answer(scope, body)
        except ClientGone:
            self.metrics.disconnects.labels("queue").inc()
        except BodyLost:
            self.metrics.disconnects.labels("body").inc()
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
            await _send(parts, headers, send)
            await self._until_written(body, size)
        finally:
            body.release()

    async def _answer(
        self, scope: Scope, body: RequestBody
    ) -> tuple[list[bytes | memoryview], list[tuple[bytes, bytes]]]:
        client_id = self.gate.client(scope["headers"], peer_of(scope)) if self.gate.guarded else ""
        model, signature = self.route(scope["path"])
        headers = InferHead(scope["method"], scope["headers"], scope["query_string"])
        data = await body.read(headers.length, self.limits)
        if headers.encoding:
            data = await body.inflate(data, headers.encoding, self.limits)
        request = await self._decode(headers, signature, data)
        trace = scope.get(TRACE)  # where tracing is on: it stands for the client, so that windows find it
        client = body.client if trace is None else trace.received(body.client)
        answer = await self._run(model, request, client, client_id)
        if encodes_slowly(request, answer):
            return await encode_slowly(signature, request, answer)
        return encode_reply(signature, request, answer)

    async def _decode(self, head: InferHead, signature: Signature, data: memoryview) -> Decoded:
        if INLINE_JSON < head.json_size(len(data)) <= self.max_json:
            return await self.decoder.decode(signature, data, head.json_length, self.max_json)
        return head.decode(signature, data, self.max_json)

    async def _until_written(self, body: RequestBody, size: int) -> None:
        """Stay with an answer that its client reads slowly: its bytes count, and who reads nothing is cut off."""
        client = body.client
        if isinstance(client, RequestResponseCycle) and client.flow.write_paused:
            body.charge(size)
            if not await written(client, self.write_timeout_s):
                self.metrics.disconnects.labels("reply").inc()

    def route(self, path: str) -> tuple[Model, Signature]:
        """The model behind an infer path; raises NotReady or NotFound."""
        if not self.lifecycle.started:
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
        self.metrics.rejections.labels(error.reason).inc()
        await refuse(error, body, send)

    async def _run(self, model: Model, request: Decoded, client: Client, client_id: str) -> Answer:
        answer = self.at_once(model, request)
        if answer is not None:
            return answer
        return await self.batcher.submit(
            *(model, request.tokens, request.seq_lens, client, request.timeout_s, request.memory),
            priority=request.priority,
            isolate=request.isolate,
            client_id=client_id,
        )

    def at_once(self, model: Model, request: Decoded) -> Answer | None:
        """The answer to a request without rows, None where there are some; raises TooLarge for too much padding.

        Counts the padding that was dropped.
        """
        if request.batch is not None and prod(request.batch) > self._max_rows:
            raise TooLarge(
                f"tokens: {request.batch[0]} x {request.batch[1]} rows with their padding, "
                f"the queue holds {self._max_rows} (max_queue_tokens)"
            )
        if request.batch is not None:
            self.metrics.padding.labels(model.label).inc(prod(request.batch) - len(request.tokens))
        return None if len(request.tokens) else Answer(np.empty((0, model.manifest.d_out), np.float32), 0.0, 0.0, 0)


def encode_reply(
    signature: Signature, request: Decoded, answer: Answer
) -> tuple[list[bytes | memoryview], list[tuple[bytes, bytes]]]:
    """The parts of the answer's body, and its headers but for the length."""
    timing = _timing(answer)
    if request.npy:
        return encode_npy(request, answer.out), [(b"server-timing", timing), (b"content-type", NPY)]
    json_length, parts = encode(signature, request, answer.out)
    if json_length is None:
        return parts, [(b"server-timing", timing), (b"content-type", JSON)]
    length = (b"inference-header-content-length", b"%d" % json_length)
    return parts, [(b"server-timing", timing), (b"content-type", OCTETS), length]


def encodes_slowly(request: Decoded, answer: Answer) -> bool:
    """Whether the answer as JSON would hold the event loop for more than a few milliseconds."""
    return not (request.binary or request.npy) and answer.out.size > JSON_VALUES


async def encode_slowly(
    signature: Signature, request: Decoded, answer: Answer
) -> tuple[list[bytes | memoryview], list[tuple[bytes, bytes]]]:
    """`encode_reply` for long JSON, JSON_VALUES of it in one turn of the loop."""
    parts: list[bytes | memoryview] = []
    for part in encode_json(signature, request, answer.out, JSON_VALUES):
        parts.append(part)
        await asyncio.sleep(0)
    return parts, [(b"server-timing", _timing(answer)), (b"content-type", JSON)]


def _timing(answer: Answer) -> bytes:
    return b'queue;dur=%.3f, compute;dur=%.3f, window;desc="%d"' % (
        answer.queue_s * 1e3,
        answer.compute_s * 1e3,
        answer.window_tokens,
    )


async def _send(parts: list[bytes | memoryview], headers: list[tuple[bytes, bytes]], send: Send) -> None:
    size = sum(map(len, parts))
    headers.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if size <= JOIN_BYTES:
        parts = [b"".join(parts)]
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})
