"""The cost of the wire: a request of one token to a model that computes next to nothing, against a bare uvicorn
application that echoes the same body, in turn within one run.

Rates depend on who else uses the machine; the server's own CPU time per request hardly does, so both are given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.bodies import infer_body, random_tokens
from bench.bundles import THIN, ensure
from bench.load import Generator
from bench.matrix import Progress
from bench.process import Process, free_port
from bench.server import Server
from bench.timing import Load, Spread

CONNECTIONS: Final = 64
BODIES: Final = 8
WARM_UP_S: Final = 1
RATE_BAR: Final = 0.6


@dataclass(frozen=True, slots=True)
class Sample:
    """One server in one round: requests/s, and its CPU time in microseconds per request."""

    server: str
    round: int
    load: Load
    cpu_us: float


@dataclass(frozen=True, slots=True)
class WireCost:
    """All rounds of both."""

    samples: Sequence[Sample]

    @property
    def rate_ratio(self) -> Spread:
        """Requests/s of the service over those of the echo, round by round."""
        ours, echo = self._of("tokenslab"), self._of("echo")
        return Spread.of([a.load.requests_per_s / b.load.requests_per_s for a, b in zip(ours, echo, strict=True)])

    @property
    def errors(self) -> int:
        """Rounds in which a request was not answered with a result."""
        return sum(bool(sample.load.errors) for sample in self.samples)

    def cpu_us(self, server: str) -> Spread:
        """CPU time per request of `server`, microseconds."""
        return Spread.of([sample.cpu_us for sample in self._of(server)])

    def rate(self, server: str) -> Spread:
        """Requests/s of `server`."""
        return Spread.of([sample.load.requests_per_s for sample in self._of(server)])

    def _of(self, server: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.server == server]


def measure_wire(
    models: Path, generator: Generator, rounds: int, seconds: int, logs: Path, progress: Progress
) -> WireCost:
    """Both servers in turn, `rounds` times, under closed-loop load of `CONNECTIONS` connections."""
    bundle = ensure(THIN, models)
    bodies = [infer_body(random_tokens(1, bundle.manifest.d_in, seed=i)) for i in range(BODIES)]
    samples: list[Sample] = []
    with ExitStack() as stack:
        service = stack.enter_context(Server(models, 1, logs / "tokenslab.log"))
        port = free_port()
        command = [sys.executable, "-m", "uvicorn", "bench.echo:app", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--no-access-log", "--log-level", "warning", "--lifespan", "off"]
        echo = stack.enter_context(Process(command, port, "/", logs / "echo.log"))
        urls = {"tokenslab": (service, service.infer_url(bundle.model("fp32"))), "echo": (echo, f"{echo.url}/")}
        for no in range(rounds):
            for name, (process, url) in urls.items():
                progress(f"round {no + 1} of {rounds}: {name}")
                generator.run(url, bodies, CONNECTIONS, WARM_UP_S, seed=1000 + no)
                before = process.cpu_s()
                load = generator.run(url, bodies, CONNECTIONS, seconds, seed=no)
                samples.append(Sample(name, no, load, (process.cpu_s() - before) / max(1, load.requests) * 1e6))
    return WireCost(samples)
