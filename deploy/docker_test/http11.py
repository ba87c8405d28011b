"""HTTP/1.1 on one kept-alive connection, by hand: it has to say what was sent and what came back. Standard library.

An HTTP library would retry, or name every failure alike; counting lost requests needs to know whether the body had
left and whether a byte of an answer arrived.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

TIMEOUT_S = 20.0  # for one answer


class Turned(Exception):
    """The connection broke; `sent`: the whole request had left; `heard`: a byte of the answer had come."""

    def __init__(self, cause: Exception, *, sent: bool, heard: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.sent = sent
        self.heard = heard


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        """Whether the server ends the connection with this answer."""
        return self.headers.get("connection", "").lower() == "close"

    @property
    def json_length(self) -> int:
        """Bytes of the JSON part of a binary answer."""
        return int(self.headers["inference-header-content-length"])


class Connection:
    """One connection to 127.0.0.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.used = False  # whether an answer has come over it

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect; raises OSError where nothing listens."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def exchange(self, head: bytes, body: bytes = b"", late: asyncio.Event | None = None) -> Reply:
        """Send a request and read its answer; with `late`, the second half of the body waits for that event.

        Raises Turned.
        """
        sent = heard = False
        half = len(body) // 2 if late else len(body)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                self._writer.write(head + body[:half])
                await self._writer.drain()
                if late is not None:
                    await late.wait()
                    self._writer.write(body[half:])
                    await self._writer.drain()
                sent = True
                first = await self._reader.readexactly(1)
                heard = True
                reply = await self._read(first)
        except (OSError, EOFError, TimeoutError) as cause:  # a TimeoutError is a lost answer too
            raise Turned(cause, sent=sent, heard=heard) from cause
        self.used = True
        return reply

    async def close(self) -> None:
        """Close, whatever the peer has done."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # it was reset: closed all the same

    async def _read(self, first: bytes) -> Reply:
        head = first + await self._reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        body = await self._reader.readexactly(int(headers["content-length"]))
        return Reply(int(status_line.split()[1]), headers, body)


def head(method: str, path: str, length: int = 0, **headers: str) -> bytes:
    """A request's line and headers; `inference_length=...` becomes the header of that name."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
