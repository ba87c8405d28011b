"""The front of a pipeline: the Open Inference Protocol on one side, handles of stages on the other.

It reads, decodes, passes the tokens from stage to stage and encodes; it holds no weights and runs no model. A stage
whose replica dies while it has the tokens is asked again elsewhere: an answer depends on the request alone, so that
nothing is computed wrongly or twice as far as anybody can see.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import orjson
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from deploy.ray.line import Line
from deploy.ray.stage import Ask
from service.asgi import JSON, Receive, Scope, Send, refuse
from service.body import BodyBudget, BodyLimits, BodyLost, RequestBody
from service.errors import DeadlineExceeded, InternalFault, NotFound, NotReady, RequestError, TooLarge
from service.head import InferHead, is_infer
from service.infer import encode_reply, encode_slowly, encodes_slowly
from service.json_decoder import INLINE_JSON, JsonDecoder
from service.packing import Float32
from service.protocol import Decoded, Signature
from service.request import Answer
from service.settings import Settings

log = logging.getLogger("tokenslab.front")

ATTEMPTS: Final = 5  # replicas that may die under one request, at one stage
PAUSE_S: Final = 0.1  # doubled each time: Ray needs a moment to see that a node is gone

# Asks the stage's deployment: its model's name, and the tokens.
AskStage = Callable[[str, Ask], Awaitable[Answer | RequestError]]


class StageLost(NotReady):
    """Replicas died under this request again and again."""

    reason = "stage_lost"


class Front:
    """The ASGI callable."""

    def __init__(
        self, line: Line, stages: Sequence[AskStage], settings: Settings, died: tuple[type[Exception], ...]
    ) -> None:
        """`stages` ask one stage each, in the line's order; they raise one of `died` if a replica was lost."""
        self._stages = stages
        self._settings = settings
        self._died = died
        self._budget = BodyBudget(settings.max_bodies_bytes)
        self._limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s, "max_body_mib")
        self._decoder = JsonDecoder(settings.timeout_s)
        self._registry = CollectorRegistry()
        self._requests = Counter("tokenslab_front_requests", "By status", ["status"], registry=self._registry)
        self._retries = Counter(
            "tokenslab_front_retries", "Asked again, for a replica died", ["stage"], registry=self._registry
        )
        self._signatures: dict[str, tuple[Signature, tuple[str, ...]]] = {}
        first, last, version = line.stages[0], line.stages[-1], str(line.version)
        for precision in line.precisions:
            names = [f"{line.name}-{precision}"]
            if precision == first.default_precision:
                names.append(line.name)
            for name in names:
                signature = Signature(name, version, first.d_in, last.d_out, first.kind == "sequence")
                self._signatures[name] = signature, line.models(precision)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        body = RequestBody(receive, self._budget)
        try:
            if is_infer(scope["path"]):
                parts, headers = await self._infer(scope, body)
            elif scope["path"] == "/metrics":
                parts = [generate_latest(self._registry)]
                headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
            else:
                parts, headers = [orjson.dumps(self._told(scope["path"]))], [(b"content-type", JSON)]
        except BodyLost:
            return
        except RequestError as error:
            self._requests.labels(error.status).inc()
            await refuse(error, body, send)
        except Exception:
            self._requests.labels(InternalFault.status).inc()
            log.exception("a request failed on %s", scope["path"])
            await refuse(InternalFault("internal error; see the log of the front"), body, send)
        else:
            self._requests.labels(200).inc()
            data = b"".join(parts)
            headers.append((b"content-length", b"%d" % len(data)))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data})
        finally:
            body.release()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._decoder.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _told(self, path: str) -> dict[str, Any]:
        """Health and metadata; raises NotFound."""
        if path == "/v2/health/live":
            return {"live": True}
        if path == "/v2/health/ready":
            return {"ready": True}
        if path == "/v2":
            return {"name": "tokenslab", "extensions": ["binary_tensor_data"], "models": list(self._signatures)}
        name = path.removeprefix("/v2/models/").removesuffix("/ready")
        signature, models = self._known(name)
        if path.endswith("/ready"):
            return {"name": name, "ready": True}
        inputs = [{"name": "tokens", "datatype": "FP32", "shape": [-1, signature.d_in]}]
        if signature.has_sequences:
            inputs.append({"name": "seq_lens", "datatype": "INT64", "shape": [-1]})
        outputs = [{"name": "out", "datatype": "FP32", "shape": [-1, signature.d_out]}]
        versions, stages = [signature.version], {"stages": list(models)}
        return {"name": name, "versions": versions, "inputs": inputs, "outputs": outputs, "parameters": stages}

    def _known(self, name: str) -> tuple[Signature, tuple[str, ...]]:
        known = self._signatures.get(name)
        if known is None:
            raise NotFound(f"unknown model {name[:80]!r}; served: {', '.join(self._signatures)}")
        return known

    async def _infer(
        self, scope: Scope, body: RequestBody
    ) -> tuple[list[bytes | memoryview], list[tuple[bytes, bytes]]]:
        parts = scope["path"].split("/")  # '', v2, models, NAME, [versions, VERSION,] infer
        signature, models = self._known(parts[3])
        if len(parts) == 7 and parts[5] != signature.version:
            raise NotFound(f"model {parts[3]!r} has no version {parts[5][:20]!r} here; served: {signature.version}")
        head = InferHead(scope["method"], scope["headers"], scope["query_string"])
        data = await body.read(head.length, self._limits)
        if head.encoding:
            data = await body.inflate(data, head.encoding, self._limits)
        max_json = self._settings.max_json_bytes
        if INLINE_JSON < head.json_size(len(data)) <= max_json:
            request = await self._decoder.decode(signature, data, head.json_length, max_json)
        else:
            request = head.decode(signature, data, max_json)
        if request.batch is not None and prod(request.batch) > self._settings.max_queue_tokens:
            raise TooLarge(
                f"tokens: {request.batch[0]} x {request.batch[1]} rows with their padding (max_queue_tokens)"
            )
        answer = await self._through(models, signature, request)
        if encodes_slowly(request, answer):
            return await encode_slowly(signature, request, answer)
        return encode_reply(signature, request, answer)

    async def _through(self, models: Sequence[str], signature: Signature, request: Decoded) -> Answer:
        if not len(request.tokens):
            return Answer(np.empty((0, signature.d_out), np.float32), 0.0, 0.0, 0)
        loop = asyncio.get_running_loop()
        limit_s = min(request.timeout_s or self._settings.timeout_s, self._settings.timeout_s)
        deadline = loop.time() + limit_s
        tokens: Float32 = request.tokens
        queue_s = compute_s = 0.0
        window = 0
        try:
            async with asyncio.timeout_at(deadline):
                for stage, model in zip(self._stages, models, strict=True):
                    answer = await self._ask(stage, model, request, tokens, deadline)
                    tokens, window = answer.out, answer.window_tokens
                    queue_s, compute_s = queue_s + answer.queue_s, compute_s + answer.compute_s
        except TimeoutError:
            raise DeadlineExceeded(f"timeout: not answered by every stage within {limit_s:g} s") from None
        return Answer(tokens, queue_s, compute_s, window)

    async def _ask(self, stage: AskStage, model: str, request: Decoded, tokens: Float32, deadline: float) -> Answer:
        loop = asyncio.get_running_loop()
        for attempt in range(ATTEMPTS):
            left_s = max(1e-3, deadline - loop.time())
            try:
                answer = await stage(model, Ask(tokens, request.seq_lens, left_s, request.priority, request.isolate))
            except self._died as lost:
                self._retries.labels(model).inc()
                log.warning("%s: a replica was lost with a request (%s); asking another", model, type(lost).__name__)
                await asyncio.sleep(PAUSE_S * 2**attempt)
                continue
            if isinstance(answer, RequestError):
                raise answer
            return answer
        raise StageLost(f"{model}: {ATTEMPTS} replicas were lost under this request; a retry may help")
