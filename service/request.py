"""A request as the batcher sees it, from admission to answer. Data only: what happens to it is the batcher's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from service.memory import Memory
from service.packing import Float32, Int64, Limits


class Client(Protocol):
    """Whoever waits for the answer."""

    disconnected: bool


class ClientGone(Exception):
    """The client left before its tokens were packed: there is nobody to answer."""


class ServedModel(Protocol):
    """A model, as far as the batcher cares."""

    @property
    def label(self) -> str: ...
    @property
    def slab(self) -> Float32: ...
    @property
    def limits(self) -> Limits: ...

    @property
    def memory_slab(self) -> Float32 | None: ...

    def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where admission stops; tokens and seconds."""

    queue_tokens: int
    sequence_tokens: int
    timeout_s: float
    max_wait_s: float = 0.0


@dataclass(slots=True)
class Answer:
    """`out` (rows, d_out) and where the time went; `window_tokens` is the size of the (last) window it ran in."""

    out: Float32
    queue_s: float
    compute_s: float
    window_tokens: int


Outcome = Answer | Exception


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request on its way through one or more windows."""

    lane: Lane
    tokens: Float32  # (rows, d_in)
    rows: int
    ends: Int64 | None
    client: Client
    done: Callable[[Outcome], None] | None  # takes what became of it; None once something did
    arrived: float
    deadline: float
    queued: float  # when it joined the queue; anew when the rest of a cut request goes to its end
    taken: int = 0
    answered: int = 0
    memory: Memory | None = None  # of each sequence
    load: int = 0  # of the queue and of windows: tokens and memory rows
    load_ends: Int64 | None = None
    out: Float32 | None = None  # assembled here when the request was cut
    queue_s: float = -1.0
    compute_s: float = 0.0


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting requests of one model."""

    model: ServedModel
    queue: deque[Request] = field(default_factory=deque)
    tokens: int = 0  # not yet given to a window; memory rows count too
    open: int = 0  # requests accepted and not yet settled
    drained: asyncio.Future[None] | None = None  # for whoever waits until there are none
    token_s: float = 0.0  # compute time for each of `tokens` in the last window
