"""What follows when a window fails: it is run again in halves, and a model that cannot run at all is told apart from
requests that cannot. On the event loop; it runs nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from service.errors import EngineFailed, ModelFailing
from service.lane import Lane, Lanes
from service.ledger import Ledger
from service.running import Running
from service.scheduling.retries import halves, patience_s

log = logging.getLogger("tokenslab.batcher")

TRIAL_S: Final = 5.0  # between two trials of a model that fails


class Faults:
    """Decides on windows that failed. `wake` is called when there is something to run again."""

    def __init__(
        self,
        ledger: Ledger,
        lanes: Lanes,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self._loop = loop
        self._clock = clock
        self._wake = wake

    def failed(self, running: Running, error: BaseException, window_s: float) -> None:
        """Run it again in halves; who failed alone is told so."""
        lane, pieces = running.lane, running.pieces
        log.error("a window of %d tokens failed on %s", running.tokens, lane.model.label, exc_info=error)
        now = self._clock()
        until = now + patience_s(len(pieces), window_s) if running.until is None else running.until
        if len(pieces) == 1:
            lane.health.failed_alone()
            reason = "the model failed on this request, run alone; see the service's log"
            self._ledger.settle(pieces[0].request, EngineFailed(reason))
        elif now < until:
            lane.metrics.retries.inc(2)
            lane.retries.extendleft(reversed(halves(pieces, until)))
        else:
            for piece in pieces:
                self._ledger.settle(piece.request, EngineFailed("the model keeps failing on this request's window"))

    def tried(self, lane: Lane, error: BaseException | None) -> None:
        """The model's own input ran, or not: then nothing of the model does until it is tried again."""
        was, label = lane.health.reason, lane.model.label
        lane.health.tried(error)
        lane.metrics.failing.set(error is not None)
        if error is not None:
            log.error("%s: not ready: %s", label, lane.health.reason, exc_info=error)
            for request in self._ledger.of(lane):
                self._ledger.settle(request, failing(lane))
            lane.retries.clear()
            self._loop.call_later(TRIAL_S, self._try_again, lane)
        elif was is not None:
            log.info("%s: ready again", label)

    def _try_again(self, lane: Lane) -> None:
        if self._lanes.get(lane.model) is lane:
            lane.health.trial_due = True
            self._wake()


def failing(lane: Lane) -> ModelFailing:
    """What those are told who ask the lane's model."""
    return ModelFailing(f"{lane.model.label}: not ready: {lane.health.reason}")
