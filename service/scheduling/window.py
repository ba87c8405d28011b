"""Which rows of which waiting requests make up the next window. Pure: it owns no clock, and runs nothing."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic

import numpy as np

from service.packing import Int64, Limits, Piece
from service.scheduling.cost import CostModel
from service.scheduling.waiting import Level, Pending, R, Waiting

# A request is cut when it takes more than so many chunks: less would leave slivers, and save nobody a chunk's time.
LARGE_CHUNKS = 2

_deadline, _isolate = attrgetter("deadline"), attrgetter("isolate")


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for one window; seconds are predicted compute."""

    limits: Limits
    cost: CostModel
    now: float = 0.0
    chunk_s: float = float("inf")  # of what is cut, and of what lower levels may add to higher ones
    window_s: float = float("inf")  # of all together: another model waits


def plan_window(waiting: Waiting[R], rules: Rules, gone: Callable[[R], bool] = lambda _: False) -> list[Piece[R]]:
    """Take the next window off `waiting`; requests that are `gone` leave it and take no room.

    Levels go in their order, starved ones before; a level's clients share by cost. A small request is never split: if
    it does not fit, the window closes before it. Of large ones, a window holds chunks of `chunk_s` together. A window
    also closes before a request that would make it miss a deadline. The first request always fits: if it may not be
    cut, whatever it costs.
    """
    plan: _Plan[R] = _Plan(rules)
    for level in waiting.starved():
        plan.take(level, gone, most=1)
    for level in waiting.levels:
        plan.descend()
        plan.take(level, gone)
    if plan.pieces:
        waiting.close_window(plan.levels)
    return plan.pieces


class _Plan(Generic[R]):
    """A window while it fills."""

    def __init__(self, rules: Rules) -> None:
        limits, cost = rules.limits, rules.cost
        self._rules = rules
        self._room = limits.tokens
        self._left = limits.requests if limits.requests is not None else -1
        self._room_s = cost.room_s(rules.window_s)
        self._chunk_s = cost.room_s(rules.chunk_s)
        self._extra_s = float("inf")
        self._deadline = float("inf")
        self._tokens = self._squares = 0
        self._closed = False
        self.pieces: list[Piece[R]] = []
        self.levels: set[int] = set()  # that have a part in it

    def descend(self) -> None:
        """What comes now is of a lower level: it may not hold up what is in by more than one chunk."""
        if self.pieces and self._extra_s == float("inf"):
            self._extra_s = self._rules.cost.room_s(self._rules.chunk_s)

    def take(self, level: Level[R], gone: Callable[[R], bool], most: int = -1) -> None:
        """Requests of one level, in their order, until one does not fit."""
        before = len(self.pieces)
        if most < 0 and not self._closed and (small := level.only_small()) is not None:
            self._take_small(level, *small, gone)
        self._take_in_turn(level, gone, most)
        if len(self.pieces) > before:
            self.levels.add(self.pieces[-1].request.level)

    def _take_in_turn(self, level: Level[R], gone: Callable[[R], bool], most: int) -> None:
        while not self._closed and most != 0:
            request = level.head(gone)
            if request is None:
                return
            if request.isolate and self.pieces:
                self._closed = True
                return
            count = self._fitting(request)
            if not count:
                # Room that was denied to a small request is nobody else's; a large one waits for the next chunk.
                self._closed = self._closed or not request.large
                return
            self._add(level, request, count)
            most -= 1

    def _take_small(self, level: Level[R], client: str, queue: deque[R], gone: Callable[[R], bool]) -> None:
        """What the loop of `take` would do with a queue of small requests alone: the usual case, at less a request."""
        rules, cost, pieces = self._rules, self._rules.cost, self.pieces
        left, room, room_s = self._left, self._room, min(self._room_s, self._extra_s)
        count, all_tokens, all_squares, all_s = 0, self._tokens, self._squares, 0.0
        if not pieces and left < 0 and self._all_fit(level, client, queue):
            arrived = list(queue)
            queue.clear()  # whoever is told that it is gone may enqueue again: that waits for the loop below
            count, self._deadline = len(arrived), min(map(_deadline, arrived))
            for request in arrived:
                if not gone(request):
                    request.taken = request.rows
                    all_tokens += request.load
                    all_squares += request.square
                    pieces.append(Piece(request, 0, request.rows))
            room -= all_tokens
            all_s = cost.marginal(all_tokens, all_squares)
            self._closed = room <= 0 or all_s >= self._room_s
        while queue and not self._closed:
            request = queue[0]
            if gone(request):
                queue.popleft()
                count += 1
                continue
            tokens, squares, deadline = request.load, request.square, min(self._deadline, request.deadline)
            seconds = cost.marginal(tokens, squares)
            if pieces and (
                request.isolate
                or tokens > room
                or seconds > room_s - all_s
                or rules.now + cost.seconds(all_tokens + tokens, all_squares + squares) > deadline
            ):
                self._closed = True
                break
            queue.popleft()
            count += 1
            request.taken = request.rows
            pieces.append(Piece(request, 0, request.rows))
            self._deadline = deadline
            room -= tokens
            all_tokens += tokens
            all_squares += squares
            all_s += seconds
            left -= 1
            self._closed = request.isolate or left == 0 or room <= 0 or all_s >= self._room_s
        level.serve_small(client, count, all_tokens - self._tokens, all_squares - self._squares, all_s)
        self._left, self._room, self._tokens, self._squares = left, room, all_tokens, all_squares
        self._room_s -= all_s
        self._extra_s -= all_s

    def _all_fit(self, level: Level[R], client: str, queue: deque[R]) -> bool:
        """Whether a whole queue of small requests is in time, and has room, in a window of its own."""
        tokens, squares = level.waiting(client)
        end = self._rules.now + self._rules.cost.seconds(tokens, squares)
        return (
            tokens <= self._room
            and self._rules.cost.marginal(tokens, squares) <= min(self._room_s, self._extra_s)
            and end <= min(map(_deadline, queue))
            and not any(map(_isolate, queue))
        )

    def _fitting(self, request: R) -> int:
        alone, cost = not self.pieces, self._rules.cost
        rest, seconds = request.rows - request.taken, min(self._room_s, self._extra_s)
        if request.large:
            count = rows_within(request, self._room, min(seconds, self._chunk_s), cost, at_least_one=alone)
        else:
            count = rest
        if not count or alone:
            return count
        tokens, squares = load(request, request.taken + count)
        if tokens > self._room or (not request.large and cost.marginal(tokens, squares) > seconds):
            return 0
        deadline = min(self._deadline, request.deadline if count == rest else float("inf"))
        late = self._rules.now + cost.seconds(self._tokens + tokens, self._squares + squares) > deadline
        return 0 if late else count

    def _add(self, level: Level[R], request: R, count: int) -> None:
        tokens, squares = load(request, request.taken + count)
        seconds = self._rules.cost.marginal(tokens, squares)
        self.pieces.append(Piece(request, request.taken, request.taken + count))
        request.taken += count
        self._deadline = min(self._deadline, request.deadline if request.taken == request.rows else float("inf"))
        self._tokens += tokens
        self._squares += squares
        self._room -= tokens
        self._room_s -= seconds
        self._extra_s -= seconds
        if request.large:
            self._chunk_s -= seconds
        self._left -= 1
        self._closed = request.isolate or self._left == 0 or self._room <= 0 or self._room_s <= 0
        level.serve(request, tokens, squares, seconds)


