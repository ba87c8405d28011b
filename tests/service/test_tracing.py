"""Spans of requests and windows, through the application, in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.app import App
from service.lifecycle import Lifecycle
from service.settings import Settings
from service.tracing import Tracing
from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import binary

D = 8
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def post(app: App, rows: int, **headers: str) -> tuple[int, dict[str, str]]:
    body, own = binary(np.ones((rows, D), np.float32))
    raw = [(k.lower().encode(), v.encode()) for k, v in {**own, **headers, "content-length": str(len(body))}.items()]
    scope = {"type": "http", "method": "POST", "path": "/v2/models/ffn/infer", "query_string": b"", "headers": raw}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}


@pytest.fixture
def spans(tmp_path: Path) -> list[ReadableSpan]:
    """Of two requests that share a window, one of them with a parent, and one that is refused."""
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    exporter = InMemorySpanExporter()
    app = App(Settings(models=tmp_path, threads=1), None, Lifecycle(), Tracing(SimpleSpanProcessor(exporter)))

    async def story() -> None:
        async with app.api.router.lifespan_context(app.api):
            (first, given), (second, _) = await asyncio.gather(post(app, 3, traceparent=PARENT), post(app, 4))
            assert (first, second) == (200, 200)
            assert given["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
            assert given["traceparent"] != PARENT
            assert (await post(app, 0, **{"content-type": "text/plain"}))[0] in (400, 415)

    asyncio.run(story())
    return list(exporter.get_finished_spans())


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def test_a_request_has_its_stages_under_the_clients_own_span(spans: list[ReadableSpan]) -> None:
    served, alone, refused = sorted(named(spans, "infer"), key=lambda s: (s.parent is None, s.end_time))
    assert served.parent is not None
    assert f"{served.parent.trace_id:032x}" in PARENT
    assert f"{served.parent.span_id:016x}" in PARENT
    assert alone.parent is refused.parent is None
    for request in (served, alone):
        inside = [s for s in spans if s.parent is not None and s.parent.span_id == request.context.span_id]
        assert [s.name for s in sorted(inside, key=lambda s: s.start_time or 0)] == [
            "receive",
            "queue",
            "compute",
            "reply",
        ]
        edges = [(s.start_time or 0, s.end_time or 0) for s in sorted(inside, key=lambda s: s.start_time or 0)]
        assert all(start <= stop for start, stop in edges)
        assert edges[0][0] == request.start_time
        assert edges[-1][1] == request.end_time
        assert request.attributes is not None
        assert request.attributes["http.response.status_code"] == 200
    assert refused.attributes is not None
    assert refused.attributes["http.response.status_code"] in (400, 415)


def test_a_window_is_linked_to_all_of_its_requests_and_compute_to_its_windows(spans: list[ReadableSpan]) -> None:
    (window,) = named(spans, "window")
    requests = named(spans, "infer")
    assert window.parent is None
    assert window.attributes is not None
    assert (window.attributes["tokenslab.tokens"], window.attributes["tokenslab.requests"]) == (7, 2)
    linked = {link.context.span_id for link in window.links}
    assert len(linked) == 2
    assert linked <= {request.context.span_id for request in requests}
    for compute in named(spans, "compute"):
        assert [link.context.span_id for link in compute.links] == [window.context.span_id]


def test_without_tracing_no_answer_names_a_span(tmp_path: Path) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, 2 * D))
    app = App(Settings(models=tmp_path, threads=1), None, Lifecycle())

    async def story() -> None:
        async with app.api.router.lifespan_context(app.api):
            status, headers = await post(app, 3, traceparent=PARENT)
        assert status == 200
        assert "traceparent" not in headers

    asyncio.run(story())
