"""A window that failed is run again in halves, until who failed it stands alone. Pure.

Of n requests, one of which is to blame, every other one is answered after at most 2 x ceil(log2(n)) further windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final, Generic, TypeVar

from service.packing import Piece

P = TypeVar("P")

LEAST_S: Final = 1.0
WINDOWS: Final = 2.0  # each level of halves takes about what the whole took; twice that is patience enough


@dataclass(frozen=True, slots=True)
class Retry(Generic[P]):
    """Pieces that are run again together, unless `until` has passed."""

    pieces: list[Piece[P]]
    until: float


def patience_s(pieces: int, window_s: float) -> float:
    """How long, after a window of `pieces` that took `window_s` failed, its parts are run again."""
    return max(LEAST_S, WINDOWS * window_s * (1 + ceil(log2(max(pieces, 1)))))


def halves(pieces: list[Piece[P]], until: float) -> list[Retry[P]]:
    """`pieces`, at least two, in two windows, in order."""
    middle = len(pieces) // 2
    return [Retry(pieces[:middle], until), Retry(pieces[middle:], until)]
