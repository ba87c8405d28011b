"""Packing as pure functions: which rows of which request go into the next window, and back.

Owns no clock, loop, socket or session. Rows are tokens; the width does not matter here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


class Pending(Protocol):
    """What planning needs to know of a waiting request."""

    rows: int  # tokens of the whole request, at least 1
    taken: int  # tokens already given to windows
    ends: Int64 | None  # where each sequence ends, in rows; None: rows are independent and may be cut anywhere
    load_ends: Int64 | None  # the same in the budget's units, where a sequence takes more than its rows


P = TypeVar("P", bound=Pending)


class Piece(NamedTuple, Generic[P]):
    """Rows `start:stop` of one request, as they stand in one window."""

    request: P
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What one window may hold."""

    tokens: int  # budget, in tokens and memory rows; one longer sequence runs alone
    requests: int | None = None  # None: any number
    divisible: bool = True  # False: a request is never split over windows


def plan_window(queue: deque[P], limits: Limits, dropped: Callable[[P], bool] = lambda _: False) -> list[Piece[P]]:
    """Take the next window off `queue`, oldest first; requests that are `dropped` leave it and take no room.

    A request within the budget is never split: it waits at the head for a window with room. A larger one is cut to the
    room that is left (position-wise: anywhere; sequences: between sequences) and what remains goes to the *end* of the
    queue, so that small requests wait for one window of it and not for all. A sequence is never cut: one longer than
    the budget has a window of its own.
    """
    pieces: list[Piece[P]] = []
    room = limits.tokens
    left = limits.requests if limits.requests is not None else len(queue)
    for _ in range(len(queue)):
        if left == 0 or room <= 0:
            break
        request = queue[0]
        if dropped(request):
            queue.popleft()
            continue
        count, load = _fitting(request, room, limits, alone=not pieces)
        if count == 0:
            break
        queue.popleft()
        piece = Piece(request, request.taken, request.taken + count)
        request.taken = piece.stop
        if piece.stop < request.rows:
            queue.append(request)
        pieces.append(piece)
        room -= load
        left -= 1
    return pieces


def piece_load(request: Pending, start: int, stop: int) -> int:
    """What rows `start:stop` of `request` take of a window's budget; with `load_ends`, they lie on sequence borders."""
    if request.ends is None or request.load_ends is None:
        return stop - start
    first, last = np.searchsorted(request.ends, (start, stop), side="right")
    before = int(request.load_ends[first - 1]) if first else 0
    return int(request.load_ends[last - 1]) - before if last > first else 0


def _fitting(request: Pending, room: int, limits: Limits, *, alone: bool) -> tuple[int, int]:
    """Rows of `request` for a window with `room` left, and what they take of it; `alone`: the window is still empty."""
    if request.ends is None or request.load_ends is None:
        count = _fitting_rows(request, room, limits, alone=alone)
        return count, count
    first = int(np.searchsorted(request.ends, request.taken, side="right"))
    before = int(request.load_ends[first - 1]) if first else 0
    rest = int(request.load_ends[-1]) - before
    if rest <= room or (alone and not limits.divisible):
        return request.rows - request.taken, rest
    if not limits.divisible or (request.taken == 0 and rest <= limits.tokens):
        return 0, 0
    stop = int(np.searchsorted(request.load_ends, before + room, side="right"))
    if stop == first:
        if not alone:
            return 0, 0
        stop += 1
    return int(request.ends[stop - 1]) - request.taken, int(request.load_ends[stop - 1]) - before


def _fitting_rows(request: Pending, room: int, limits: Limits, *, alone: bool) -> int:
    rest = request.rows - request.taken
    if rest <= room or (alone and not limits.divisible):
        return rest
    if not limits.divisible or (request.taken == 0 and rest <= limits.tokens):
        return 0
    if request.ends is None:
        return room
    whole = int(np.searchsorted(request.ends, request.taken + room, side="right"))
    first = int(np.searchsorted(request.ends, request.taken, side="right"))
    if whole > first:
        return int(request.ends[whole - 1]) - request.taken
    return int(request.ends[first]) - request.taken if alone else 0


def piece_seq_lens(ends: Int64, start: int, stop: int) -> Int64:
    """Lengths of the sequences within rows `start:stop`, which lie on sequence borders."""
    inside = ends[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop, side="right")]
    return np.diff(inside, prepend=start)


def pack(parts: list[Float32], slab: Float32) -> Float32:
    """Copy `parts` (rows, d) one after another into `slab` (capacity, d): the one copy of the tokens on their way in.

    Returns the filled rows of `slab`, or of a new array where the window is larger than its capacity.
    """
    rows = sum(len(part) for part in parts)
    if rows > len(slab):
        slab = np.empty((rows, slab.shape[1]), np.float32)
    window = slab[:rows]
    at = 0
    for part in parts:
        window[at : at + len(part)] = part
        at += len(part)
    return window


def split(out: Float32, counts: list[int]) -> list[Float32]:
    """Rows of `out` (rows, d_out) for each piece.

    A piece of less than a quarter of the window is a copy, a larger one a view: a client that reads slowly then keeps
    at most four times its own answer in memory, not the whole window's.

    Raises:
        ValueError: `counts` do not add up to the rows of `out`; nobody is given somebody else's rows.
    """
    if sum(counts) != len(out):
        raise ValueError(f"the engine returned {len(out)} rows for a window of {sum(counts)}")
    edges = np.cumsum([0, *counts]).tolist()
    pieces = [out[start:stop] for start, stop in pairwise(edges)]
    return [piece.copy() if 4 * len(piece) < len(out) else piece for piece in pieces]


def drop_padding(tokens: Float32, seq_lens: Int64) -> Float32:
    """(batch, seq, d) right-padded -> (sum of seq_lens, d) packed."""
    batch, seq, width = tokens.shape
    if not batch:  # then `seq` is bounded by no data
        return np.empty((0, width), np.float32)
    return tokens[_real(seq, seq_lens)]


def restore_padding(out: Float32, seq_lens: Int64, seq: int) -> Float32:
    """(sum of seq_lens, d) packed -> (batch, seq, d) with zeros for the padding."""
    padded = np.zeros((len(seq_lens), seq, out.shape[1]), np.float32)
    if len(seq_lens):
        padded[_real(seq, seq_lens)] = out
    return padded


def _real(seq: int, seq_lens: Int64) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = np.arange(seq) < seq_lens[:, None]
    return mask
