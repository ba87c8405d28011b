"""The service's whole event-loop side without a socket or another process.

Real application, protocol, batcher and engine; only the transports keep what is written in a list.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from bench.bodies import Body


class ListTransport(asyncio.Transport):
    """Keeps what is written; reads nothing by itself, and never pushes back."""

    def __init__(self, on_answer: Callable[[], None]) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._on_answer = on_answer
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        if data[:5] == b"HTTP/":
            self._on_answer()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def pause_reading(self) -> None:
        """Nothing is read here."""

    def resume_reading(self) -> None:
        """Nothing is read here."""

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Links:
    """`count` connections to the application of `config`, which has been started on the running loop."""

    def __init__(self, config: uvicorn.Config, count: int) -> None:
        config.load()
        self.state = ServerState()
        self._answered = 0
        self._all = asyncio.Event()
        self.transports = [ListTransport(self._on_answer) for _ in range(count)]
        self._protocols: list[Any] = []
        for transport in self.transports:
            protocol: Any = config.http_protocol_class
            made = protocol(config=config, server_state=self.state, app_state={}, _loop=asyncio.get_running_loop())
            made.connection_made(transport)
            self._protocols.append(made)

    def send(self, link: int, data: bytes) -> None:
        """What the client of connection `link` sent."""
        self._protocols[link].data_received(data)

    async def wave(self, data: bytes) -> None:
        """Send `data`, one request, over every connection, and await all answers (the heads of them)."""
        for transport in self.transports:
            transport.written.clear()
        self._answered = 0
        self._all.clear()
        for protocol in self._protocols:
            protocol.data_received(data)
        await self._all.wait()

    async def cpu_us(self, data: bytes, waves: int) -> float:
        """CPU time of this thread per request of `waves` waves, microseconds: the engine's is not in it."""
        await self.wave(data)
        began = time.thread_time()
        for _ in range(waves):
            await self.wave(data)
        return (time.thread_time() - began) / (waves * len(self.transports)) * 1e6

    def close(self) -> None:
        """The clients leave."""
        for protocol in self._protocols:
            protocol.connection_lost(None)

    def _on_answer(self) -> None:
        self._answered += 1
        if self._answered >= len(self.transports):
            self._all.set()


def request_bytes(path: str, body: Body) -> bytes:
    """A request as wrk sends it."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{k}: {v}" for k, v in body.headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body.content)}", "", ""]).encode() + body.content
