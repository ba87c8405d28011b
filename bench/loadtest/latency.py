"""Latency of the service at shares of what it can do: the closed loop's maximum, then an open loop (Poisson) at shares
of it, and a single client, with the same graph in-process beside it. All in one run, since rates depend on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.bodies import random_tokens
from bench.bundles import FFN, ensure
from bench.limit import WARM_RUNS, InProcess
from bench.loadtest.arrivals import arrivals
from bench.loadtest.ideal import Ideal, WindowCost, ideal_latency
from bench.loadtest.stage import Measured, Stage, run_stage
from bench.loadtest.target import Target, discover
from bench.machine import UsageMeter
from bench.matrix import Progress
from bench.server import Server
from bench.timing import Spread
from service.manifest import Precision

SHARES: Final = (0.5, 0.7, 0.9)
BARRED_SHARE: Final = 0.7
P99_BAR: Final = 4.0  # times the median compute time of a window, at BARRED_SHARE
LIGHT_RUNS: Final = 1.3  # the light load's p50 is at most so many in-process runs
LIGHT_MS: Final = 1.0  # and so much
LIMIT_S: Final = 1.0
WARM_UP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests of `tokens` tokens; the closed loop has `connections`, the open loop as many as it needs."""

    models: Path
    precision: Precision
    tokens: int
    connections: int
    rounds: int
    seconds: float
    threads: int
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Round:
    """One round: `open_loop` and `ideal` in the order of SHARES; `foreign` are the cores that others used, at worst."""

    run_ms: float  # the median in-process run of one request, before and after the single client
    light: Measured
    closed: Measured
    open_loop: tuple[Measured, ...]
    foreign: float
    ideal: tuple[Ideal, ...]  # what no server would get below, at the same rates


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure over the rounds, and the bar that its median must not pass."""

    name: str
    figure: Spread
    bar: float

    @property
    def passes(self) -> bool:
        return self.figure.median <= self.bar


def measure_latency(plan: Plan, logs: Path, progress: Progress) -> list[Round]:
    """`plan.rounds` rounds against one server.

    Raises:
        ExportFailed, ServerError, TargetError: there is nothing to measure.
    """
    bundle = ensure(FFN, plan.models)
    limit = InProcess(bundle.folder, bundle.manifest, plan.precision, plan.threads)
    with Server(plan.models, plan.threads, logs / "tokenslab.log") as server:
        target = discover(server.url, bundle.model(plan.precision))
        rounds = []
        for no in range(plan.rounds):
            progress(f"round {no + 1} of {plan.rounds}")
            rounds.append(_round(plan, server, target, limit, no))
    return rounds


def _round(plan: Plan, server: Server, target: Target, limit: InProcess, no: int) -> Round:
    sizes = np.array([plan.tokens], np.int64)
    end = WARM_UP_S + plan.seconds
    foreign = []

    def stage(stage: Stage) -> Measured:
        meter = UsageMeter(server.cpu_s)
        measured = run_stage(target, stage)
        foreign.append(meter.read().foreign)
        return measured

    before = _run_ms(server, limit, plan.tokens)
    light = stage(Stage(sizes, 1, end, WARM_UP_S, seed=no))
    after = _run_ms(server, limit, plan.tokens)
    closed = stage(Stage(sizes, plan.connections, end, WARM_UP_S, processes=plan.processes, seed=no))
    open_loop = []
    for share in SHARES:
        times = arrivals("poisson", share * closed.summary.requests_per_s, end, seed=no)
        tokens = np.full(len(times), plan.tokens, np.int64)
        # Connections of its own for each of a burst: what waits for one would not be the server's doing.
        connections = 8 * plan.connections
        open_loop.append(stage(Stage(tokens, connections, end, WARM_UP_S, times, plan.processes, seed=no)))
    cost = _window_cost(server, limit, plan)
    rates = [share * closed.summary.requests_per_s for share in SHARES]
    ideal = tuple(ideal_latency(cost, rate, seed=no) for rate in rates)
    return Round((before + after) / 2, light, closed, tuple(open_loop), max(foreign), ideal)


def _window_cost(server: Server, limit: InProcess, plan: Plan) -> WindowCost:
    """Windows of 1, 2, 4 ... requests, up to as many as the closed loop has connections."""
    most = max(2, plan.connections)
    counts = [*(1 << power for power in range((most - 1).bit_length())), most]
    return WindowCost(counts, [_run_ms(server, limit, count * plan.tokens, LIMIT_S / 2) / 1e3 for count in counts])


def _run_ms(server: Server, limit: InProcess, tokens: int, seconds: float = LIMIT_S) -> float:
    """The median of single runs for `seconds`, the server held still."""
    rows, runs = random_tokens(tokens, limit.d_in, seed=tokens), []
    with server.held():
        for _ in range(WARM_RUNS):
            limit.run(rows)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            limit.run(rows)
            runs.append(time.perf_counter() - began)
    return statistics.median(runs) * 1e3


def verdicts(rounds: Sequence[Round]) -> list[Verdict]:
    """The two bars, as ratios round by round.

    Raises:
        ValueError: a stage was not answered, so there is no figure.
    """
    barred = SHARES.index(BARRED_SHARE)
    tails, lights = [], []
    for each in rounds:
        tail, light = each.open_loop[barred].summary, each.light.summary
        if tail.latency is None or tail.windows is None or light.latency is None:
            raise ValueError(f"a stage was not answered: {tail.errors or light.errors}")
        tails.append(tail.latency.p99 / tail.windows.compute_ms)
        lights.append(light.latency.p50 / (LIGHT_RUNS * each.run_ms + LIGHT_MS))
    return [
        Verdict(f"p99 at {BARRED_SHARE:.0%} of the maximum / median compute of a window", Spread.of(tails), P99_BAR),
        Verdict(f"one client's p50 / ({LIGHT_RUNS:g} in-process runs + {LIGHT_MS:g} ms)", Spread.of(lights), 1.0),
    ]


def ideal_tail(rounds: Sequence[Round]) -> Spread:
    """The first bar's figure for an ideal server, round by round: what the bar would ask of it."""
    barred = SHARES.index(BARRED_SHARE)
    return Spread.of([each.ideal[barred].p99 / each.ideal[barred].compute for each in rounds])


def stages(each: Round) -> list[tuple[str, Measured]]:
    """A round's stages with their names, in order."""
    names = [f"open loop, {share:.0%}" for share in SHARES]
    return [("one client", each.light), ("closed loop", each.closed), *zip(names, each.open_loop, strict=True)]


def errors(rounds: Sequence[Round]) -> int:
    """Stages in which a request was not answered with a result."""
    return sum(bool(stage.summary.errors) for each in rounds for _, stage in stages(each))
