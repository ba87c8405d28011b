"""A server as a subprocess with its children: started, held still while it is idle, and never left behind."""

from __future__ import annotations

import atexit
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

START_S = 120.0
HOLD_S = 10.0
STOP_S = 20.0


class ServerError(Exception):
    """The server did not start, did not come to rest, or died."""


class Process:
    """One server that listens on loopback's `port`, ready when `ready_path` answers below `ready_below`; `log` gets its
    output.

    Use it as a context manager. It is stopped by its own pids: SIGTERM, and SIGKILL after a bounded wait.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        ready_path: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        ready_below: int = 500,
    ) -> None:
        self.port = port
        self._ports: Sequence[int] = (port,)  # each must be ready before it counts as started
        self._command = list(command)
        self._ready_path = ready_path
        self._ready_below = ready_below
        self._log = log
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # The environment's settings would make a figure that its report does not explain.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSLAB_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**environment, **(self._environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is used outside its context"
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system CPU time of the process and its children so far, seconds."""
        return sum(_cpu_s(process) for process in self._tree())

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """All its processes stopped (SIGSTOP) within, so that nothing of it competes; it must be idle.

        Raises:
            ServerError: it is gone, or does not stop.
        """
        tree = self._tree()
        try:
            for process in tree:
                process.suspend()
            self._wait_until_stopped(tree)
            yield
        finally:
            for process in tree:
                if process.is_running():
                    process.resume()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        assert self._process is not None, "the server is used outside its context"
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """The exit code of a process that ends by itself.

        Raises:
            ServerError: it still runs after `seconds`.
        """
        assert self._process is not None, "the server is used outside its context"
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server still runs after {seconds:g} s: {self._log_end()}") from None

    def stop(self) -> None:
        """End the process and what it started; more than once is harmless."""
        atexit.unregister(self.stop)
        process = self._process
        if process is None or process.poll() is not None:
            return
        tree = self._tree()
        for each in tree:
            each.resume()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for each in psutil.wait_procs(tree, timeout=1.0)[1]:
            each.kill()

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            raise ServerError(f"the server ended: {self._log_end()}") from None

    def _wait_until_stopped(self, tree: list[psutil.Process]) -> None:
        """The signal is only sent: wait until it has taken effect."""
        until = time.monotonic() + HOLD_S
        for process in tree:
            try:
                while process.status() != psutil.STATUS_STOPPED:
                    if process.status() == psutil.STATUS_ZOMBIE and process.pid == self.pid:
                        raise ServerError(f"the server ended: {self._log_end()}")
                    if process.status() == psutil.STATUS_ZOMBIE:
                        break
                    if time.monotonic() > until:
                        raise ServerError(f"process {process.pid} of the server does not stop")
                    time.sleep(0.001)
            except psutil.NoSuchProcess:
                if process.pid == self.pid:
                    raise ServerError(f"the server ended: {self._log_end()}") from None

    def _wait_until_ready(self, seconds: float) -> None:
        assert self._process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise ServerError(f"the server exited {self._process.returncode}: {self._log_end()}")
            try:
                if all(self._get(self._ready_path, port)[0] < self._ready_below for port in self._ports):
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            time.sleep(0.05)
        raise ServerError(f"the server was not ready within {seconds:g} s: {self._log_end()}")

    def _get(self, path: str, port: int) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def free_port(following: int = 0) -> int:
    """A TCP port of the loopback interface that nobody listens on now, nor on the `following` ones after it."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for after in range(port + 1, port + 1 + following):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", after))
            except (OSError, OverflowError):  # taken, or beyond the last port
                continue
            return port
