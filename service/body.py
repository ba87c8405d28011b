"""A request's body as it arrives: bounded, timed, into one buffer; and the client behind it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from service.errors import BodiesFull, BodyTimeout, InvalidInput, TooLarge
from service.request import Client

# After a refusal, how much of an unread body is taken off the connection so that the client sees the answer and not a
# reset: what a fast client has sent before it reads, no more.
DISCARD_BYTES: Final = 8 << 20
DISCARD_S: Final = 2.0
MIN_RATE: Final = 8 << 10  # bytes/s on average, or a body of a byte now and then would hold its place for ever

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


class BodyBudget:
    """Bytes that all bodies together may take, from their first byte to their answer."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._left = size
        self.chunks = 0  # received so far, of all bodies

    @property
    def taken(self) -> int:
        """Bytes in flight."""
        return self._size - self._left

    def take(self, size: int) -> None:
        """Raise BodiesFull if `size` bytes more are too many; bytes are charged as they arrive, not as announced."""
        if size > self._left:
            raise BodiesFull(
                f"body: {self.taken} bytes are in flight; {size} more would exceed max_bodies_mib, {self._size}"
            )
        self._left -= size

    def give(self, size: int) -> None:
        """Return what was taken."""
        self._left += size


class RequestBody:
    """The body of one request; `release` it when the request is answered."""

    __slots__ = ("_budget", "_complete", "_receive", "_taken", "client")

    def __init__(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], budget: BodyBudget) -> None:
        self._receive = receive
        self._budget = budget
        self._taken = 0
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
            BodiesFull: all bodies together would be too much.
            BodyTimeout: nothing arrived for longer than allowed.
            BodyLost: the connection ended first.
        """
        if length is not None and length > limits.size:
            raise TooLarge(f"body: {length} bytes, the limit is {limits.size} ({limits.name})")
        if self._complete:  # it came with its headers: no timer, no copy
            chunk, _ = await self._next()
            self._admit(len(chunk), 0, limits)
            return memoryview(chunk)
        buffer = bytearray()
        # Untouched pages of an empty array cost no memory, so a length alone claims none.
        view, at = np.empty(length or 0, np.uint8).data, 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(limits.silence_s) as patience:
                while not self._complete:
                    chunk, self._complete = await self._next()
                    self._admit(len(chunk), at, limits)
                    if length is None:
                        buffer += chunk
                    else:
                        view[at : at + len(chunk)] = chunk
                    at += len(chunk)
                    now = loop.time()
                    patience.reschedule(patience_ends(began, now, at, limits))
        except TimeoutError as cause:
            raise stalled(at, loop.time() - began, limits) from cause
        return memoryview(buffer) if length is None else view

    def _admit(self, size: int, before: int, limits: BodyLimits) -> None:
        if before + size > limits.size:
            raise TooLarge(f"body: more than {limits.size} bytes ({limits.name})")
        self._take(size)

    async def _next(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise BodyLost
        self._budget.chunks += 1
        return message.get("body", b""), not message.get("more_body", False)

    async def inflate(self, data: memoryview, encoding: str, limits: BodyLimits) -> memoryview:
        """`data` inflated, off the event loop; while that lasts it counts as large as it may become."""
        self._take(limits.size)
        try:
            plain = await asyncio.to_thread(inflate, data, encoding, limits)
        finally:
            self.charge(-limits.size)
        self._take(len(plain))
        return plain

    def _take(self, size: int) -> None:
        self._budget.take(size)
        self._taken += size

    def charge(self, size: int) -> None:
        """Count what is there already and cannot be refused, as an answer being written: the next bodies wait."""
        self._budget.give(-size)
        self._taken += size

    def release(self) -> None:
        """The request is answered, or will not be: its bytes are free again."""
        self._budget.give(self._taken)
        self._taken = 0

    async def discard(self) -> None:
        """Take a bounded rest of the body off the connection."""
        left = DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_S):
                while not self._complete and left > 0:
                    chunk, self._complete = await self._next()
                    left -= len(chunk)
        except (TimeoutError, BodyLost):
            return

    @property
    def complete(self) -> bool:
        return self._complete


def patience_ends(began: float, last: float, size: int, limits: BodyLimits) -> float:
    """When a body is given up of which `size` bytes came between `began` and `last`: no silence longer than allowed,
    and MIN_RATE on average.
    """
    return min(last, began + size / MIN_RATE) + limits.silence_s


def stalled(size: int, seconds: float, limits: BodyLimits) -> BodyTimeout:
    """What is told to those whose body was given up."""
    return BodyTimeout(
        f"body: {size} bytes in {seconds:.1f} s, then too little for {limits.silence_s:g} s (body_timeout_s)"
    )


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
