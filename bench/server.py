"""`tokenslab serve` as a subprocess: started on a free port, held still while it is idle, and never left behind."""

from __future__ import annotations

import atexit
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

START_S = 120.0
IDLE_S = 10.0
STOP_S = 20.0


class ServerError(Exception):
    """The server did not start, did not come to rest, or died."""


class Server:
    """One server with the models under `models`, on `threads` threads; `log` receives what it prints.

    Use it as a context manager. It is stopped by its own pid: SIGTERM, and SIGKILL after a bounded wait.
    """

    def __init__(self, models: Path, threads: int, log: Path, *options: str) -> None:
        self.port = free_port()
        self._log = log
        self._command = [sys.executable, "-m", "tokenslab", "serve", "--models", str(models)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--threads", str(threads)]
        self._command += ["--drain-delay", "0", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # The environment's settings would make a figure that its report does not explain.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSLAB_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        atexit.register(self.stop)
        try:
            self._wait_until_ready(START_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def infer_url(self, model: str) -> str:
        """Where `model` answers infer requests."""
        return f"http://127.0.0.1:{self.port}/v2/models/{model}/infer"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is used outside its context"
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system CPU time of the process so far, seconds."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def counts(self) -> defaultdict[str, float]:
        """The samples of /metrics that have no label but `model`, summed over the models, by name; 0 until counted."""
        status, text = self._get("/metrics")
        if status != 200:
            raise ServerError(f"/metrics answered {status}")
        sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if set(sample.labels) <= {"model"}:
                    sums[sample.name] += sample.value
        return sums

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """The process stopped (SIGSTOP) within, so that nothing of it competes; it must be idle, and is checked to be.

        Raises:
            ServerError: requests are still in its queue after a bounded wait.
        """
        until = time.monotonic() + IDLE_S
        while self.counts()["tokenslab_queue_tokens"] > 0:
            if time.monotonic() > until:
                raise ServerError(f"the server still has requests in its queue after {IDLE_S:g} s")
            time.sleep(0.02)
        os.kill(self.pid, signal.SIGSTOP)
        try:
            # The signal is only sent: wait until it has taken effect, and leave an exit for `stop` to collect.
            seen = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if seen is None or seen.si_code != os.CLD_STOPPED:
                raise ServerError(f"the server ended: {self._log_end()}")
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the process; more than once is harmless."""
        atexit.unregister(self.stop)
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait_until_ready(self, seconds: float) -> None:
        assert self._process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise ServerError(f"the server exited {self._process.returncode}: {self._log_end()}")
            try:
                if self._get("/v2/health/ready")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            time.sleep(0.05)
        raise ServerError(f"the server was not ready within {seconds:g} s: {self._log_end()}")

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
