"""TLS connections before their handshake: how many there may be, and for how long."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import cast

import pytest
import trustme

from service.handshakes import TlsLimits, TlsLoop


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and its client's."""
    authority, server = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


def test_the_silent_are_bounded_in_number_and_in_time_and_then_others_are_served(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def run(loop: TlsLoop) -> None:
        server = await loop.create_server(Echo, "127.0.0.1", 0, ssl=contexts[0])
        port = server.sockets[0].getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            assert await reader.read() == b""  # it was one too many
        writer.close()
        assert all(not reader.at_eof() for reader, _ in silent)
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=contexts[1])
        writer.write(b"heard")
        assert await reader.readexactly(5) == b"heard"
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=lambda: TlsLoop(TlsLimits(3, 1.0, 1.0))) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, TlsLoop)
        runner.run(asyncio.wait_for(run(loop), 20))
