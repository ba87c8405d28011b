"""`tokenslab` whose batcher prints each window and what each request waited for: counts where a clock would not do.

Run as a program. A line per window, `window: <requests> <predicted ms> <parts of requests>`, and a line per request
that was answered, `request: <tokens> <windows that began after it came, up to and with its last>`.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

from service.batcher import Batcher
from service.lane import Lane
from service.request import Answer, Outcome, Request
from tokenslab import main

_begun = [0]
_enqueue, _start = Batcher.enqueue, Batcher._start


def enqueue(self: Batcher, model: Any, tokens: Any, *rest: Any, **named: Any) -> Request:
    came, done, rows = _begun[0], named["done"], len(tokens)

    def record(outcome: Outcome) -> None:
        if isinstance(outcome, Answer):
            # What began last may be a window that this request is not in: the engine goes first.
            ran = _begun[0] - (self._running is not None)
            sys.stdout.write(f"request: {rows} {ran - came}\n")
        done(outcome)

    named["done"] = record
    return _enqueue(self, model, tokens, *rest, **named)


def start(self: Batcher, lane: Lane, now: float) -> None:
    _start(self, lane, now)
    if (running := self._running) is not None:
        _begun[0] += 1
        sys.stdout.write(f"window: {len(running.pieces)} {running.predicted_s * 1e3:.3f} {running.chunks}\n")


if __name__ == "__main__":
    with patch.object(Batcher, "enqueue", enqueue), patch.object(Batcher, "_start", start):
        main()
