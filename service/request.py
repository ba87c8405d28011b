"""A request as the batcher sees it, from admission to answer. Data only: what happens to it is the batcher's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from service.memory import Memory
from service.packing import Float32, Int64, Limits
from service.statistics import ModelStatistics

if TYPE_CHECKING:
    from service.lane import Lane


class Client(Protocol):
    """Whoever waits for the answer."""

    disconnected: bool


class ClientGone(Exception):
    """The client left before its tokens were packed: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of a model, measured when it was loaded."""

    tokens: int
    squares: int  # sum of the squared lengths of its sequences; 0 for position-wise models
    seconds: float


class ServedModel(Protocol):
    """A model, as far as the batcher cares."""

    @property
    def label(self) -> str: ...
    @property
    def slab(self) -> Float32: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def statistics(self) -> ModelStatistics: ...
    @property
    def timings(self) -> tuple[Timing, ...]:
        """Of its warm-up; what the first predictions rest on."""

    @property
    def memory_slab(self) -> Float32 | None: ...

    def run(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None) -> Float32: ...
    def try_out(self) -> None:
        """Run an input that has worked before; raises as `run` does."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where admission stops, and what scheduling promises; tokens and seconds."""

    queue_tokens: int
    sequence_tokens: int
    timeout_s: float
    max_wait_s: float = 0.0
    level_tokens: tuple[int, ...] = ()  # of each priority level; () as many as the queue
    levels: int = 1
    default_level: int = 1
    aging: int = 16  # windows
    chunk_s: float = float("inf")
    hang_s: float = 60.0


@dataclass(slots=True)
class Answer:
    """`out` (rows, d_out), maybe a view of its window's rows, and where the time went; `window_tokens` is the size of
    the (last) window it ran in.
    """

    out: Float32
    queue_s: float
    compute_s: float
    window_tokens: int


Outcome = Answer | Exception


class Work(NamedTuple):
    """What a request asks of a window, and of attention; running sums over its sequences, None for position-wise."""

    load: int  # tokens and memory rows
    square: int  # of all sequences: length x length, and length x memory's
    ends: Int64 | None  # in rows
    load_ends: Int64 | None
    squares: Int64 | None
    longest: int  # sequence
    longest_memory: int

    @classmethod
    def of(cls, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None) -> Work:
        """`tokens` (rows, d_in) in sequences of `seq_lens`, and the memory of each."""
        if seq_lens is None:
            return cls(len(tokens), 0, None, None, None, 0, 0)
        ends, longest = np.cumsum(seq_lens), int(seq_lens.max())
        if memory is None:
            squares = np.cumsum(seq_lens * seq_lens)
            return cls(len(tokens), int(squares[-1]), ends, ends, squares, longest, 0)
        memory_lens = memory.seq_lens
        squares, load_ends = np.cumsum(seq_lens * (seq_lens + memory_lens)), ends + memory.ends
        return cls(int(load_ends[-1]), int(squares[-1]), ends, load_ends, squares, longest, int(memory_lens.max()))


@dataclass(slots=True, eq=False)
class Request:
    """One admitted request on its way through one or more windows."""

    lane: Lane
    tokens: Float32  # (rows, d_in)
    rows: int
    load: int  # of the queue and of windows: tokens and memory rows
    square: int  # of attention, all sequences together
    ends: Int64 | None
    load_ends: Int64 | None
    squares: Int64 | None  # of attention: for each sequence, its length by itself and by its memory's, summed up
    client: Client
    done: Callable[[Outcome], None] | None  # takes what became of it; None once something did
    arrived: float
    deadline: float
    level: int
    client_id: str
    isolate: bool
    large: bool
    memory: Memory | None = None  # of each sequence
    taken: int = 0
    answered: int = 0
    out: Float32 | None = None  # assembled here when the request was cut
    queue_s: float = -1.0
    input_s: float = 0.0
    compute_s: float = 0.0
