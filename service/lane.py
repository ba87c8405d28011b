"""What waits, runs and is known of one model on its way through the engine, and whose turn it is among models."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from service.metrics import ModelMetrics
from service.packing import Piece
from service.request import Bounds, Request, ServedModel
from service.scheduling.cost import CostModel
from service.scheduling.health import Health
from service.scheduling.retries import Retry
from service.scheduling.turns import Turns
from service.scheduling.waiting import Waiting
from service.scheduling.window import Rules, certainly_small, plan_window

# A model that was asked within this time is one that others make room for.
RECENT_S: Final = 1.0
WINDOW_S: Final = 1e-4  # what a window takes of the engine beside its run: from one thread to another and back


@dataclass(slots=True, eq=False)
class Lane:
    """The requests of one model that wait, and what was learned from those that ran."""

    model: ServedModel
    waiting: Waiting[Request]
    metrics: ModelMetrics
    cost: CostModel = field(default_factory=CostModel)
    health: Health = field(default_factory=Health)
    retries: deque[Retry[Request]] = field(default_factory=deque)
    tokens: int = 0  # not yet given to a window
    squares: int = 0  # likewise
    open: int = 0  # requests accepted and not yet settled
    drained: asyncio.Future[None] | None = None  # for whoever waits until there are none
    oldest: float = float("inf")  # arrival of the first request that waits, or earlier
    urgent: float = float("inf")  # earliest deadline of those that wait, or earlier
    asked_at: float = float("-inf")
    learned_at: float = float("-inf")  # when a window last showed what it costs
    small_tokens: int = 0  # a request without sequences that has no more is small for certain

    @classmethod
    def of(cls, model: ServedModel, bounds: Bounds, metrics: ModelMetrics) -> Lane:
        """An empty one, whose predictions rest on the model's warm-up."""
        lane = cls(model, Waiting(bounds.levels, bounds.aging), metrics)
        for timing in model.timings:
            lane.cost.observe(timing.tokens, timing.squares, timing.seconds)
        lane.size_chunks(bounds.chunk_s)
        return lane

    @property
    def predicted_s(self) -> float:
        """Compute of all that waits, in one window."""
        return self.cost.seconds(self.tokens, self.squares) if self.tokens else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.tokens or self.retries or self.health.trial_due)

    def add(self, request: Request, load: int, squares: int) -> None:
        """`request` waits from now on."""
        self.waiting.add(request, load, squares)
        self.open += 1
        self.tokens += load
        self.squares += squares
        self.asked_at = request.arrived
        if request.arrived < self.oldest:
            self.oldest = request.arrived
        if request.deadline < self.urgent:
            self.urgent = request.deadline

    def lighten(self, request: Request, tokens: int, squares: int) -> None:
        """So much of `request` waits no more, and will not run."""
        self.waiting.lighten(request, tokens, squares)
        self.tokens -= tokens
        self.squares -= squares

    def due(self, max_wait_s: float) -> float:
        """When its next window must start though it is not full: nothing may wait longer, or miss its deadline."""
        if self.retries or self.health.trial_due or self.tokens >= self.model.limits.tokens:
            return float("-inf")
        return min(self.oldest + max_wait_s, self.urgent - self.predicted_s)

    def plan(self, rules: Rules, gone: Callable[[Request], bool], max_wait_s: float) -> list[Piece[Request]]:
        """Take its next window off what waits."""
        pieces = plan_window(self.waiting, rules, gone)
        if self.waiting.size > 2 * self.open + 64:
            self.waiting.keep(lambda request: request.done is not None)
        if max_wait_s:  # else they are asked for by nobody
            self.oldest = min((r.arrived for r in self.waiting), default=float("inf"))
            self.urgent = min((r.deadline for r in self.waiting), default=float("inf"))
        return pieces

    def learn(self, tokens: int, squares: int, seconds: float, now: float, chunk_s: float) -> None:
        """A window of so much work took `seconds`."""
        self.cost.observe(tokens, squares, seconds)
        self.learned_at = now
        self.size_chunks(chunk_s)

    def size_chunks(self, chunk_s: float) -> None:
        """Say what `small_tokens` is while chunks are of `chunk_s`."""
        self.small_tokens = certainly_small(self.model.limits, self.cost, chunk_s)


class Lanes:
    """All lanes, which share one engine by what their windows cost it."""

    def __init__(self) -> None:
        self._lanes: dict[ServedModel, Lane] = {}
        self._turns: Turns[ServedModel] = Turns()

    def get(self, model: ServedModel) -> Lane | None:
        """The lane of `model`, if there is one."""
        return self._lanes.get(model)

    def add(self, lane: Lane) -> None:
        """A model that is asked for the first time."""
        self._lanes[lane.model] = lane

    def join(self, lane: Lane) -> None:
        """It has work from now on."""
        self._turns.join(lane.model)

    def remove(self, lane: Lane) -> None:
        """Nothing of it is open any more."""
        del self._lanes[lane.model]
        self._turns.rest(lane.model)

    def all(self) -> list[Lane]:
        """A list of its own: whoever is answered may ask again, and of a new model."""
        return list(self._lanes.values())

    def choose(self, now: float, max_wait_s: float) -> tuple[Lane | None, float]:
        """Of the lanes whose next window is full or due, the one whose turn it is; and when the first becomes due."""
        ready, first_due = [], float("inf")
        for model, lane in self._lanes.items():
            if not lane.has_work:
                self._turns.rest(model)
                continue
            self._turns.join(model)
            due = lane.due(max_wait_s) if max_wait_s else now
            if due <= now:
                ready.append(model)
            first_due = min(first_due, due)
        if not ready:
            return None, first_due
        return self._lanes[self._turns.first_of(ready)], first_due

    def longest_s(self) -> float:
        """Compute of all that waits, in the lane where it is longest."""
        return max((lane.predicted_s for lane in self._lanes.values()), default=0.0)

    def charge(self, lane: Lane, seconds: float) -> None:
        """A window of `lane` is about to take so long, as predicted."""
        self._turns.join(lane.model)
        self._turns.charge(lane.model, WINDOW_S + seconds)
        if not lane.has_work:
            self._turns.leave(lane.model)

    def correct(self, lane: Lane, seconds: float) -> None:
        """It took so much longer than predicted."""
        self._turns.correct(lane.model, seconds)

    def crowded(self, lane: Lane, now: float) -> bool:
        """Whether another model than that of `lane` has work, or had some a moment ago."""
        return any(
            other is not lane and (other.has_work or other.asked_at > now - RECENT_S) for other in self._lanes.values()
        )
