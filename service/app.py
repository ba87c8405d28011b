"""The application: infer goes to its own coroutine, every other path to FastAPI. The engine lives within lifespan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from service.admission import bounds_of
from service.asgi import Message, Receive, Scope, Send, peer_of, refuse
from service.auth import Gate
from service.background import in_thread
from service.batcher import Batcher
from service.body import BodyBudget, BodyLimits, BodyLost, RequestBody
from service.console.events import Feed
from service.console.routes import EVENTS, console_routes, is_page
from service.control import add_control_routes
from service.direct import Direct
from service.engine import Engine
from service.errors import RequestError, Stopped, TracingError
from service.head import is_infer
from service.infer import TRACE, Infer
from service.json_decoder import JsonDecoder
from service.lifecycle import Lifecycle
from service.loading import load_bundle, load_repository
from service.metrics import Metrics
from service.model_collector import ModelCollector
from service.model_control import ModelControl
from service.openapi import describe
from service.parts import Parts
from service.repository import Repository
from service.request_id import HEADER, current, request_id
from service.settings import Settings
from service.shrinking import shrink_arenas

if TYPE_CHECKING:
    from service.tracing import Tracing

log = logging.getLogger("tokenslab")

CONTROL_BODY_BYTES = 1 << 16
CONTROL_BODIES_BYTES = 1 << 23
ENGINE_STOP_S = 1.0
FLUSH_S = 1.0
KEYS_POLL_S = 5.0
ADMIN = ("/v2/repository/models/", "/v2/settings")


class App:
    """The ASGI callable."""

    def __init__(
        self,
        settings: Settings,
        repository: Repository | None,
        lifecycle: Lifecycle,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._infer: Infer | None = None
        self._direct: Direct | None = None
        self._control_limits = BodyLimits(CONTROL_BODY_BYTES, settings.body_timeout_s, "control routes take no more")
        self._control_budget = BodyBudget(CONTROL_BODIES_BYTES)
        self.lifecycle = lifecycle
        self.metrics = Metrics()
        self.gate = Gate(settings)
        self._tracing = tracing or _tracing_of(settings)
        self._parts = Parts(settings, lifecycle, self.metrics, repository)
        self.metrics.hanging.set_function(lambda: float(self._parts.hanging() is not None))
        self.metrics.ready.set_function(lambda: float(lifecycle.ready))
        self.metrics.registry.register(ModelCollector(lambda: self._parts.loaded))
        self.api: FastAPI = FastAPIOffline(
            title="Tokenslab",
            lifespan=self._lifespan,
            redirect_slashes=False,  # the C++ client follows no redirect
            strict_content_type=False,  # Triton's Python client sends none
        )
        add_control_routes(self.api, self._parts)
        self._console = Feed(self._parts) if settings.console else None
        if self._console is not None:
            self.api.include_router(console_routes(self._console, settings.write_timeout_s))
        describe(self.api)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        name = request_id(scope["headers"])
        current.set(name.decode("ascii"))  # each request has a task, and so a context, of its own
        send = _naming(send, name)
        if self._infer is not None and is_infer(scope["path"]):
            if self._tracing is None:
                await self._infer(scope, receive, send)
            else:
                await _traced(self._tracing, self._infer, scope, receive, send)
        else:
            await self._control(scope, receive, send)

    def direct(self) -> Direct | None:
        """The way around ASGI, for a server that offers it; None before the application has started."""
        return self._direct

    def hanging(self) -> str | None:
        """What is wrong with the engine, if a window runs for much longer than it should."""
        return self._parts.hanging()

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI, behind a bound on the body that it would read whole."""
        body = RequestBody(receive, self._control_budget)
        length = next((int(value) for name, value in scope["headers"] if name == b"content-length"), None)
        try:
            self._admit(scope)
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                receive = _replay(await body.read(length, self._control_limits), receive)
        except BodyLost:
            return
        except RequestError as error:
            self.metrics.rejections.labels(error.reason).inc()
            await refuse(error, body, send)
            return
        except asyncio.CancelledError:
            await refuse(Stopped("the service stopped before this request was complete"), body, send)
            return
        finally:
            body.release()
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.api(scope, receive, noting)
        except asyncio.CancelledError:  # the drain limit is over: a load that has not ended, say
            if begun:
                raise
            await refuse(Stopped("the service stopped before this request was answered"), body, send)

    def _admit(self, scope: Scope) -> None:
        """Raise unless this request may ask what it asks; health is everyone's."""
        path: str = scope["path"]
        if path.startswith(ADMIN):
            self.gate.admin(scope["headers"])
        elif path.startswith("/v2/health/") or (path == "/metrics" and not self._settings.metrics_key):
            return
        elif self._console is not None and is_page(path):
            return  # it shows nothing before it has a key
        elif self._console is not None and path == EVENTS:
            self.gate.operator(scope["headers"], peer_of(scope))
        elif self.gate.guarded:
            self.gate.client(scope["headers"], peer_of(scope))

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        settings = self._settings
        repository = self._parts.loaded
        if repository is None:
            repository = self._parts.loaded = load_repository(settings)
        engine = Engine()
        budget = BodyBudget(settings.max_bodies_bytes)
        self.metrics.body_bytes.set_function(lambda: budget.taken)
        batcher = Batcher(
            engine.submit,
            bounds_of(settings),
            self.metrics,
            asyncio.get_running_loop(),
            arrivals=lambda: budget.chunks,
            observe=None if self._tracing is None else self._tracing.window,
        )
        self.metrics.queue_tokens.set_function(lambda: batcher.open_tokens)
        self._parts.batcher = batcher
        decoder = JsonDecoder(settings.timeout_s)
        self._infer = Infer(repository, batcher, self.metrics, settings, self.lifecycle, budget, self.gate, decoder)
        self._direct = Direct(self._infer, asyncio.get_running_loop(), traced=self._tracing is not None)
        engine.start()
        control = ModelControl(
            repository,
            settings,
            lambda found: load_bundle(found, self._parts.settings, engine.between, repository.memory_bytes),
            batcher.retire,
        )
        self._parts.running = control
        watching = [asyncio.create_task(self._watch_keys())]
        if self._console is not None:
            watching.append(asyncio.create_task(self._console.run()))
        if settings.poll_s:
            watching.append(asyncio.create_task(control.poll(settings.poll_s)))
        if settings.shrink_after_s:
            watching.append(asyncio.create_task(shrink_arenas(repository, engine.between, settings.shrink_after_s)))
        self.lifecycle.started = True
        log.info("ready: %s threads on provider %s", settings.threads, settings.provider)
        try:
            yield
        finally:
            self.lifecycle.started = False
            self._parts.running = None
            for task in watching:
                task.cancel()
            await control.close()
            await decoder.close()
            if self._tracing is not None:
                await _flushed(self._tracing)
            # Everything that was to be answered is; a window that still runs is nobody's.
            if not await asyncio.to_thread(engine.stop, ENGINE_STOP_S):
                log.error("the engine is still running a window after %s s; leaving it", ENGINE_STOP_S)
            log.info(
                "stopped: %d requests accepted, %d answered with a result, %d late, failed or left by their clients",
                *(batcher.accepted, batcher.answered, batcher.accepted - batcher.answered),
            )

    async def _watch_keys(self) -> None:
        """Key files may be replaced by whoever cannot send a signal, as Kubernetes does with secrets."""
        while True:
            await asyncio.sleep(KEYS_POLL_S)
            self.gate.refresh()


