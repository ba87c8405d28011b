"""The machine under the figures: what it is, and who else used it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = ("tokenslab", "onnxruntime", "numpy", "uvicorn", "uvloop", "httptools")


def describe_machine(threads: int) -> dict[str, str | int | float]:
    """Processor, cores, memory, system and the versions that matter, for a report."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, from Linux if it says, else from Python's platform module."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Usage:
    """Cores in use over an interval: 1.0 is one core all the time."""

    server: float
    load: float  # this process and its children
    foreign: float  # everybody else on the machine
    stolen: float  # taken by the hypervisor


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since some past moment, at the clock's reading `at`."""

    at: float
    busy: float  # of the whole machine, without what was stolen
    stolen: float
    load: float
    server: float

    def until(self, later: CpuTimes) -> Usage:
        """Usage from this reading to a later one."""
        seconds = later.at - self.at
        server, load = later.server - self.server, later.load - self.load
        # The kernel counts in ticks, each for itself: a difference may come out just below zero.
        foreign = max(0.0, later.busy - self.busy - server - load)
        return Usage(server / seconds, load / seconds, foreign / seconds, (later.stolen - self.stolen) / seconds)


class UsageMeter:
    """Measures `Usage` from its creation; `server_cpu_s` gives the server's CPU time so far, seconds."""

    def __init__(self, server_cpu_s: Callable[[], float]) -> None:
        self._server_cpu_s = server_cpu_s
        self._began = self._now()

    def read(self) -> Usage:
        """Usage since the meter was made. A child process counts once it has been waited for."""
        return self._began.until(self._now())

    def _now(self) -> CpuTimes:
        machine = psutil.cpu_times()
        # Where the system does not tell them apart, nothing was stolen or waited for.
        stolen, waited = getattr(machine, "steal", 0.0), getattr(machine, "iowait", 0.0)
        guest = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # counted within user and nice
        busy = sum(machine) - machine.idle - waited - stolen - guest
        own = os.times()
        load = own.user + own.system + own.children_user + own.children_system
        return CpuTimes(time.perf_counter(), busy, stolen, load, self._server_cpu_s())
