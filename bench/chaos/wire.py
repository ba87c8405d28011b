"""HTTP/1.1 by hand, so that a client may stop, stall, drop or lie anywhere, and say what it had sent by when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ANSWER_S: Final = 40.0  # above the server's own deadline, 30 s
_LARGEST_LINE: Final = 1 << 16


class Broken(Exception):
    """The connection ended before the answer was complete, or nothing came for ANSWER_S."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        """Whether the server ends the connection with this answer."""
        return self.headers.get("connection", "").lower() == "close"


class Link:
    """One connection to 127.0.0.1. Times are those of `time.monotonic`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # so that `send` ends when the kernel has everything
        self.opened = time.monotonic()
        self.sent = 0.0  # when the last `send` ended
        self.answered = False  # whether an answer has come over it

    @classmethod
    async def open(cls, port: int) -> Link:
        """Connect; raises OSError where nothing listens."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=_LARGEST_LINE))

    async def send(self, data: bytes) -> None:
        """Give all of `data` to the kernel; raises Broken."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self._writer.write(data)
                await self._writer.drain()
        except (OSError, TimeoutError) as cause:
            raise Broken(f"while sending: {type(cause).__name__}") from cause
        self.sent = time.monotonic()

    async def answer(self, *, body: bool = True, pause_s: float = 0.0) -> Reply:
        """The next answer, past any 1xx; without `body` one to HEAD. Waits `pause_s` between pieces of 16 KiB.

        Raises Broken.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                status, headers = await self._head()
                while status < 200:
                    status, headers = await self._head()
                left = int(headers["content-length"]) if body and status != 204 else 0
                parts: list[bytes] = []
                while left:
                    parts.append(await self._reader.readexactly(min(left, 1 << 14) if pause_s else left))
                    left -= len(parts[-1])
                    if pause_s:
                        await asyncio.sleep(pause_s)
        except (OSError, EOFError, TimeoutError) as cause:
            raise Broken(f"while awaiting an answer: {type(cause).__name__}") from cause
        self.answered = True
        return Reply(status, headers, b"".join(parts))

    async def ended(self) -> bytes:
        """What still comes until the server closes; raises Broken if it does not within ANSWER_S."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._reader.read()
        except ConnectionError:
            return b""  # reset: closed all the same
        except TimeoutError as cause:
            raise Broken(f"the server kept the connection open for {ANSWER_S:g} s") from cause

    def drop(self) -> None:
        """Reset the connection: whatever is under way, nobody waits for it."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close, whatever the peer has done."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # it was reset: closed all the same

    async def _head(self) -> tuple[int, dict[str, str]]:
        text = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = text.decode("latin-1").rstrip("\r\n").split("\r\n")
        fields = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}


def head(method: str, path: str, length: int | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """A request's line and headers, with a Content-Length unless `length` is None."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"Content-Length: {length}"] if length is not None else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """A whole request."""
    return head(method, path, len(body), headers) + body


def chunked(method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None, size: int = 4096) -> bytes:
    """A whole request whose body comes in chunks of `size`, with no length in its head."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head(method, path, None, {**(headers or {}), "Transfer-Encoding": "chunked"}) + coded + b"0\r\n\r\n"
