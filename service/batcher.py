"""The batcher: from admission to answer, on the event loop. It never sees HTTP, and runs no model itself.

The window rule: the engine takes a window when it is free *and* (the token budget is full *or* waiting longer would
break `max_wait` or a deadline). With `max_wait` 0 a busy engine is itself the window. A request is either answered or
failed, once; its tokens count against the queue's bounds until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from service.admission import Admission, unreachable
from service.collecting import Collecting
from service.engine import Window
from service.faults import Faults, failing
from service.lane import Lane, Lanes
from service.ledger import Ledger
from service.memory import Memory
from service.metrics import Metrics
from service.packing import Float32, Int64, Piece, kept
from service.request import Answer, Bounds, Client, Outcome, Request, ServedModel, Work
from service.running import Running, give_out
from service.scheduling.window import Rules, is_large
from service.waiting_gauges import watch_waiting

log = logging.getLogger("tokenslab.batcher")

HANG_FACTOR: Final = 10.0  # a window that takes so much longer than predicted, and longer than `hang_s`, hangs

Watcher = Callable[[Window, ServedModel, Sequence[Piece[Request]]], None]


class Batcher:
    """Turns concurrent `enqueue` calls into windows. All methods run on the event loop's thread."""

    def __init__(
        self,
        submit: Callable[[Window], None],
        bounds: Bounds,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.perf_counter,
        arrivals: Callable[[], int] = lambda: 0,
        observe: Watcher | None = None,
    ) -> None:
        self._submit = submit
        self._bounds = bounds
        self._metrics = metrics
        self._loop = loop
        self._clock = clock
        self._lanes = Lanes()
        self._running: Running | None = None
        self._admission = Admission(bounds)
        self._ledger = Ledger(self._lanes, self._admission, loop, clock)
        self.withdraw = self._ledger.withdraw
        self.retire = self._ledger.retire
        self._arrivals = arrivals
        self._watchers: list[Watcher] = [] if observe is None else [observe]
        self._collecting = Collecting(loop, clock, self._arrived, self._lanes.longest_s, self._take)
        self._faults = Faults(self._ledger, self._lanes, loop, clock, self._wake)
        watch_waiting(metrics, self._lanes, bounds.levels, clock)
        self._wait: asyncio.TimerHandle | None = None
        self._free_at = float("-inf")  # when the engine will have run what it runs, as predicted
        self._compute_s = 0.0  # of the last window

    @property
    def open_tokens(self) -> int:
        """Accepted and not yet answered."""
        return self._admission.open_tokens

    @property
    def accepted(self) -> int:
        """Requests, so far."""
        return self._ledger.accepted

    @property
    def answered(self) -> int:
        """Of those, with a result."""
        return self._ledger.answered

    async def submit(
        self,
        model: ServedModel,
        tokens: Float32,
        seq_lens: Int64 | None,
        client: Client,
        timeout_s: float | None = None,
        memory: Memory | None = None,
        *,
        priority: int = 0,
        isolate: bool = False,
        client_id: str = "",
    ) -> Answer:
        """`enqueue` for those who can await: returns the answer or raises its error; withdrawn when cancelled."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        request = self.enqueue(
            *(model, tokens, seq_lens, client, timeout_s, memory),
            priority=priority,
            isolate=isolate,
            client_id=client_id,
            done=partial(_resolve, future),
        )
        try:
            return await future
        finally:
            self.withdraw(request)
            del request, future, tokens, memory  # an exception's traceback keeps this frame: it must not keep the body

    def enqueue(
        self,
        model: ServedModel,
        tokens: Float32,
        seq_lens: Int64 | None,
        client: Client,
        timeout_s: float | None = None,
        memory: Memory | None = None,
        *,
        priority: int = 0,
        isolate: bool = False,
        client_id: str = "",
        done: Callable[[Outcome], None],
    ) -> Request:
        """Run `tokens` (rows >= 1, d_in) through `model`; `seq_lens` (sequences,), all positive, add up to rows.

        `memory`, for models that take one, has an entry for each of `seq_lens`; its rows count as tokens do, in the
        queue and in windows.

        `priority` 1 is the highest level, 0 the default one. An `isolate` request shares its windows with nobody.
        Requests of one `client_id` share what its level gives it.

        `done` is called once with what became of it, on the event loop and never before this returns: an Answer (whose
        rows may be a view of the window's: see `packing.kept`), DeadlineExceeded (the service's timeout, or a shorter
        `timeout_s`), DeadlineUnreachable (it became clear that it would be late), EngineFailed (it failed alone),
        ModelFailing or ClientGone (the client left before its tokens were packed). By then it counts no more, and
        `done` may enqueue again; it must not raise.

        Raises:
            TooLarge: it could never be admitted, or a sequence is longer than the stated maximum.
            QueueFull: it cannot be admitted now.
            DeadlineUnreachable: it would be late whatever happens.
            ModelFailing: the model does not run at present.
            InvalidInput: there is no such priority.
        """
        admission, now = self._admission, self._clock()
        level = admission.level(priority)
        work = Work.of(tokens, seq_lens, memory)
        admission.check(work, level, model.limits.sequence_tokens)
        lane = self._lanes.get(model) or self._add_lane(model)
        if lane.health.reason is not None:
            raise failing(lane)
        load, square, ends, load_ends, squares, _, _ = work
        large = (square > 0 or load > lane.small_tokens) and is_large(
            load, square, model.limits, lane.cost, self._bounds.chunk_s
        )
        request = Request(
            lane,
            tokens,
            len(tokens),
            load,
            square,
            ends,
            load_ends,
            squares,
            client,
            done,
            now,
            admission.deadline(now, timeout_s),
            level,
            client_id,
            isolate,
            large,
            memory,
        )
        free_at = now if now > self._free_at else self._free_at
        if request.deadline < free_at + lane.cost.seconds(lane.tokens + load, lane.squares + square):
            # Else it is reached whatever goes before it: the usual case, for which no more is computed.
            refusal = unreachable(request, now, free_at - now + lane.cost.marginal(*lane.waiting.ahead(request)))
            if refusal is not None:
                raise refusal
        self._ledger.accept(request, work)
        if self._running is None:
            self._collecting.begin(self._compute_s)
        return request

    def rebound(self, bounds: Bounds) -> None:
        """From now on admit and schedule by `bounds`, which have as many priority levels as those before."""
        self._bounds = bounds
        self._admission.rebound(bounds)
        for lane in self._lanes.all():
            lane.size_chunks(bounds.chunk_s)

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` for every window that has run, before its requests are told; it must not raise."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """No more, for a watcher that was given to `watch`."""
        self._watchers.remove(watcher)

    def failing(self, model: ServedModel) -> str | None:
        """Why `model` does not run at present; None if it does, as far as is known."""
        lane = self._lanes.get(model)
        return None if lane is None else lane.health.reason

    def hanging(self) -> str | None:
        """What is wrong with the engine if a window runs for much longer than it should."""
        if self._running is None:
            return None
        took = self._clock() - self._running.since
        if took <= max(self._bounds.hang_s, HANG_FACTOR * self._running.predicted_s):
            return None
        return f"{self._running.lane.model.label}: a window has run for {took:.1f} s (hang_limit_s)"

    def _arrived(self) -> int:
        return self.accepted + self._arrivals()

    def _add_lane(self, model: ServedModel) -> Lane:
        lane = Lane.of(model, self._bounds, self._metrics.of(model.label))
        self._lanes.add(lane)
        return lane

    def _wake(self) -> None:
        if self._running is None:
            self._collecting.begin(self._compute_s)

    def _take(self) -> None:
        """Give the free engine its next window, if there is one to give now; else look again when one becomes due."""
        self._collecting.end()
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        while self._running is None:
            now = self._clock()
            lane, due = self._lanes.choose(now, self._bounds.max_wait_s)
            if lane is None:
                if due != float("inf"):
                    self._wait = self._loop.call_later(max(0.0, due - now), self._take)
                return
            self._start(lane, now)

    def _start(self, lane: Lane, now: float) -> None:
        until = None
        if lane.health.trial_due:
            running = Running(lane, [], now)
        elif lane.retries:
            retry = lane.retries.popleft()
            until = retry.until
            running = Running(
                lane, [p for p in retry.pieces if not self._ledger.gone(now, float("inf"), p.request)], now, until
            )
        else:
            crowded = self._lanes.crowded(lane, now)
            chunk_s = self._bounds.chunk_s
            rules = Rules(lane.model.limits, lane.cost, now, chunk_s, chunk_s if crowded else float("inf"))
            sure = now + lane.predicted_s  # who has so much time is in time, whatever the window holds
            running = Running(
                lane, lane.plan(rules, partial(self._ledger.gone, now, sure), self._bounds.max_wait_s), now
            )
            lane.tokens -= running.tokens
            lane.squares -= running.squares
        if not running.pieces and not lane.health.trial_due:
            return
        self._lanes.charge(lane, running.predicted_s)
        self._running = running
        self._free_at = now + running.predicted_s
        self._submit(running.window(self._on_engine_thread))

    def _on_engine_thread(self, window: Window) -> None:
        with suppress(RuntimeError):  # a loop that was closed meanwhile has nobody left to answer
            self._loop.call_soon_threadsafe(self._finish, window)

    def _finish(self, window: Window) -> None:
        running, self._running = self._running, None
        self._free_at = float("-inf")
        assert running is not None
        lane, error = running.lane, window.error or running.fault(window)
        self._compute_s = window.finished - window.started
        self._lanes.correct(lane, self._compute_s - running.predicted_s)
        if self._watchers and running.pieces:
            for watcher in self._watchers:
                watcher(window, lane.model, running.pieces)
        if not running.pieces:
            self._faults.tried(lane, error)
        elif error is not None:
            self._faults.failed(running, error, self._compute_s)
        if self._collecting.enough():
            self._take()  # the engine first: it computes while the answers are written
        else:
            self._wake()
        if running.pieces and error is None:
            self._answer(running, window)

    def _answer(self, running: Running, window: Window) -> None:
        lane = running.lane
        lane.health.ran()
        began = self._clock()
        complete = give_out(running, window)
        for request, answer in complete:
            self._ledger.settle(request, answer)
        now = self._clock()
        running.count(window, complete, now, now - began)
        lane.learn(running.tokens, running.squares, self._compute_s, now, self._bounds.chunk_s)


def _resolve(future: asyncio.Future[Answer], outcome: Outcome) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, Answer):
        outcome.out = kept(outcome.out)  # whoever awaits may take its time
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
