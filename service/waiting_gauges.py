"""How much waits, by priority: read off the lanes when somebody scrapes, so that it costs requests nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from service.lane import Lanes
from service.metrics import Metrics
from service.request import Request


def watch_waiting(metrics: Metrics, lanes: Lanes, levels: int, clock: Callable[[], float]) -> None:
    """Let the gauges of `metrics` tell what waits in `lanes`, at each of `levels` priorities."""

    def waiting(level: int) -> Iterator[Request]:
        for lane in lanes.all():
            yield from (request for request in lane.waiting.levels[level] if request.done is not None)

    def requests(level: int) -> float:
        return float(sum(1 for _ in waiting(level)))

    def tokens(level: int) -> float:
        return float(sum(request.rows - request.taken for request in waiting(level)))

    def age_s(level: int) -> float:
        now = clock()
        return max((now - request.arrived for request in waiting(level)), default=0.0)

    for level in range(levels):
        label = str(level + 1)
        metrics.waiting_requests.labels(label).set_function(partial(requests, level))
        metrics.waiting_tokens.labels(label).set_function(partial(tokens, level))
        metrics.waiting_seconds.labels(label).set_function(partial(age_s, level))
