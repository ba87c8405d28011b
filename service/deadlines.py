"""One timer for the deadlines of all open requests, on the event loop: it rings on time while a window runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from service.request import Request

# Deadlines that pass within this time of one another are found by one look at all open requests.
SWEEP_S: Final = 0.005


class Deadlines:
    """The open requests, and whoever is told of those that are late."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], late: Callable[[Request, float], None]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._at = float("inf")
        self.open: set[Request] = set()

    def watch(self, request: Request) -> None:
        """It is open from now on; take it off `open` when it no longer is."""
        self.open.add(request)
        if request.deadline < self._at:
            self._wake_at(request.deadline)

    def _wake_at(self, deadline: float) -> None:
        """Earlier than the timer was set for, at the earliest deadline that is known."""
        if self._timer is not None:
            self._timer.cancel()
        self._at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._expire)

    def _expire(self) -> None:
        self._timer, self._at = None, float("inf")
        now = self._clock()
        earliest = float("inf")
        for request in list(self.open):  # those that are told may enqueue again
            if request.deadline <= now:
                self._late(request, now)
            else:
                earliest = min(earliest, request.deadline)
        if earliest != float("inf"):
            self._wake_at(max(earliest, now + SWEEP_S))
