"""Keeping a free engine for requests that have already arrived, and are still to be read.

An engine that starts with the first of many small requests runs a small window, and fights the event loop for the cores
while that reads the rest. So it starts when the loop finds nothing new (in QUIET turns; a request takes two from socket
to queue), after one window's compute time or COLLECT_S in any case, and as soon as it has work for COLLECT_S: such a
window gains little from more, and the loop reads beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

COLLECT_S: Final = 0.01
QUIET: Final = 3


class Collecting:
    """Calls `take` once after each `begin`, when waiting for more is no longer worth it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        arrived: Callable[[], int],
        work_s: Callable[[], float],
        take: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._arrived = arrived  # a count of whatever has come; it only grows
        self._work_s = work_s
        self._take = take
        self._soon: asyncio.Handle | None = None
        self._seen = 0
        self._quiet = 0
        self._until = 0.0

    def begin(self, window_s: float) -> None:
        """Start to collect, unless it does already; the last window took `window_s`."""
        if self._soon is None:
            self._quiet = 0
            self._until = self._clock() + min(COLLECT_S, window_s)
            self._soon = self._loop.call_soon(self._look)

    def enough(self) -> bool:
        """Whether what waits is work for COLLECT_S."""
        return self._work_s() >= COLLECT_S

    def end(self) -> None:
        """What was collected is being taken."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    def _look(self) -> None:
        seen = self._arrived()
        self._quiet = self._quiet + 1 if seen == self._seen else 0
        self._seen = seen
        if self._quiet >= QUIET or self._clock() >= self._until or self.enough():
            self._soon = None
            self._take()
        else:
            self._soon = self._loop.call_soon(self._look)
