"""One-thread CPU time of things that are to be compared: interleaved, the least of many rounds.

On a machine that others use too, wall-clock time of two threads cannot resolve 10 %; this can. It knows what to call
and nothing of what it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

_SHORTEST_S: Final = 0.002  # of one reading: the thread's clock ticks coarsely on some systems


def least_cpu_seconds(
    calls: Mapping[str, Callable[[], object]], seconds: float, *, rounds: int = 3
) -> dict[str, float]:
    """Least CPU seconds of this thread that one call of each took.

    The calls must do their work in the calling thread (ONNX Runtime with one thread does).

    Args:
        calls: what to compare; called in turns, so that what slows the machine slows all.
        seconds: of CPU time to spend on all of them, about.
        rounds: to make however long they take.
    """
    repeats = {name: _repeats(call) for name, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    began = time.thread_time()
    done = 0
    while done < rounds or time.thread_time() - began < seconds:
        for name, call in calls.items():
            before = time.thread_time()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (time.thread_time() - before) / repeats[name])
        done += 1
    return best


def _repeats(call: Callable[[], object]) -> int:
    """How many calls a reading needs; the first call warms up."""
    call()
    before = time.thread_time()
    call()
    return max(1, round(_SHORTEST_S / max(time.thread_time() - before, 1e-6)))
