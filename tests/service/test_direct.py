"""The direct way in one process: who goes it, and that it makes no task."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from bench.bodies import infer_body
from bench.socketless import Links, request_bytes
from service.app import create_app
from service.server import server_config
from service.settings import Settings
from tests.bundles import relu_ffn, write_bundle

D = 8


def with_line(request: bytes, line: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\n" + line + b"\r\n", 1)


PLAIN = request_bytes("/v2/models/ffn/infer", infer_body(np.ones((1, D), np.float32)))


@pytest.mark.parametrize(
    ("request_", "direct"),
    [
        (PLAIN, True),
        (with_line(PLAIN, b"X-Request-Id: 1"), True),
        (with_line(PLAIN, b"X-Long: " + b"x" * 3000), True),
        (PLAIN.replace(b"/ffn/", b"/ffn/versions/1/"), True),
        (with_line(PLAIN, b"Expect: something"), False),
        (with_line(PLAIN, b"Connection: close"), False),
        (with_line(PLAIN, b"Content-Encoding: gzip"), False),
        (PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (PLAIN.replace(b"/infer", b"/infer?a=b"), False),
        (PLAIN.replace(b"/ffn/", b"/none/"), False),
        (PLAIN.replace(b"octet-stream", b"pdf"), False),
        (PLAIN.replace(b"POST", b"GET"), False),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
def test_plain_requests_go_the_direct_way_without_a_task_and_all_others_are_answered_too(
    tmp_path: Path, request_: bytes, direct: bool
) -> None:
    write_bundle(tmp_path, "ffn", relu_ffn(D, D))
    settings = Settings(models=tmp_path, threads=1)

    async def run() -> None:
        app = create_app(settings)
        async with app.api.router.lifespan_context(app.api):
            links = Links(server_config(app, settings), 2)
            for _ in range(3 if direct else 1):
                sent = asyncio.ensure_future(links.wave(request_))
                await asyncio.sleep(0)
                assert bool(links.state.tasks) is not direct
                await asyncio.wait_for(sent, 20)
                await asyncio.sleep(0)
            for transport in links.transports:
                assert b"".join(transport.written).startswith(b"HTTP/1.1 ")
            links.close()

    asyncio.run(run())
