"""What is measured: the cases, their bars, and the lengths of the skewed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.bodies import Int64


@dataclass(frozen=True, slots=True)
class Case:
    """`connections` connections, each with one request of `tokens` tokens at a time.

    Where every connection's request shares a window, it has tokens x connections rows: the window size at which the
    in-process limit is taken. `bar` is the least share of that limit that passes.
    """

    name: str
    tokens: int
    connections: int
    windows: bool = True  # False: the server runs one request at a time
    bar: float | None = None
    lengths: tuple[int, ...] = ()  # mixed: each request has one of these, at random; `tokens` is the longest

    @property
    def mixed(self) -> tuple[int, ...]:
        """The lengths of the requests, each as likely as the others."""
        return self.lengths or (self.tokens,)

    @property
    def window_rows(self) -> int:
        return sum(self.mixed) * self.connections // len(self.mixed)

    @property
    def label(self) -> str:
        tokens = f"{min(self.mixed)}..{max(self.mixed)}" if self.lengths else str(self.tokens)
        return f"{tokens} x {self.connections}" + ("" if self.windows else ", windows off")


MIXED: Final = Case("mixed", 128, 32, lengths=(1, 2, 4, 8, 16, 32, 64, 128))
CASES: Final = (
    Case("1x64", 1, 64),
    Case("16x32", 16, 32, bar=0.75),
    Case("16x32-off", 16, 32, windows=False),
    MIXED,
    Case("128x8", 128, 8),
)
SKEWED: Final = "skewed"
SKEWED_BAR: Final = 10.0
SKEWED_LONGEST: Final = 256

CASE_NAMES: Final = (*(case.name for case in CASES), SKEWED)


def skewed_lengths(seed: int) -> Int64:
    """64 sequences of 1 to 15 tokens and one of 256, in a random order."""
    rng = np.random.default_rng(seed)
    lengths = np.append(rng.integers(1, 16, 64), SKEWED_LONGEST).astype(np.int64)
    rng.shuffle(lengths)
    return lengths
