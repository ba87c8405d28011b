"""Requests to control routes that are still at work when the drain limit ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from service.app import App, create_app
from service.asgi import Message
from service.settings import Settings
from tests.service.batching import on_loop

SCOPE = {"type": "http", "method": "POST", "path": "/v2/repository/index", "headers": [], "query_string": b""}


def app(tmp_path: Path, api: Any) -> App:
    made = create_app(Settings(models=tmp_path))
    made.api = api
    return made


async def cancelled(made: App, at_work: asyncio.Event) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    task = asyncio.create_task(made(dict(SCOPE), receive, send))
    await at_work.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return sent


@on_loop
async def test_one_that_has_no_answer_yet_is_told_that_the_service_stopped(tmp_path: Path) -> None:
    at_work = asyncio.Event()

    async def api(*_: Any) -> None:
        at_work.set()
        await asyncio.Event().wait()

    start, *rest = await cancelled(app(tmp_path, api), at_work)
    assert start["status"] == 503
    assert (b"connection", b"close") in start["headers"]
    assert "stopped before" in json.loads(b"".join(message.get("body", b"") for message in rest))["error"]


@on_loop
async def test_one_whose_answer_has_begun_is_not_given_another(tmp_path: Path) -> None:
    at_work = asyncio.Event()

    async def api(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        at_work.set()
        await asyncio.Event().wait()

    assert [message["status"] for message in await cancelled(app(tmp_path, api), at_work)] == [200]