def create_app(
    settings: Settings | None = None, repository: Repository | None = None, lifecycle: Lifecycle | None = None
) -> App:
    """The application; settings from the environment and bundles from its folder unless they are given.

    `uvicorn service.app:create_app --factory` serves it for development; `tokenslab serve` also drains.
    """
    return App(settings or Settings(), repository, lifecycle or Lifecycle())


def _tracing_of(settings: Settings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    try:
        from service.tracing import exporting  # not above: the extra is needed only where tracing is on
    except ImportError as cause:
        raise TracingError("otlp_endpoint: tracing needs the extra: pip install 'tokenslab[otel]'") from cause
    return exporting(settings.otlp_endpoint)


async def _flushed(tracing: Tracing) -> None:
    """Send the last spans, unless the collector keeps the service from stopping."""
    try:
        await asyncio.wait_for(in_thread(tracing.flush, "tokenslab-flush"), FLUSH_S)
    except TimeoutError:
        log.warning("the last spans were not taken within %s s; leaving them", FLUSH_S)


async def _traced(tracing: Tracing, infer: Infer, scope: Scope, receive: Receive, send: Send) -> None:
    """Infer within a span, whose context goes out with the answer."""
    trace = scope[TRACE] = tracing.begin(scope["path"], scope["headers"])
    status: int | None = None

    async def telling(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), trace.header()]}
        await send(message)

    try:
        await infer(scope, receive, telling)
    finally:
        trace.end(status)


def _replay(body: memoryview, receive: Receive) -> Receive:
    """What `receive` would have said, had the body not been read already."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": bytes(waiting.pop()), "more_body": False}
        return await receive()

    return replay


def _naming(send: Send, name: bytes) -> Send:
    async def naming(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), (HEADER, name)]}
        await send(message)

    return naming
