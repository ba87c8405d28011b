"""What the page is told while it looks: windows as they run, samples of the last minutes, models when they change.

Nobody looks: the batcher is not watched, and all that happens is that counts are read every SAMPLE_S. Somebody looks:
each window costs a tuple, kept in a ring that is written out every TICK_S, once for all who look. Whoever reads too
slowly misses events; nothing here waits for a reader. All methods run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version as package_version
from typing import Any, Final, NamedTuple

import orjson

from service.console.models import describe
from service.console.recent import Counts, between, read
from service.engine import Window
from service.errors import Stopped, TooManyWatchers
from service.packing import Piece
from service.parts import Parts
from service.request import Request, ServedModel

SAMPLE_S: Final = 2.0
SAMPLES: Final = 300  # ten minutes
TICK_S: Final = 0.25
WINDOWS: Final = 64  # kept from one tick to the next; a person sees no more
BLOCKS: Final = 128  # requests of one window that are told one by one
SUBSCRIBERS: Final = 16
FRAMES: Final = 32  # that wait for one reader; 8 s at the most frequent
STREAM_S: Final = 600.0  # then the page asks again, and its key is looked at again


class Ran(NamedTuple):
    """One window; perf_counter seconds."""

    label: str  # not the model, which may be on its way out
    budget: int
    requests: int
    rows: int
    blocks: list[int]  # rows of each request, of the first BLOCKS
    oldest: float  # arrival
    waited_s: float  # of all its requests
    started: float
    packed: float
    finished: float
    failed: bool


class Subscriber:
    """One who looks: events that wait to be written to it, the oldest of which give way."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=FRAMES)
        self._ready = asyncio.Event()
        self._ended = False

    def put(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._ready.set()

    def end(self) -> None:
        """After what waits, no more."""
        self._ended = True
        self._ready.set()

    async def next(self) -> bytes | None:
        """The next event, None at the end; waits for it."""
        while not self._frames:
            if self._ended:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self._frames.popleft()


class Feed:
    """The events of one application; `run` it while the application runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._subscribers: set[Subscriber] = set()
        self._windows: deque[Ran] = deque(maxlen=WINDOWS)
        self._seen = 0  # windows since the last tick
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._ticking: asyncio.Task[None] | None = None

    def subscribe(self) -> Subscriber:
        """One more who looks, who gets what there is at once; `leave` must follow.

        Raises:
            TooManyWatchers: there are SUBSCRIBERS already.
            NotReady: the service is starting or stopping.
        """
        parts = self._parts
        if parts.lifecycle.draining:
            raise Stopped("the service is draining")
        repository = parts.repository
        if len(self._subscribers) >= SUBSCRIBERS:
            raise TooManyWatchers(f"{SUBSCRIBERS} streams of the console are open, the most there may be")
        subscriber = Subscriber()
        subscriber.put(event("hello", self._server()))
        subscriber.put(event("models", describe(repository, parts.failing)))
        subscriber.put(event("history", list(self._samples)))
        if not self._subscribers and parts.batcher is not None:
            parts.batcher.watch(self._window)
            self._ticking = asyncio.create_task(self._tick())
        self._subscribers.add(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """It looks no more; the last one out ends the watching."""
        self._subscribers.discard(subscriber)
        if not self._subscribers and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
            self._windows.clear()
            self._seen = 0
            if self._parts.batcher is not None:
                self._parts.batcher.unwatch(self._window)

    async def run(self) -> None:
        """Read the counts every SAMPLE_S, so that whoever comes sees the last minutes; until cancelled."""
        before = self._read()
        while True:
            await asyncio.sleep(SAMPLE_S)
            after = self._read()
            batcher = self._parts.batcher
            sample = between(before, after, time.time(), 0 if batcher is None else batcher.open_tokens)
            before = after
            self._samples.append(sample)
            if self._subscribers:
                self._tell(event("sample", sample))
                self._tell(event("hello", self._server()))  # settings may have changed
                self._tell(event("models", describe(self._parts.repository, self._parts.failing)))

    def _server(self) -> dict[str, Any]:
        settings = self._parts.settings
        return {
            "version": package_version("tokenslab"),
            "process": os.getpid(),
            "replicas": settings.replicas,
            "provider": settings.provider,
            "threads": settings.threads,
            "windows": settings.windows,
            "max_wait_ms": settings.max_wait_ms,
            "max_queue_tokens": settings.max_queue_tokens,
            "sample_s": SAMPLE_S,
            "samples": SAMPLES,
        }

    def _read(self) -> Counts:
        return read(time.perf_counter(), self._parts.repository.models(), self._parts.metrics)

    def _tell(self, frame: bytes) -> None:
        for subscriber in self._subscribers:
            subscriber.put(frame)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._parts.lifecycle.draining:
                self._tell(event("bye", {}))
                for subscriber in self._subscribers:
                    subscriber.end()
                return
            if self._windows:
                now, clock = time.perf_counter(), time.time()
                ran = [_told(window, clock - now) for window in self._windows]
                self._tell(event("windows", {"windows": ran, "unseen": self._seen - len(ran)}))
                self._windows.clear()
                self._seen = 0

    def _window(self, window: Window, model: ServedModel, pieces: Sequence[Piece[Request]]) -> None:
        """Called between a window and the next: it notes, and leaves the rest to the tick. Holds no request."""
        arrived = [piece.request.arrived for piece in pieces]
        self._seen += 1
        self._windows.append(
            Ran(
                model.label,
                model.limits.tokens,
                len(pieces),
                window.rows,
                [piece.stop - piece.start for piece in pieces[:BLOCKS]],
                min(arrived),
                max(0.0, len(arrived) * window.started - sum(arrived)),
                window.started,
                window.packed,
                window.finished,
                window.error is not None,
            )
        )


def event(name: str, data: Any) -> bytes:
    """One server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))


def _told(ran: Ran, offset_s: float) -> dict[str, Any]:
    packed = ran.packed or ran.started  # a window that failed while it was packed
    return {
        "model": ran.label,
        "time": ran.started + offset_s,
        "requests": ran.requests,
        "tokens": ran.rows,
        "budget": ran.budget,
        "blocks": ran.blocks,
        "queue_ms": ran.waited_s / ran.requests * 1e3,
        "queue_max_ms": max(0.0, ran.started - ran.oldest) * 1e3,
        "pack_ms": (packed - ran.started) * 1e3,
        "compute_ms": (ran.finished - packed) * 1e3,
        "failed": ran.failed,
    }
