"""The application over a session that blocks or fails: what liveness, readiness, the index and requests then say."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.app import App, create_app
from service.loading import load_repository
from service.repository import Loaded, Repository
from service.settings import Settings
from tests.bundles import relu_ffn, write_bundle

D = 8


class Session:
    """An ONNX Runtime session, but for what a test does to it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.go_on = threading.Event()
        self.go_on.set()
        self.broken = False

    def run(self, *inputs: Any) -> Any:
        assert self.go_on.wait(20)
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self._session.run(*inputs)


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[App, Session]]:
    """Two models, of which `ffn` runs on the session that comes with the application."""
    for name in ("ffn", "other"):
        write_bundle(tmp_path, name, relu_ffn(D, D))
    given = Settings(models=tmp_path, threads=1, **settings)
    loaded = load_repository(given)
    session = Session(loaded.get("ffn").session)
    wrapped = replace(loaded.get("ffn"), session=session)
    held = [
        Loaded(one.found, {name: wrapped if bundle == "ffn" else model for name, model in one.models.items()})
        for bundle in ("ffn", "other")
        for one in loaded.loaded(bundle).values()
    ]
    app = create_app(given, Repository(held))
    async with app.api.router.lifespan_context(app.api):
        yield app, session


async def ask(app: App, method: str, path: str, body: bytes = b"", *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    """One request the ASGI way."""
    sent: list[dict[str, Any]] = []
    given = [(b"content-length", b"%d" % len(body)), *headers]
    scope = {
        **{"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "headers": given, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)},
        **{"scheme": "http", "root_path": "", "asgi": {"version": "3.0"}},
    }
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return waiting.pop() if waiting else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(text) if text.startswith((b"{", b"[")) and not headers else text


async def until(app: App, path: str, wanted: int) -> Any:
    """Ask `path` until its status is `wanted`; what it says then."""
    while True:
        status, told = await ask(app, "GET", path)
        if status == wanted:
            return told
        await asyncio.sleep(0)


async def infer(app: App, model: str, rows: int = 1) -> int:
    raw = np.ones((rows, D), np.float32).tobytes()
    octets = ((b"content-type", b"application/octet-stream"), (b"inference-header-content-length", b"0"))
    status, _ = await ask(app, "POST", f"/v2/models/{model}/infer", raw, *octets)
    return status


def test_an_engine_that_hangs_turns_liveness_to_503_until_it_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, hang_limit_s=0.05) as (app, session):
            assert await ask(app, "GET", "/v2/health/live") == (200, {"live": True})
            session.go_on.clear()
            stuck = asyncio.create_task(infer(app, "ffn"))
            told = await until(app, "/v2/health/live", 503)
            assert "ffn-fp32: a window has run for" in told["error"]
            assert app.metrics.registry.get_sample_value("tokenslab_engine_hanging") == 1
            session.go_on.set()
            assert await stuck == 200
            assert (await ask(app, "GET", "/v2/health/live"))[0] == 200
            assert app.metrics.registry.get_sample_value("tokenslab_engine_hanging") == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_deadline_rings_while_the_engine_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, timeout_s=0.05) as (app, session):
            session.go_on.clear()
            stuck, waiting = asyncio.create_task(infer(app, "ffn")), asyncio.create_task(infer(app, "other"))
            assert (await stuck, await waiting) == (504, 504)
            session.go_on.set()
            assert await infer(app, "other") == 200

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_model_that_keeps_failing_is_not_ready_with_the_reason_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.faults.TRIAL_S", 0.05)

    async def run() -> None:
        async with serving(tmp_path) as (app, session):
            session.broken = True
            while (status := await infer(app, "ffn")) == 500:
                pass
            assert status == 503
            ready, told = await ask(app, "GET", "/v2/models/ffn/ready")
            assert ready == 503
            assert "an illegal memory access" in told["error"]
            states = {row["name"]: row for row in (await ask(app, "POST", "/v2/repository/index"))[1]}
            assert states["ffn"]["state"] == "UNAVAILABLE"
            assert "an illegal memory access" in states["ffn"]["reason"]
            assert states["other"]["state"] == "READY"
            assert await infer(app, "other") == 200
            assert (await ask(app, "GET", "/v2/models/other/ready"))[0] == 200
            session.broken = False
            await until(app, "/v2/models/ffn/ready", 200)
            assert await infer(app, "ffn") == 200

    asyncio.run(asyncio.wait_for(run(), 30))
