"""`tokenslab serve` as a subprocess: what it counts, and whether it is idle."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.process import Process, ServerError, free_port

IDLE_S = 10.0


class Server(Process):
    """One server with the models under `models`, on `threads` threads, which its `replicas` share; `log` receives what
    it prints.
    """

    def __init__(self, models: Path, threads: int, log: Path, *options: str, replicas: int = 1) -> None:
        if replicas > 1:
            options = (*options, "--replicas", str(replicas))
        command, port = serve_command(
            models,
            max(1, threads // replicas),
            "--drain-delay",
            "0",
            *options,
            following=replicas if replicas > 1 else 0,
        )
        super().__init__(command, port, "/v2/health/ready", log)
        if replicas > 1:
            self._ports = range(port + 1, port + 1 + replicas)  # where each is alone

    def infer_url(self, model: str) -> str:
        """Where `model` answers infer requests."""
        return f"{self.url}/v2/models/{model}/infer"

    def counts(self) -> defaultdict[str, float]:
        """The samples of /metrics that have no label but `model`, summed over models and replicas, by name; 0 until
        counted.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        for port in self._ports:
            status, text = self._get("/metrics", port)
            if status != 200:
                raise ServerError(f"/metrics answered {status}")
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if set(sample.labels) <= {"model"}:
                        sums[sample.name] += sample.value
        return sums

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """The process stopped within; it is checked to be idle.

        Raises:
            ServerError: requests are still in its queue after a bounded wait, or it is gone.
        """
        until = time.monotonic() + IDLE_S
        while self.counts()["tokenslab_queue_tokens"] > 0:
            if time.monotonic() > until:
                raise ServerError(f"the server still has requests in its queue after {IDLE_S:g} s")
            time.sleep(0.02)
        with super().held():
            yield


def serve_command(models: Path, threads: int, *options: str, following: int = 0) -> tuple[list[str], int]:
    """`tokenslab serve` on a free port of loopback, and that port; as many after it are free as replicas need."""
    port = free_port(following)
    command = [sys.executable, "-m", "tokenslab", "serve", "--models", str(models)]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--threads", str(threads), *options], port
