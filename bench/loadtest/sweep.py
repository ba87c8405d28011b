"""Sweeps: levels of connections (closed loop) or of rates (open loop), or a replayed trace, in several rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from bench.limit import InProcess
from bench.loadtest.arrivals import ArrivalKind, arrivals
from bench.loadtest.sizes import Sizes, Trace
from bench.loadtest.stage import Measured, Stage, run_stage
from bench.loadtest.target import Target
from service.manifest import Precision, read_manifest

LoopKind = Literal["closed", "open", "replay"]
Step = Callable[[str], None]
SIZES_TO_CHOOSE_FROM: Final = 4096
LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Level:
    """`value` is connections (closed), requests/s (open) or the speed (replay)."""

    loop: LoopKind
    value: float

    @property
    def name(self) -> str:
        unit = {"closed": "connections", "open": "requests/s", "replay": "x the trace's speed"}[self.loop]
        return f"{self.loop}: {self.value:g} {unit}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One level, round by round."""

    level: Level
    rounds: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What all levels have in common; `connections` bounds the open loop."""

    sizes: Sizes
    seconds: float
    warm_up: float
    arrivals: ArrivalKind = "poisson"
    trace: Trace | None = None
    connections: int = 256
    processes: int = 1
    timeout_s: float = 10.0

    def stage(self, level: Level, seed: int) -> Stage:
        """The stage of one level and round."""
        end = self.warm_up + self.seconds
        if level.loop == "closed":
            connections, times = int(level.value), None
            sizes = self.sizes.draw(SIZES_TO_CHOOSE_FROM, seed)
            # With fewer connections than processes the others would have nothing to do.
            processes = min(self.processes, connections)
        else:
            connections, processes = self.connections, self.processes
            if self.trace is not None and level.loop == "replay":
                trace = self.trace.faster(level.value)
                times, sizes, end = trace.times, trace.tokens, float(trace.times[-1]) + self.seconds
            else:
                times = arrivals(self.arrivals, level.value, end, seed)
                sizes = self.sizes.draw(len(times), seed)
        warm_up = 0.0 if level.loop == "replay" else self.warm_up
        return Stage(sizes, connections, end, warm_up, times, processes, self.timeout_s, seed)


@dataclass(frozen=True, slots=True)
class Limit:
    """What the same graph does in this process: tokens/s of windows of `rows`, and the median run of a mean request."""

    rows: int
    tokens_per_s: float
    run_ms: float


def run_levels(target: Target, load: Load, levels: Sequence[Level], rounds: int, step: Step) -> list[Measurement]:
    """Every level in every round, in turn, so that a slow minute of the machine meets them all alike."""
    measured: list[list[Measured]] = [[] for _ in levels]
    for no in range(rounds):
        for place, level in enumerate(levels):
            step(f"round {no + 1} of {rounds}: {level.name}")
            measured[place].append(run_stage(target, load.stage(level, seed=no)))
    return [Measurement(level, tuple(each)) for level, each in zip(levels, measured, strict=True)]


def measure_limit(bundle: Path, precision: Precision, threads: int, rows: int, tokens: int) -> Limit:
    """The limit of the bundle in the folder `bundle`; the service under test must be idle.

    Raises:
        BundleError: the folder holds no sound bundle.
    """
    graph = InProcess(bundle, read_manifest(bundle), precision, threads)
    tokens_per_s = graph.tokens_per_s(rows, LIMIT_S)
    lone = [tokens / graph.tokens_per_s(tokens, LIMIT_S / 5) for _ in range(5)]
    return Limit(rows, tokens_per_s, statistics.median(lone) * 1e3)


def window_rows(load: Load, levels: Sequence[Level]) -> int:
    """The window that a perfect server would form: every connection of the largest closed loop, a mean request each."""
    connections = max((level.value for level in levels if level.loop == "closed"), default=1.0)
    return max(1, round(connections * load.sizes.mean))


def mean_tokens(load: Load) -> int:
    """Tokens of a mean request."""
    tokens = float(np.mean(load.trace.tokens)) if load.trace is not None else load.sizes.mean
    return max(1, round(tokens))
