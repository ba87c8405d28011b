"""Whose turn it is, among those that share one thing and have work waiting. Pure: costs in, an order out."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K")  # hashable


class Turns(Generic[K]):
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996), all weights equal.

    Each key has a virtual time, which its costs move on; the turn is that of the least. Of two keys that always have
    work, neither gets ahead of the other by more than one cost of each. One that had nothing waiting comes back at the
    virtual time of whose turn it is, or at its own if that is later: it saves no turns up, loses no debt, and however
    many come, they come after those who wait (the virtual time of WF2Q+, Bennett and Zhang, 1996).
    """

    __slots__ = ("_active", "_heap", "_idle", "_joined", "_now")

    def __init__(self) -> None:
        self._active: dict[K, tuple[float, int]] = {}  # virtual time, and when it joined, for ties
        self._idle: dict[K, float] = {}  # debts of those that have nothing waiting
        self._heap: list[tuple[float, int, K]] = []  # of the active ones, and of what they were before
        self._now = 0.0
        self._joined = 0

    def __bool__(self) -> bool:
        return bool(self._active)

    def __len__(self) -> int:
        return len(self._active)

    def join(self, key: K) -> None:
        """`key` has work waiting; harmless if it had."""
        if key not in self._active:
            if self._active:
                self._now = max(self._now, self._active[self.first()][0])
            self._set(key, max(self._now, self._idle.pop(key, 0.0)))

    def rest(self, key: K) -> None:
        """`leave`, harmless if it had nothing waiting."""
        if key in self._active:
            self.leave(key)

    def leave(self, key: K) -> None:
        """`key` has nothing waiting any more."""
        at, _ = self._active.pop(key)
        if not self._active:  # nobody waits: all debts are forgiven
            self._now = max(self._now, at)
            self._idle.clear()
            self._heap.clear()
            return
        self._idle[key] = at
        if len(self._idle) > 2 * len(self._active) + 64:
            self._idle = {k: debt for k, debt in self._idle.items() if debt > self._now}

    def first(self) -> K:
        """Whose turn it is; there must be somebody."""
        while True:
            at, joined, key = self._heap[0]
            if self._active.get(key) == (at, joined):
                return key
            heappop(self._heap)

    def first_of(self, keys: Iterable[K]) -> K:
        """Whose turn it is among some that are active."""
        return min(keys, key=self._active.__getitem__)

    def charge(self, key: K, cost: float) -> None:
        """`key`, active, was served at `cost`."""
        at, _ = self._active[key]
        self._now = max(self._now, at)
        self._set(key, at + cost)

    def correct(self, key: K, cost: float) -> None:
        """What `key` was served cost so much more (or less) than it was charged."""
        if key in self._active:
            at, joined = self._active[key]
            self._enter(key, at + cost, joined)
        elif key in self._idle:
            self._idle[key] += cost

    def _set(self, key: K, at: float) -> None:
        self._joined += 1
        self._enter(key, at, self._joined)

    def _enter(self, key: K, at: float, joined: int) -> None:
        self._active[key] = at, joined
        if len(self._heap) > 2 * len(self._active) + 64:
            self._heap = [(*entry, key) for key, entry in self._active.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (at, joined, key))
