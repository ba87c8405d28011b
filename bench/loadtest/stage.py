"""One stage of load: a closed loop of so many connections or an open loop at a rate, over one or several processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.loadtest.arrivals import Times, share
from bench.loadtest.driver import Job, Part, drive
from bench.loadtest.records import Summary, joined, summarize
from bench.loadtest.saturation import saturation
from bench.loadtest.target import Target

START_S: Final = 60.0
TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Stage:
    """`arrivals` (seconds from the start) with the tokens of each, or None for a closed loop that chooses of `sizes`.

    The first `warm_up` of `seconds` is not counted.
    """

    sizes: NDArray[np.int64]
    connections: int
    seconds: float
    warm_up: float
    arrivals: Times | None = None
    processes: int = 1
    timeout_s: float = TIMEOUT_S
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a stage gave, and why not to trust it, if the client was the limit."""

    summary: Summary
    saturated: tuple[str, ...]
    cpu_share: float  # of the client, all its processes


def run_stage(target: Target, stage: Stage) -> Measured:
    """Send the load, wait for what is in flight (each request at most `timeout_s`), and sum up.

    Raises:
        ValueError: more processes than connections, or a stage that is all warm-up.
    """
    jobs = jobs_of(target, stage)
    parts = [drive(jobs[0])] if len(jobs) == 1 else _in_processes(jobs)
    summary = summarize(
        joined([part.records for part in parts]), stage.warm_up, stage.seconds, open_loop=stage.arrivals is not None
    )
    return Measured(summary, saturation(summary, parts), sum(part.cpu_share for part in parts))


def jobs_of(target: Target, stage: Stage) -> list[Job]:
    """Each process's part: connections as evenly as they go, arrivals in turn."""
    if not 1 <= stage.processes <= stage.connections:
        raise ValueError(f"{stage.processes} processes for {stage.connections} connections: each needs one")
    jobs = []
    for no in range(stage.processes):
        connections = len(range(no, stage.connections, stage.processes))
        mine = slice(None) if stage.arrivals is None else share(stage.arrivals, no, stage.processes)
        times = None if stage.arrivals is None else stage.arrivals[mine]
        jobs.append(
            Job(target, stage.sizes[mine], connections, stage.seconds, stage.timeout_s, stage.seed * 1000 + no, times)
        )
    return jobs


def _in_processes(jobs: list[Job]) -> list[Part]:
    # Spawned: a fork would copy this process's threads' locks (ONNX Runtime's among them) in whatever state they are.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(jobs), timeout=START_S)
    with ProcessPoolExecutor(len(jobs), context, initializer=_remember, initargs=(barrier,)) as pool:
        return list(pool.map(_drive_together, jobs))


_together: list[Barrier] = []  # of this process: a barrier is inherited, it cannot be sent with a job


def _remember(barrier: Barrier) -> None:
    _together.append(barrier)


def _drive_together(job: Job) -> Part:
    def wait_for_the_others() -> None:
        _together[0].wait()

    return drive(job, wait_for_the_others)
