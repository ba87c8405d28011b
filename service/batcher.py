"""The batcher: admission, deadlines and windows, on the event loop. It never sees HTTP, and runs no model itself.

The window rule: the engine takes a window when it is free *and* (the token budget is full *or* the oldest request has
waited `max_wait`). With `max_wait` 0 a busy engine is itself the window. A request is either answered or failed, once;
its tokens count against the queue's bound until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final
from weakref import WeakSet

import numpy as np

from service.engine import Window
from service.errors import DeadlineExceeded, EngineFailed, QueueFull, TooLarge
from service.memory import Memory, piece_memory
from service.metrics import Metrics
from service.packing import Float32, Int64, Piece, piece_load, piece_seq_lens, plan_window, split
from service.request import Answer, Bounds, Client, ClientGone, Lane, Outcome, Request, ServedModel

log = logging.getLogger("tokenslab.batcher")

# How long and how many quiet turns of the loop a free engine is kept for requests that have already arrived.
COLLECT_S = 0.01
QUIET = 3
# Deadlines that pass within this time of one another are found by one look at all open requests.
SWEEP_S = 0.005
_NO_TOKENS: Final = np.empty((0, 0), np.float32)


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
    ) -> None:
        self._submit = submit
        self._bounds = bounds
        self._loop = loop
        self._clock = clock
        self._lanes: dict[ServedModel, Lane] = {}
        self._retired: WeakSet[ServedModel] = WeakSet()
        self._running: list[Piece[Request]] = []
        self._soon: asyncio.Handle | None = None
        self._arrivals = arrivals
        self._seen = 0
        self._quiet = 0
        self._collect_until = 0.0
        self._compute_s = 0.0  # of the last window
        self._wait: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_at = float("inf")
        self._open: set[Request] = set()
        self.open_tokens = 0  # accepted and not yet answered
        self.accepted = 0  # requests
        self.answered = 0  # of those, with a result
        self._metrics = metrics

    async def submit(
        self,
        model: ServedModel,
        tokens: Float32,
        seq_lens: Int64 | None,
        client: Client,
        timeout_s: float | None = None,
        memory: Memory | None = None,
    ) -> Answer:
        """`enqueue` for those who can await: returns the answer or raises its error; withdrawn when cancelled."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        request = self.enqueue(model, tokens, seq_lens, client, timeout_s, memory, done=partial(_resolve, future))
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
        done: Callable[[Outcome], None],
    ) -> Request:
        """Run `tokens` (rows >= 1, d_in) through `model`; `seq_lens` (sequences,), all positive, add up to rows.

        `memory`, for models that take one, has an entry for each of `seq_lens`; its rows count as tokens do, in the
        queue and in windows.

        `done` is called once with what became of it, on the event loop and never before this returns: an Answer,
        DeadlineExceeded (the service's timeout, or a shorter `timeout_s`), EngineFailed (its window failed) or
        ClientGone (the client left before its tokens were packed). By then it counts no more, and `done` may enqueue
        again; it must not raise.

        Raises:
            TooLarge: it could never be admitted, or a sequence is longer than the stated maximum.
            QueueFull: it cannot be admitted now.
        """
        rows, bounds = len(tokens), self._bounds
        load = rows if memory is None else rows + len(memory.rows)
        if load > bounds.queue_tokens:
            what = "tokens" if memory is None else "tokens and memory"
            raise TooLarge(f"{what}: {load} in one request, the queue holds {bounds.queue_tokens} (max_queue_tokens)")
        longest = 0 if seq_lens is None else int(seq_lens.max())
        if longest > bounds.sequence_tokens:
            raise TooLarge(
                f"seq_lens: a sequence of {longest} tokens, the longest allowed is {bounds.sequence_tokens} "
                "(max_sequence_tokens)"
            )
        if memory is not None and (longest := int(memory.seq_lens.max())) > bounds.sequence_tokens:
            raise TooLarge(
                f"memory_seq_lens: a memory of {longest} rows, the longest allowed is {bounds.sequence_tokens} "
                "(max_sequence_tokens)"
            )
        if self.open_tokens + load > bounds.queue_tokens:
            raise QueueFull(
                f"{self.open_tokens} tokens wait; {load} more would exceed max_queue_tokens, {bounds.queue_tokens}"
            )
        now = self._clock()
        timeout = bounds.timeout_s if timeout_s is None else min(timeout_s, bounds.timeout_s)
        ends = None if seq_lens is None else np.cumsum(seq_lens)
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = Lane(model)
        request = Request(lane, tokens, rows, ends, client, done, now, now + timeout, now, load=load)
        if memory is not None:
            assert ends is not None
            request.memory, request.load_ends = memory, ends + memory.ends
        lane.queue.append(request)
        lane.open += 1
        lane.tokens += load
        self._open.add(request)
        self.accepted += 1
        self.open_tokens += load
        self._watch(request.deadline)
        if not self._running and self._soon is None:
            self._start_collecting()
        return request

    def withdraw(self, request: Request) -> None:
        """Nobody waits for it any more: it counts no more, and `done` is not called; harmless once it was."""
        if request.done is not None:
            self._close(request)

    async def retire(self, model: ServedModel) -> None:
        """Wait until nothing that was accepted for `model` is open, then forget it.

        A request may still arrive that had found the model before: it is answered, and the lane forgotten again.
        """
        self._retired.add(model)
        lane = self._lanes.get(model)
        if lane is not None and lane.open:
            lane.drained = lane.drained or self._loop.create_future()
            await asyncio.shield(lane.drained)
        elif lane is not None:
            self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        if not lane.open and self._lanes.get(lane.model) is lane:
            del self._lanes[lane.model]
            if lane.drained is not None:
                lane.drained.set_result(None)

    def _close(self, request: Request) -> None:
        """Whatever became of it: it counts no more, and what still waits in its lane holds no body."""
        self._open.discard(request)
        lane = request.lane
        lane.open -= 1
        if not lane.open and self._retired and lane.model in self._retired:
            self._loop.call_soon(self._forget, lane)  # not now: the lanes may be being walked
        self.open_tokens -= request.load
        lane.tokens -= piece_load(request, request.taken, request.rows)
        request.taken = request.rows
        request.tokens, request.memory, request.out, request.done = _NO_TOKENS, None, None, None

    def _settle(self, request: Request, outcome: Outcome) -> None:
        """Tell whoever waits for it what became of it, the first time that something did."""
        done = request.done
        if done is None:
            return
        self._close(request)
        try:
            done(outcome)
        except Exception:  # one caller's fault must not keep the others of its window from their answers
            log.exception("%s: nobody took the outcome of a request", request.lane.model.label)

    def _start_collecting(self) -> None:
        """Keep the free engine for requests that have already arrived, and are still to be read.

        An engine that starts with the first of many small requests runs a small window, and fights the event loop for
        the cores while that reads the rest. So it starts when the loop finds nothing new (in QUIET turns; a request
        takes two from socket to queue), after one window's compute time or COLLECT_S in any case, and as soon as it
        has work for COLLECT_S: such a window gains little from more, and the loop reads beside it.
        """
        self._quiet = 0
        self._collect_until = self._clock() + min(COLLECT_S, self._compute_s)
        self._soon = self._loop.call_soon(self._collect)

    def _collect(self) -> None:
        seen = self.accepted + self._arrivals()
        self._quiet = self._quiet + 1 if seen == self._seen else 0
        self._seen = seen
        if self._quiet >= QUIET or self._clock() >= self._collect_until or self._enough():
            self._take()
        else:
            self._soon = self._loop.call_soon(self._collect)

    def _enough(self) -> bool:
        return any(lane.tokens * lane.token_s >= COLLECT_S for lane in self._lanes.values())

    def _take(self) -> None:
        """Give the free engine its next window, if there is one to give now."""
        self._soon = None
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        while not self._running:
            lane = self._next_lane()
            if lane is None:
                return
            self._start(lane)

    def _next_lane(self) -> Lane | None:
        """Of the models whose window is full or due, the one whose first request has queued longest.

        Where there is none, a timer is set for the first that becomes due.
        """
        now, first_due = self._clock(), float("inf")
        oldest: Lane | None = None
        for lane in list(self._lanes.values()):  # those that are dropped may enqueue again
            while lane.queue and self._dropped(lane.queue[0]):
                lane.queue.popleft()
            if not lane.queue:
                continue
            due = lane.queue[0].arrived + self._bounds.max_wait_s
            if lane.tokens < lane.model.limits.tokens and due > now:
                first_due = min(first_due, due)
            elif oldest is None or lane.queue[0].queued < oldest.queue[0].queued:
                oldest = lane
        if oldest is None and first_due != float("inf"):
            self._wait = self._loop.call_later(first_due - now, self._take)
        return oldest

    def _dropped(self, request: Request) -> bool:
        if request.done is not None and request.client.disconnected:
            self._settle(request, ClientGone())
        return request.done is None

    def _start(self, lane: Lane) -> None:
        pieces = plan_window(lane.queue, lane.model.limits, self._dropped)
        if not pieces:
            return
        now = self._clock()
        for piece in pieces:
            lane.tokens -= piece_load(*piece)
            if piece.stop < piece.request.rows:
                piece.request.queued = now
        ragged = [piece_seq_lens(p.request.ends, p.start, p.stop) for p in pieces if p.request.ends is not None]
        lens = np.concatenate(ragged) if ragged else None
        parts = [p.request.tokens[p.start : p.stop] for p in pieces]
        window = Window(lane.model, parts, lens, sum(map(len, parts)), self._on_engine_thread)
        if lane.model.memory_slab is not None:
            window.memory = _memory_of(pieces)
            window.memory_rows = sum(len(part.rows) for part in window.memory)
        self._running = pieces
        self._submit(window)

    def _on_engine_thread(self, window: Window) -> None:
        with suppress(RuntimeError):  # a loop that was closed meanwhile has nobody left to answer
            self._loop.call_soon_threadsafe(self._finish, window)

    def _finish(self, window: Window) -> None:
        pieces, self._running = self._running, []
        lane = pieces[0].request.lane
        self._compute_s = window.finished - window.started
        lane.token_s = self._compute_s / (window.rows + window.memory_rows)
        if self._enough():
            self._take()  # the engine first: it computes while the answers are written
        elif self._soon is None:
            self._start_collecting()
        label = lane.model.label
        if window.error is None and window.out is not None:
            try:
                outs = split(window.out, [p.stop - p.start for p in pieces])
            except ValueError as error:
                window.error = error
        if window.error is not None or window.out is None:
            log.error("a window of %d tokens failed on %s", window.rows, label, exc_info=window.error)
            for piece in pieces:
                failed = EngineFailed("the model failed on this request's window; see the service's log")
                self._settle(piece.request, failed)
            return
        compute_s = self._compute_s
        answered = []
        for piece, out in zip(pieces, outs, strict=True):
            request = piece.request
            if request.queue_s < 0:
                request.queue_s = max(0.0, window.started - request.arrived)
            request.compute_s += compute_s
            if self._deliver(request, piece, out, window.rows):
                answered.append(request)
        self.answered += len(answered)
        self._metrics.count_window(label, len(pieces), window.rows, compute_s)
        self._metrics.count_answers(label, [r.rows for r in answered], [r.queue_s for r in answered])
        log.debug("%s: a window of %d requests, %d tokens, %.2f ms", label, len(pieces), window.rows, compute_s * 1e3)

    def _deliver(self, request: Request, piece: Piece[Request], out: Float32, window_tokens: int) -> bool:
        """Give `request` its rows; True when that completes its answer."""
        if request.done is None:
            return False
        if len(out) < request.rows:
            if request.out is None:
                request.out = np.empty((request.rows, out.shape[1]), np.float32)
            request.out[piece.start : piece.stop] = out
            request.answered += len(out)
            if request.answered < request.rows:
                return False
            out = request.out
        self._settle(request, Answer(out, request.queue_s, request.compute_s, window_tokens))
        return True

    def _watch(self, deadline: float) -> None:
        """One timer for all deadlines, at the earliest that was known when it was set."""
        if deadline < self._sweep_at:
            if self._sweep is not None:
                self._sweep.cancel()
            self._sweep_at = deadline
            self._sweep = self._loop.call_later(max(0.0, deadline - self._clock()), self._expire)

    def _expire(self) -> None:
        self._sweep, self._sweep_at = None, float("inf")
        now = self._clock()
        earliest = float("inf")
        for request in list(self._open):  # those that are told may enqueue again
            if request.deadline <= now:
                waited = now - request.arrived
                where = "in its window" if request.taken else "in the queue"
                self._settle(request, DeadlineExceeded(f"timeout: not answered within {waited:.6f} s ({where})"))
            else:
                earliest = min(earliest, request.deadline)
        if earliest != float("inf"):
            self._watch(max(earliest, now + SWEEP_S))


def _resolve(future: asyncio.Future[Answer], outcome: Outcome) -> None:
    if future.done():  # cancelled
        return
    if isinstance(outcome, Answer):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _memory_of(pieces: list[Piece[Request]]) -> list[Memory]:
    memories = []
    for request, start, stop in pieces:
        assert request.memory is not None
        assert request.ends is not None
        memories.append(piece_memory(request.memory, request.ends, start, stop))
    return memories
