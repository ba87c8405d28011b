"""The open requests: each is settled once, and counts until then. It tells whoever waits; it plans and runs nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final
from weakref import WeakSet

import numpy as np

from service.admission import Admission, unreachable
from service.deadlines import Deadlines
from service.errors import DeadlineExceeded
from service.lane import Lane, Lanes
from service.request import Answer, ClientGone, Outcome, Request, ServedModel, Work
from service.scheduling.window import load

log = logging.getLogger("tokenslab.batcher")

_NO_TOKENS: Final = np.empty((0, 0), np.float32)


class Ledger:
    """What is accepted and not yet answered, failed, late or left. All methods run on the event loop's thread."""

    def __init__(
        self, lanes: Lanes, admission: Admission, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]
    ) -> None:
        self._lanes = lanes
        self._admission = admission
        self._loop = loop
        self._clock = clock
        self._deadlines = Deadlines(loop, clock, self._late)
        self._retired: WeakSet[ServedModel] = WeakSet()
        self.accepted = 0  # requests
        self.answered = 0  # of those, with a result

    def accept(self, request: Request, work: Work) -> None:
        """It waits in its lane, counts, and its deadline is watched."""
        lane = request.lane
        if not lane.tokens:
            self._lanes.join(lane)
        lane.add(request, work.load, work.square)
        self._deadlines.watch(request)
        self._admission.count(request.level, work.load)
        self.accepted += 1

    def of(self, lane: Lane) -> list[Request]:
        """The open requests of `lane`."""
        return [request for request in self._deadlines.open if request.lane is lane]

    def withdraw(self, request: Request) -> None:
        """Nobody waits for it any more: it counts no more, and `done` is not called; harmless once it was."""
        if request.done is not None:
            self._lose(request, "gone")
            self._close(request)

    def settle(self, request: Request, outcome: Outcome) -> None:
        """Tell whoever waits for it what became of it, the first time that something did."""
        done = request.done
        if done is None:
            return
        if isinstance(outcome, Answer):
            self.answered += 1
        else:
            late, gone = isinstance(outcome, DeadlineExceeded), isinstance(outcome, ClientGone)
            self._lose(request, "late" if late else "gone" if gone else "failed")
        self._close(request)
        try:
            done(outcome)
        except Exception:  # one caller's fault must not keep the others of its window from their answers
            log.exception("%s: nobody took the outcome of a request", request.lane.model.label)

    def gone(self, now: float, sure: float, request: Request) -> bool:
        """Whether it is not to be run, because nobody waits for it or it would be late; not late from `sure` on."""
        if request.done is not None:
            if request.client.disconnected:
                self.settle(request, ClientGone())
            elif request.deadline < sure and (late := unreachable(request, now, 0.0)) is not None:
                self.settle(request, late)
        return request.done is None

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
            self._lanes.remove(lane)
            if lane.drained is not None:
                lane.drained.set_result(None)

    def _lose(self, request: Request, outcome: str) -> None:
        request.lane.metrics.count_loss(outcome, request.rows)
        request.lane.model.statistics.count_failed(self._clock() - request.arrived)

    def _close(self, request: Request) -> None:
        """Whatever became of it: it counts no more, and what still waits in its lane holds no body."""
        self._deadlines.open.discard(request)
        self._admission.count(request.level, -request.load)
        lane = request.lane
        if request.taken < request.rows:
            rest = load(request, request.rows)
            lane.lighten(request, *rest)
            request.taken = request.rows
        request.tokens, request.memory, request.out, request.done = _NO_TOKENS, None, None, None
        lane.open -= 1
        if not lane.open and self._retired and lane.model in self._retired:
            self._loop.call_soon(self._forget, lane)  # not now: the lanes may be being walked

    def _late(self, request: Request, now: float) -> None:
        where = "in its window" if request.taken else "in the queue"
        waited = now - request.arrived
        self.settle(request, DeadlineExceeded(f"timeout: not answered within {waited:.6f} s ({where})"))
