"""Packing as pure functions: pieces of requests into one window's arrays, and back.

Owns no clock, loop, socket or session. Rows are tokens; the width does not matter here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


P = TypeVar("P")


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
    sequence_tokens: int | None = None  # longest sequence that the model itself can take; None: any


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
    """Rows of `out` (rows, d_out) for each piece: views of it; see `kept`.

    Raises:
        ValueError: `counts` do not add up to the rows of `out`; nobody is given somebody else's rows.
    """
    if sum(counts) != len(out):
        raise ValueError(f"the engine returned {len(out)} rows for a window of {sum(counts)}")
    return [out[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]


def kept(piece: Float32) -> Float32:
    """`piece`, or a copy if it is less than a quarter of the window that it is a view of.

    For whoever keeps it: a client that reads slowly then holds at most four times its own answer in memory, and not
    the whole window's. What is written at once needs no such copy.
    """
    base = piece.base
    return piece.copy() if base is not None and 4 * piece.nbytes < base.nbytes else piece


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
