"""TLS connections while they are no requests yet: bounded in number and in time. Knows no HTTP.

uvloop tells a protocol of a connection once its handshake is done. Who connects and says nothing was counted nowhere
until then, and stayed for a minute: enough of them and there is no file descriptor left for anybody.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # what uvloop itself puts before such a connection


@dataclass(frozen=True, slots=True)
class TlsLimits:
    """Open connections, their handshakes done or not; seconds for a handshake, and for the goodbye."""

    connections: int
    handshake_s: float
    shutdown_s: float


class TlsLoop(uvloop.Loop):
    """uvloop's event loop, but for the TLS servers that it creates: those beyond the limits are cut off."""

    def __init__(self, limits: TlsLimits) -> None:
        super().__init__()
        self._limits = limits
        self.tls_connections = 0

    async def create_server(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *args: Any, **kwargs: Any
    ) -> Any:
        """As the original; of its own `ssl_*` options none may be given."""
        context = kwargs.pop("ssl", None)
        if not isinstance(context, ssl.SSLContext):
            return await super().create_server(protocol_factory, *args, ssl=context, **kwargs)
        return await super().create_server(
            lambda: _Connection(self, protocol_factory(), context, self._limits), *args, **kwargs
        )


class _Connection(SSLProtocol):  # type: ignore[misc]  # see above
    """One of them."""

    def __init__(
        self, loop: TlsLoop, protocol: asyncio.BaseProtocol, context: ssl.SSLContext, limits: TlsLimits
    ) -> None:
        super().__init__(
            *(loop, protocol, context, None),
            server_side=True,
            ssl_handshake_timeout=limits.handshake_s,
            ssl_shutdown_timeout=limits.shutdown_s,
        )
        self._tls_loop = loop
        self._most = limits.connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._tls_loop.tls_connections += 1
        if self._tls_loop.tls_connections > self._most:
            transport.abort()  # nothing can be said before the handshake
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls_loop.tls_connections -= 1
        super().connection_lost(exc)
