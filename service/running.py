"""The window that runs: what was packed into it, and how its rows find their way back to the requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from service.engine import Window
from service.lane import Lane
from service.memory import Memory, piece_memory
from service.packing import Piece, piece_seq_lens, split
from service.request import Answer, Request
from service.scheduling.window import load_between
from service.statistics import Served

log = logging.getLogger("tokenslab.batcher")
Complete = list[tuple[Request, Answer]]


class Running:
    """Pieces that run together; none: the model is tried out."""

    __slots__ = ("chunks", "lane", "pieces", "predicted_s", "since", "squares", "tokens", "until")

    def __init__(self, lane: Lane, pieces: list[Piece[Request]], since: float, until: float | None = None) -> None:
        self.lane = lane
        self.pieces = pieces
        self.since = since  # when it was given to the engine
        self.until = until  # of a window that failed before: when its parts are no longer run again
        all_tokens = all_squares = chunks = 0
        for request, start, stop in pieces:
            if stop - start == request.rows:
                all_tokens += request.load
                all_squares += request.square
                continue
            tokens, squares = load_between(request, start, stop)
            all_tokens += tokens
            all_squares += squares
            chunks += 1
        self.tokens, self.squares, self.chunks = all_tokens, all_squares, chunks  # work, and parts of requests
        self.predicted_s = lane.cost.seconds(self.tokens, self.squares) if pieces else 0.0

    def window(self, done: Callable[[Window], None]) -> Window:
        """What the engine gets."""
        lens = None
        if self.squares:  # there are sequences
            ragged = [
                piece_seq_lens(p.request.ends, p.start, p.stop) for p in self.pieces if p.request.ends is not None
            ]
            lens = np.concatenate(ragged)
        parts = [r.tokens if stop - start == r.rows else r.tokens[start:stop] for r, start, stop in self.pieces]
        window = Window(self.lane.model, parts, lens, sum(map(len, parts)), done)
        if self.pieces and self.lane.model.memory_slab is not None:
            window.memory = _memory_of(self.pieces)
            window.memory_rows = sum(len(part.rows) for part in window.memory)
        return window

    def fault(self, window: Window) -> Exception | None:
        """What is wrong with a window that the engine did not fail."""
        if self.pieces and (window.out is None or len(window.out) != window.rows):
            found = None if window.out is None else window.out.shape
            return RuntimeError(f"the engine returned {found} for a window of {window.rows} rows")
        return None

    def count(self, window: Window, complete: Complete, now: float, output_s: float) -> None:
        """Raise what is counted of the lane's model: this window, and the requests that it completed."""
        lane, rows = self.lane, window.rows
        input_s, infer_s = window.packed - window.started, window.finished - window.packed
        lane.metrics.count_window(len(self.pieces), rows, lane.model.limits.tokens, input_s, infer_s, output_s)
        if self.chunks:
            lane.metrics.chunks.inc(self.chunks)
        lane.model.statistics.count_window(rows, input_s, infer_s, output_s)
        if complete:
            requests = [request for request, _ in complete]
            queued = [r.queue_s for r in requests]
            tokens = lane.metrics.count_answers([r.rows for r in requests], queued)
            lane.model.statistics.count_served(
                Served(
                    len(requests),
                    tokens,
                    sum(queued),
                    sum([r.input_s for r in requests]),
                    sum([r.compute_s - r.input_s for r in requests]),
                    sum([now - r.arrived for r in requests]),
                ),
                output_s,
            )
        log.debug(
            "%s: a window of %d requests, %d tokens, %.2f ms",
            *(lane.model.label, len(self.pieces), rows, (input_s + infer_s) * 1e3),
        )


def give_out(running: Running, window: Window) -> Complete:
    """The rows of a window that ran to the requests they belong to; the requests that are complete, with their answers.

    Raises:
        ValueError: it has another number of rows than its pieces; nobody is given any then.
    """
    pieces, out = running.pieces, window.out
    assert out is not None
    outs = split(out, [stop - start for _, start, stop in pieces])
    started = window.started
    compute_s, input_s = window.finished - started, window.packed - started
    complete: Complete = []
    for (request, start, stop), rows in zip(pieces, outs, strict=True):
        if request.queue_s < 0:
            request.queue_s = started - request.arrived if started > request.arrived else 0.0
        request.input_s += input_s
        request.compute_s += compute_s
        if request.done is None:
            continue
        if stop - start < request.rows:
            if request.out is None:
                request.out = np.empty((request.rows, out.shape[1]), np.float32)
            request.out[start:stop] = rows
            request.answered += stop - start
            if request.answered < request.rows:
                continue
            rows = request.out
        complete.append((request, Answer(rows, request.queue_s, request.compute_s, window.rows)))
    return complete


def _memory_of(pieces: list[Piece[Request]]) -> list[Memory]:
    memories = []
    for request, start, stop in pieces:
        assert request.memory is not None
        assert request.ends is not None
        memories.append(piece_memory(request.memory, request.ends, start, stop))
    return memories