def is_large(tokens: int, squares: int, limits: Limits, cost: CostModel, chunk_s: float) -> bool:
    """Whether a request of so much work is cut: more than a window's budget, or than LARGE_CHUNKS chunks of compute."""
    if not limits.divisible:
        return False
    return tokens > limits.tokens or cost.marginal(tokens, squares) > LARGE_CHUNKS * cost.room_s(chunk_s)


def certainly_small(limits: Limits, cost: CostModel, chunk_s: float) -> int:
    """A number of tokens up to which `is_large` is false of requests without sequences: 0 says nothing."""
    if not limits.divisible:
        return sys.maxsize
    tokens = LARGE_CHUNKS * cost.room_s(chunk_s) / cost.marginal(1)
    return limits.tokens if tokens > limits.tokens else max(0, int(tokens) - 1)


def load(request: Pending, stop: int) -> tuple[int, int]:
    """`load_between` from what is taken up to row `stop`."""
    return load_between(request, request.taken, stop)


def load_between(request: Pending, start: int, stop: int) -> tuple[int, int]:
    """Tokens of budget, and squares, of rows `start:stop`, which lie on sequence borders."""
    if request.ends is None or request.load_ends is None or request.squares is None:
        return stop - start, 0
    first, last = np.searchsorted(request.ends, (start, stop), side="right").tolist()
    return _between(request.load_ends, first, last), _between(request.squares, first, last)


def rows_within(request: Pending, tokens: int, seconds: float, cost: CostModel, *, at_least_one: bool) -> int:
    """How many of the rows that are left fit into `tokens` and `seconds`, cut where the request may be cut.

    `at_least_one`: a row, or a sequence, whatever it costs.
    """
    rest = request.rows - request.taken
    if request.ends is None or request.load_ends is None or request.squares is None:
        per_token = cost.marginal(1)
        count = min(rest, tokens, rest if seconds >= rest * per_token else int(max(0.0, seconds) / per_token))
        return max(count, 1) if at_least_one else max(count, 0)
    first = int(np.searchsorted(request.ends, request.taken, side="right"))
    loads = request.load_ends[first:] - _between(request.load_ends, 0, first)
    costs = cost.marginals(loads, request.squares[first:] - _between(request.squares, 0, first))
    count = int(min(np.searchsorted(loads, tokens, side="right"), np.searchsorted(costs, seconds, side="right")))
    if not count and not at_least_one:
        return 0
    return int(request.ends[first + max(count, 1) - 1]) - request.taken


def _between(sums: Int64, first: int, last: int) -> int:
    """Of running sums: what entries `first:last` add up to."""
    return (int(sums[last - 1]) if last else 0) - (int(sums[first - 1]) if first else 0)
