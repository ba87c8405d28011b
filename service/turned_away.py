"""Connections beyond the limit: told so before they ask, and gone. Knows no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# From the 503 to the close at the latest. Closing at once, with bytes of the client's unread, would reset the
# connection and may take the answer with it.
LINGER_S: Final = 1.0
LINGERING: Final = 256  # so many at a time are told; those beyond are only closed


class Doorman:
    """Who has been turned away and is not gone yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lingering = 0

    def turn_away(self, transport: asyncio.Transport, response: bytes) -> None:
        """Write `response`, end this side, and close the connection once the client has done so, or LINGER_S later."""
        if self._lingering >= LINGERING:
            transport.abort()
            return
        self._lingering += 1
        transport.set_protocol(_TurnedAway(self._gone))
        transport.write(response)
        if transport.can_write_eof():
            transport.write_eof()
        self._loop.call_later(LINGER_S, transport.abort)

    def _gone(self) -> None:
        self._lingering -= 1


class _TurnedAway(asyncio.Protocol):
    """Reads and forgets."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self._gone = gone

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
