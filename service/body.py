"""A request's body as it arrives: bounded, timed, into one buffer; and the client behind it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from service.batcher import Client
from service.errors import BodyTimeout, InvalidInput, TooLarge

# After a refusal, how much of an unread body is taken off the connection so that the client sees the answer and not a
# reset: what a fast client has sent before it reads, no more.
DISCARD_BYTES: Final = 8 << 20
DISCARD_S: Final = 2.0

_WBITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ENCODINGS: Final = tuple(_WBITS)


class BodyLost(Exception):
    """The connection ended within the body: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Largest size in bytes, longest silence in seconds, and the setting that says so."""

    size: int
    silence_s: float
    name: str


class _AnyClient:
    """A client on a server that does not say when it leaves."""

    disconnected = False


class RequestBody:
    """The request's body as it arrives, and the client behind it."""

    __slots__ = ("_complete", "_receive", "client")

    def __init__(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        self._receive = receive
        # uvicorn's `receive` is a method of the request's own state, which knows whether the client is still there and
        # whether the body is complete; asking it costs nothing, where a task awaiting http.disconnect costs 49 us.
        cycle = getattr(receive, "__self__", None)
        if cycle is not None and hasattr(cycle, "disconnected") and hasattr(cycle, "more_body"):
            self.client: Client = cycle
            self._complete: bool = not cycle.more_body
        else:
            self.client, self._complete = _AnyClient(), False

    async def read(self, length: int | None, limits: BodyLimits) -> memoryview:
        """The whole body; `length` is its Content-Length, None when it is chunked.

        Raises:
            TooLarge: before anything is read when `length` says so.
            BodyTimeout: nothing arrived for longer than allowed.
            BodyLost: the connection ended first.
        """
        if length is not None and length > limits.size:
            raise TooLarge(f"body: {length} bytes, the limit is {limits.size} ({limits.name})")
        if self._complete:  # it came with its headers: no timer, no copy
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise BodyLost
            return memoryview(message["body"])
        buffer = bytearray() if length is None else None
        # Untouched pages of an empty array cost no memory, so a length alone claims none.
        array = np.empty(length or 0, np.uint8)
        view, at = array.data, 0
        while not self._complete:
            chunk = await self._next(limits.silence_s, at)
            if buffer is not None:
                buffer += chunk
                if len(buffer) > limits.size:
                    raise TooLarge(f"body: more than {limits.size} bytes ({limits.name})")
            else:
                view[at : at + len(chunk)] = chunk
            at += len(chunk)
        return memoryview(buffer) if buffer is not None else view

    async def _next(self, timeout_s: float, at: int) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._receive()
        except TimeoutError as cause:
            raise BodyTimeout(f"body: nothing arrived for {timeout_s:g} s after {at} bytes (body_timeout_s)") from cause
        if message["type"] == "http.disconnect":
            raise BodyLost
        self._complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    async def discard(self) -> None:
        """Take a bounded rest of the body off the connection."""
        left = DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_S):
                while not self._complete and left > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return
                    self._complete = not message.get("more_body", False)
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return

    @property
    def complete(self) -> bool:
        return self._complete


def inflate(data: memoryview, encoding: str, limits: BodyLimits) -> memoryview:
    """A gzip or deflate (zlib) body, never more than `limits.size` bytes of it in memory.

    Raises:
        TooLarge: it holds more.
        InvalidInput: it is no such stream, ends early, or is followed by other bytes.
    """
    stream = zlib.decompressobj(_WBITS[encoding])
    try:
        plain = stream.decompress(data, limits.size + 1)
    except zlib.error as cause:
        raise InvalidInput(f"Content-Encoding: the body is not {encoding}: {cause}") from cause
    if len(plain) > limits.size:
        raise TooLarge(f"body: more than {limits.size} bytes after {encoding} ({limits.name})")
    if not stream.eof or stream.unused_data:
        found = "followed by other bytes" if stream.eof else "cut short"
        raise InvalidInput(f"Content-Encoding: the {encoding} stream is {found}")
    return memoryview(plain)
