"""OpenTelemetry spans of requests and windows. Needs the `otel` extra, and is imported only where tracing is on.

A request's span (`infer`, under the client's own if it sent `traceparent`) holds `receive`, `queue`, `compute` and
`reply`. A window is a trace of its own, linked to all of its requests, as `compute` is to its windows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.engine import Window
from service.packing import Piece
from service.request import Client, Request, ServedModel

_W3C: Final = TraceContextTextMapPropagator()
_CARRIED: Final = (b"traceparent", b"tracestate")


class RequestTrace:
    """One request on its way; it stands for the client in the batcher, so that windows find it."""

    def __init__(self, tracing: Tracing, span: Span, began: float) -> None:
        self._tracing = tracing
        self._span = span
        self._client: Client | None = None
        self._began = began
        self._received: float | None = None
        self._windows: list[tuple[float, float, SpanContext]] = []  # started, finished

    @property
    def disconnected(self) -> bool:
        """Whether the client behind it has left."""
        return self._client is not None and self._client.disconnected

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    def received(self, client: Client) -> RequestTrace:
        """The body of `client` is there; what is returned stands for it from now on."""
        self._client, self._received = client, time.perf_counter()
        return self

    def ran(self, window: Window, context: SpanContext) -> None:
        """A window ran that held rows of this request."""
        self._windows.append((window.started, window.finished, context))

    def header(self) -> tuple[bytes, bytes]:
        """`traceparent` for the answer."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(self._span))
        return b"traceparent", carrier["traceparent"].encode()

    def end(self, status: int | None) -> None:
        """The answer is sent with `status`, or nobody is there to take it (None)."""
        now = time.perf_counter()
        stages = [("receive", self._began, self._received or now)]
        if self._received is not None:
            first = self._windows[0][0] if self._windows else now
            stages.append(("queue", self._received, first))
        if self._windows:
            last = self._windows[-1][1]
            stages += [("compute", self._windows[0][0], last), ("reply", last, now)]
        for name, start, stop in stages:
            links = [Link(context) for _, _, context in self._windows] if name == "compute" else []
            self._tracing.stage(name, self._span, start, max(start, stop), links)
        if status is None:
            self._span.set_status(Status(StatusCode.ERROR, "the client left"))
        else:
            self._span.set_attribute("http.response.status_code", status)
            if status >= 500:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._tracing.ns(now))


class Tracing:
    """Makes the spans; times are `time.perf_counter()` seconds, as everywhere in the service."""

    def __init__(self, processor: SpanProcessor) -> None:
        # Its own exit handler would wait for a collector that is gone.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "tokenslab"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tokenslab")
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def begin(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestTrace:
        """A request whose head has arrived, under the span that its `traceparent` names."""
        began = time.perf_counter()
        carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in headers if k in _CARRIED}
        parent = _W3C.extract(carrier) if carrier else Context()
        span = self._tracer.start_span(
            "infer", parent, SpanKind.SERVER, {"url.path": path, "http.request.method": "POST"}, (), self.ns(began)
        )
        return RequestTrace(self, span, began)

    def window(self, window: Window, model: ServedModel, pieces: Sequence[Piece[Request]]) -> None:
        """A window ran."""
        traces = [piece.request.client for piece in pieces if isinstance(piece.request.client, RequestTrace)]
        span = self._tracer.start_span(
            "window",
            Context(),
            SpanKind.INTERNAL,
            {"tokenslab.model": model.label, "tokenslab.tokens": window.rows, "tokenslab.requests": len(pieces)},
            [Link(trace.context) for trace in traces],
            self.ns(window.started),
        )
        if window.error is not None:
            span.record_exception(window.error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self.ns(window.finished))
        for trace in traces:
            trace.ran(window, span.get_span_context())

    def stage(self, name: str, parent: Span, start: float, stop: float, links: Sequence[Link]) -> None:
        """A part of a request that is over."""
        context = set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, context, links=links, start_time=self.ns(start))
        span.end(self.ns(stop))

    def ns(self, seconds: float) -> int:
        """Unix time of a `perf_counter` reading."""
        return self._offset_ns + int(seconds * 1e9)

    def flush(self) -> None:
        """Send what is waiting; it takes as long as the exporter tries, whose limit the SDK does not pass on."""
        self._provider.force_flush()


def exporting(endpoint: str) -> Tracing:
    """Tracing to an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces, in batches and a thread."""
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
