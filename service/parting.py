"""The end of a connection from this side: what was written arrives first, whatever the client is still sending.

A socket that is closed with bytes of its peer's unread is reset, and what it had not delivered yet is gone: the last
answer to a client that pipelines, or that sends a body which was refused. So this side ends its own direction and reads
on for a while. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

LINGER_S: Final = 1.0  # for the client to see the end and close
DISCARD_BYTES: Final = 8 << 20  # read and forgotten meanwhile; who sends more is cut off
FLUSH_S: Final = 0.1  # between looks whether TLS has written its last answer


class Parting:
    """A transport with a `close` that does not cost the peer what was written before it."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._ending = False
        self._unread = 0
        self._timer: asyncio.TimerHandle | None = None
        self.write: Callable[[Any], None] = transport.write  # called for every answer: no hop more
        self.writelines: Callable[[Any], None] = transport.writelines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is to be written, or done about what is read."""
        return self._ending or self._transport.is_closing()

    def close(self) -> None:
        """End this direction; the connection ends when the client does so too, or LINGER_S later."""
        if self.is_closing():
            return
        self._ending = True
        self.write = self.writelines = _drop
        if not self._transport.can_write_eof():  # TLS, which says itself that it ends
            self._close_written()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._timer = self._loop.call_later(LINGER_S, self._transport.close)

    def close_now(self) -> None:
        """For a connection on which nothing is under way."""
        self._ending = True
        self._transport.close()
        # Over TLS it would wait for the client's goodbye, and clients look at no connection that they put by.
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def _close_written(self) -> None:
        """TLS has a time for its own end, which is not to run while a client still reads its answer.

        Who reads nothing of it is cut off by `slow_reader`.
        """
        if self._transport.get_write_buffer_size() and not self._transport.is_closing():
            self._timer = self._loop.call_later(FLUSH_S, self._close_written)
        else:
            self._transport.close()

    def forget(self, size: int) -> None:
        """Bytes that came after `close`."""
        self._unread += size
        if self._unread > DISCARD_BYTES:
            self._transport.abort()

    def lost(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _drop(_: object) -> None:
    """What a closed transport does with more."""
