"""Several processes behind one port: each a whole service, with its own models, engine and share of the threads.

The supervisor binds the sockets, starts the replicas, starts again those that die, and passes signals on. It loads no
model and sees no request. The listening socket is one and shared: a connection that a replica had not accepted when it
died is another's, where with SO_REUSEPORT it would be lost. Each replica also listens on a port of its own, for its
metrics and for admins.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from service.errors import ListenError
from service.settings import Settings

log = logging.getLogger("tokenslab.replicas")

RESTART_S: Final = 1.0  # doubled with each death in a row, up to RESTART_MAX_S
RESTART_MAX_S: Final = 30.0
STEADY_S: Final = 60.0  # who lived so long has not died in a row
# Tells a replica to stop at once. It does not count SIGTERM as a lone service does: whoever stops a whole control
# group, as systemd does, sends it one beside the supervisor's.
AT_ONCE: Final = signal.SIGQUIT
STOPPED_WHILE_LOADING: Final = (128 + signal.SIGTERM, -signal.SIGTERM)
CANNOT_START: Final = (1, 2)  # `tokenslab serve` refuses the bundles, or the settings
BACKLOG: Final = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """What a replica is given by its supervisor: file descriptors of the shared and its own socket, and of a pipe that
    ends with the supervisor."""

    shared: int
    own: int
    lifeline: int

    def __str__(self) -> str:
        return f"{self.shared}:{self.own}:{self.lifeline}"

    @staticmethod
    def parse(text: str) -> Place:
        return Place(*map(int, text.split(":")))

    def sockets(self) -> list[socket.socket]:
        """Both, listening."""
        return [socket.socket(fileno=self.shared), socket.socket(fileno=self.own)]


class Supervisor:
    """Runs `command` with `--replica <place>` appended, `settings.replicas` times."""

    def __init__(self, settings: Settings, command: Sequence[str]) -> None:
        self._settings = settings
        self._command = command
        self._stopping = asyncio.Event()
        self._at_once = False
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._listeners: list[socket.socket] = []
        self._code = 0

    async def run(self) -> int:
        """Until a signal, or until a replica cannot start at all; returns the exit code.

        Raises:
            ListenError: a port cannot be had.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        shared = _listen(settings.host, settings.port)
        port: int = shared.getsockname()[1]
        owns = [_listen(settings.host, settings.port and port + 1 + i) for i in range(settings.replicas)]
        lifeline, mine = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._send, signal.SIGHUP)
        alone = ", ".join(str(own.getsockname()[1]) for own in owns)
        scheme = "http" if settings.ssl_certfile is None else "https"
        self._listeners = [shared, *owns]
        log.info("running on %s://%s:%d; each replica alone on port %s", scheme, settings.host, port, alone)
        places = [Place(shared.fileno(), own.fileno(), lifeline) for own in owns]
        await asyncio.gather(*(self._keep(index, place) for index, place in enumerate(places)))
        os.close(mine)
        return self._code

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self._at_once = True
            self._code = 128 + number
            self._send(AT_ONCE)
        else:
            self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        # A socket that is open here would take connections for nobody, once the replicas have closed theirs.
        for listener in self._listeners:
            listener.close()
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):  # it has just ended; the others are to hear of it all the same
                process.send_signal(number)

    async def _keep(self, index: int, place: Place) -> None:
        loop, deaths = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began = loop.time()
            process = await asyncio.create_subprocess_exec(
                *(*self._command, "--replica", str(place)),
                pass_fds=(place.shared, place.own, place.lifeline),
                start_new_session=True,  # a terminal's Ctrl-C is passed on once, and not twice
            )
            self._processes[index] = process
            if self._stopping.is_set():  # the signal came while it was being started
                self._send(AT_ONCE if self._at_once else signal.SIGTERM)
            code = await process.wait()
            del self._processes[index]
            if self._stopping.is_set():
                if code not in STOPPED_WHILE_LOADING:  # which costs nobody an answer
                    self._code = self._code or code
                return
            if code in CANNOT_START and not deaths and loop.time() - began < STEADY_S:
                self._code = code
                self._stop()
                return
            deaths = 1 if loop.time() - began > STEADY_S else deaths + 1
            delay = min(RESTART_S * 2 ** (deaths - 1), RESTART_MAX_S)
            log.error("replica %d ended with %d; starting it again in %g s", index, code, delay)
            try:
                await asyncio.wait_for(self._stopping.wait(), delay)
            except TimeoutError:
                continue


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as cause:
        raise ListenError(f"{host}:{port}: {cause.strerror}") from cause
    listener.setblocking(False)
    return listener


def supervise(settings: Settings) -> int:
    """Run this very command as `settings.replicas` replicas; returns the exit code."""
    command = [sys.executable, "-m", "tokenslab", *sys.argv[1:]]

    async def run() -> int:
        return await Supervisor(settings, command).run()

    return asyncio.run(run())
