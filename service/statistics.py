"""What the protocol's statistics extension counts of each model. Plain numbers, raised once a window; no wire here.

As in Triton, the stages count requests: each has the whole time of the windows it ran in. `batches` counts windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time_ns
from typing import NamedTuple


@dataclass(slots=True)
class Duration:
    """How often, and how long together."""

    count: int = 0
    ns: int = 0

    def add(self, count: int, seconds: float) -> None:
        """`count` more, which took `seconds` in all."""
        self.count += count
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class BatchStatistics:
    """Windows of one size class."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


class Served(NamedTuple):
    """Requests that were answered with a result: how many, their tokens, and their seconds in each stage and in all."""

    requests: int
    tokens: int
    queue_s: float
    input_s: float
    infer_s: float
    total_s: float


@dataclass(slots=True)
class ModelStatistics:
    """One version of one model."""

    last_inference_ms: int = 0  # Unix time
    tokens: int = 0  # answered with a result
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)  # tokens, rounded up to a power of two

    @property
    def windows(self) -> int:
        """How many ran."""
        return sum(batch.compute_infer.count for batch in self.batches.values())

    def count_window(self, tokens: int, input_s: float, infer_s: float, output_s: float) -> None:
        """A window of `tokens` ran: seconds to pack it, to run it, and to give its rows out."""
        size = size_class(tokens)
        batch = self.batches.get(size)
        if batch is None:
            batch = self.batches[size] = BatchStatistics()
        batch.compute_input.add(1, input_s)
        batch.compute_infer.add(1, infer_s)
        batch.compute_output.add(1, output_s)

    def count_served(self, served: Served, output_s: float) -> None:
        """Requests that one window completed; giving them their rows took `output_s`."""
        count = served.requests
        if not count:
            return
        self.last_inference_ms = time_ns() // 1_000_000
        self.tokens += served.tokens
        self.queue.add(count, served.queue_s)
        self.compute_input.add(count, served.input_s)
        self.compute_infer.add(count, served.infer_s)
        self.compute_output.add(count, count * output_s)
        self.success.add(count, served.total_s)

    def count_failed(self, total_s: float) -> None:
        """A request that was accepted, and got an error or left."""
        self.fail.add(1, total_s)


def size_class(tokens: int) -> int:
    """`tokens`, at least 1, rounded up to a power of two: the sizes that are told apart stay few."""
    return 1 << (tokens - 1).bit_length()
