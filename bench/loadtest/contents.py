"""What the requests of a stage carry, made before it begins as far as memory allows. Knows no connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.bodies import Body
from bench.loadtest.target import Target

BODY_CACHE_BYTES: Final = 128 << 20
BODIES_OF_A_SIZE: Final = 4


@dataclass(frozen=True, slots=True)
class Content:
    """A request's body, and its headers as libcurl takes them."""

    content: bytes
    headers: list[str]

    @classmethod
    def of(cls, body: Body) -> Content:
        """What is sent for `body`."""
        # libcurl would ask first whether the server wants the body.
        return cls(body.content, ["Expect:", *(f"{name}: {value}" for name, value in body.headers.items())])


class Contents:
    """Requests by size: a few of each are kept, up to BODY_CACHE_BYTES; the rest are made when they are sent."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._rng = np.random.default_rng(seed)
        self._kept: dict[int, list[Content]] = {}
        self._bytes = 0

    def prepare(self, sizes: NDArray[np.int64]) -> None:
        """Make those of `sizes`, in tokens, before the stage begins."""
        for tokens in np.unique(sizes).tolist():
            for _ in range(BODIES_OF_A_SIZE):
                if self._bytes < BODY_CACHE_BYTES:
                    body = self._made(tokens)
                    self._kept.setdefault(tokens, []).append(body)
                    self._bytes += len(body.content)

    def of(self, tokens: int, no: int) -> Content:
        """The request of `tokens` tokens that is sent as number `no`."""
        kept = self._kept.get(tokens)
        return kept[no % len(kept)] if kept else self._made(tokens)

    def _made(self, tokens: int) -> Content:
        return Content.of(self._target.body(tokens, self._rng))
