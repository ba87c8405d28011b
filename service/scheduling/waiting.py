"""The requests that wait for one model: by priority, by client, and in each client's order. Pure data, no clock.

Level 1 goes first. Within a level clients share fairly; within a client what has to be cut (large) and what has not
(small) share fairly too, so that neither waits behind the whole of the other; large ones have their chunks in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from service.packing import Int64
from service.scheduling.turns import Turns


class Pending(Protocol):
    """What scheduling needs to know of a waiting request."""

    @property
    def load(self) -> int:
        """Tokens of the whole request that count against the budget."""

    @property
    def square(self) -> int:
        """Sum of the squared lengths of all its sequences."""

    rows: int  # tokens of the whole request, at least 1
    taken: int  # tokens already given to windows
    ends: Int64 | None  # where each sequence ends, in rows; None: rows are independent and may be cut anywhere
    load_ends: Int64 | None  # tokens that count against the budget, up to the end of each sequence; None as `ends`
    squares: Int64 | None  # sum of the squared lengths of the sequences up to each; None as `ends`
    deadline: float
    isolate: bool  # alone in its windows
    large: bool  # may be cut, and is
    level: int  # of priority; 1 is the highest
    client_id: str


R = TypeVar("R", bound=Pending)


class _Client(Generic[R]):
    """One client's requests of one level."""

    __slots__ = ("loads", "queues", "turns")

    def __init__(self) -> None:
        self.loads = {False: (0, 0), True: (0, 0)}  # tokens and squares that wait in each
        self.queues: dict[bool, deque[R]] = {False: deque(), True: deque()}  # small, large
        self.turns: Turns[bool] = Turns()


class Level(Generic[R]):
    """The waiting requests of one priority level."""

    __slots__ = ("_clients", "_turns", "size", "unserved")

    def __init__(self) -> None:
        self._clients: dict[str, _Client[R]] = {}
        self._turns: Turns[str] = Turns()
        self.size = 0  # requests, with those that nobody waits for any more
        self.unserved = 0  # windows since it last had a part in one, while it waited

    def add(self, request: R, tokens: int, squares: int) -> None:
        """At the end of its client's queue, with so much work."""
        client = self._clients.get(request.client_id)
        if client is None:
            client = self._clients[request.client_id] = _Client()
        large = request.large
        queue = client.queues[large]
        if not queue:
            client.turns.join(large)
            self._turns.join(request.client_id)
        queue.append(request)
        had = client.loads[large]
        client.loads[large] = had[0] + tokens, had[1] + squares
        self.size += 1

    def head(self, gone: Callable[[R], bool]) -> R | None:
        """The request whose turn it is; those before it that are `gone` leave the queue."""
        while self.size:
            client = self._clients[self._turns.first()]
            request = client.queues[client.turns.first()][0]
            if not gone(request):
                return request
            self._leave(request)
        return None

    def ahead(self, request: R) -> tuple[int, int]:
        """Tokens and squares of its client that `request` would surely wait for: large ones take turns."""
        client = self._clients.get(request.client_id)
        return (0, 0) if client is None or request.large else client.loads[False]

    def lighten(self, request: R, tokens: int, squares: int) -> None:
        """So much of `request`, which is in a queue, waits no more."""
        client = self._clients[request.client_id]
        had = client.loads[request.large]
        client.loads[request.large] = had[0] - tokens, had[1] - squares

    def serve(self, request: R, tokens: int, squares: int, cost: float) -> None:
        """Its head had a part of a window, which cost so much; it leaves when all of it is taken, and else lets those
        behind it have theirs.
        """
        self.lighten(request, tokens, squares)
        client = self._clients[request.client_id]
        client.turns.charge(request.large, cost)
        self._turns.charge(request.client_id, cost)
        if request.taken >= request.rows:
            self._leave(request)
        elif request.large:  # nor does what is cut wait behind the whole of what is much larger
            client.queues[True].rotate(-1)

    def only_small(self) -> tuple[str, deque[R]] | None:
        """The client and its queue of small requests, if that is all there is: it is its turn until it is empty."""
        if len(self._clients) != 1:
            return None
        ((name, client),) = self._clients.items()
        return None if client.queues[True] or not client.queues[False] else (name, client.queues[False])

    def waiting(self, name: str) -> tuple[int, int]:
        """Tokens and squares of the small requests of client `name`."""
        return self._clients[name].loads[False]

    def serve_small(self, name: str, requests: int, tokens: int, squares: int, cost: float) -> None:
        """So many were taken off the front of what `only_small` gave, those that are gone included."""
        client = self._clients[name]
        self.size -= requests
        had = client.loads[False]
        client.loads[False] = had[0] - tokens, had[1] - squares
        client.turns.charge(False, cost)
        self._turns.charge(name, cost)
        if not client.queues[False]:
            client.turns.leave(False)
            if not client.turns:
                self._depart(name)

    def keep(self, waits: Callable[[R], bool]) -> None:
        """Drop those for whom nobody waits, wherever they stand."""
        for name, client in list(self._clients.items()):
            for large, queue in client.queues.items():
                kept = deque(filter(waits, queue))
                self.size -= len(queue) - len(kept)
                if queue and not kept:
                    client.turns.leave(large)
                client.queues[large] = kept
            if not client.turns:
                self._depart(name)

    def _leave(self, request: R) -> None:
        client = self._clients[request.client_id]
        queue = client.queues[request.large]
        queue.popleft()
        self.size -= 1
        if not queue:
            client.turns.leave(request.large)
            if not client.turns:
                self._depart(request.client_id)

    def _depart(self, name: str) -> None:
        self._turns.leave(name)
        del self._clients[name]

    def __iter__(self) -> Iterator[R]:
        for client in self._clients.values():
            for queue in client.queues.values():
                yield from queue


class Waiting(Generic[R]):
    """All levels. A level that had no part in `aging` windows has the first part of the next."""

    def __init__(self, levels: int = 1, aging: int = 16) -> None:
        self.levels = [Level[R]() for _ in range(levels)]  # the highest first
        self._aging = aging

    @property
    def size(self) -> int:
        """Requests, with those that nobody waits for any more."""
        return sum(level.size for level in self.levels)

    def add(self, request: R, tokens: int, squares: int) -> None:
        """Join the queue of its level and client, with so much work."""
        self.levels[request.level - 1].add(request, tokens, squares)

    def ahead(self, request: R) -> tuple[int, int]:
        """Tokens and squares that `request` would surely wait for."""
        return self.levels[request.level - 1].ahead(request)

    def lighten(self, request: R, tokens: int, squares: int) -> None:
        """So much of `request`, which is in a queue, waits no more."""
        self.levels[request.level - 1].lighten(request, tokens, squares)

    def head(self, gone: Callable[[R], bool]) -> R | None:
        """The first of the highest level that has any; those before it that are `gone` leave."""
        for level in self.levels:
            request = level.head(gone)
            if request is not None:
                return request
        return None

    def starved(self) -> list[Level[R]]:
        """Levels whose turn came by age, the longest without a part first."""
        starved = [level for level in self.levels if level.size and level.unserved >= self._aging]
        return sorted(starved, key=lambda level: -level.unserved)

    def close_window(self, served: set[int]) -> None:
        """A window was planned, with requests of the levels `served`."""
        for index, level in enumerate(self.levels, 1):
            level.unserved = 0 if index in served or not level.size else level.unserved + 1

    def keep(self, waits: Callable[[R], bool]) -> None:
        """Drop those for whom nobody waits, wherever they stand."""
        for level in self.levels:
            level.keep(waits)

    def __iter__(self) -> Iterator[R]:
        for level in self.levels:
            yield from level
