"""uvicorn, with signals of our own: drain on the first and exit 0, stop at once on the second.

Stock uvicorn closes its listener at SIGTERM, cuts idle keep-alive connections and re-raises the signal (exit -15);
behind a load balancer that loses requests.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn

from service.app import App
from service.bounded_http import ConnectionLimits
from service.errors import DescriptorsError
from service.handshakes import TlsLimits, TlsLoop
from service.http import HttpProtocol, http_protocol
from service.lifecycle import Lifecycle
from service.replicas import AT_ONCE
from service.settings import Settings
from service.tls import tls_options
from service.turned_away import LINGERING

log = logging.getLogger("tokenslab.server")

# Between closing the listener and closing idle connections: bytes in flight on a local network arrive well within it.
LINGER_S = 0.25

# Beside connections: those being turned away, the listener, the event loop's own, logs, the pipes of the JSON process,
# and model files while they are read.
SPARE_DESCRIPTORS = LINGERING + 64

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """On a signal: ready says 503 at once, requests are served for `drain_delay_s` more, then what was accepted is."""

    def __init__(self, app: App, settings: Settings, lifeline: int | None = None) -> None:
        """`lifeline` is a pipe whose end is as good as SIGTERM: the supervisor of this replica has gone."""
        allow_descriptors(settings.max_connections + SPARE_DESCRIPTORS)
        super().__init__(server_config(app, settings))
        app.metrics.connections.set_function(lambda: len(self.server_state.connections))
        self._lifecycle: Lifecycle = app.lifecycle
        self._drain_delay_s = settings.drain_delay_s
        self._tls_limits = TlsLimits(
            settings.max_connections + LINGERING, settings.head_timeout_s, settings.write_timeout_s
        )
        self._reload_keys = app.gate.reload
        self._lifeline = lifeline
        self.stopped_by: signal.Signals | None = None  # set by a second signal

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends it."""
        with asyncio.Runner(loop_factory=lambda: TlsLoop(self._tls_limits)) as runner:
            runner.run(self.serve(sockets))

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Own the signals while serving; nothing is re-raised afterwards."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload_keys)
        if self._lifeline is not None:
            loop.add_reader(self._lifeline, self._orphaned)
            loop.add_signal_handler(AT_ONCE, self._stop_at_once, AT_ONCE)
        try:
            yield
        finally:
            if self._lifeline is not None:
                loop.remove_reader(self._lifeline)
                loop.remove_signal_handler(AT_ONCE)
            for number in (*SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, then read what clients had sent before they could know; then close what is idle."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)

    async def _wait_tasks_to_complete(self) -> None:
        """Requests on the direct way have no task that the end of the drain limit, or a second signal, could cancel."""
        try:
            await super()._wait_tasks_to_complete()
        finally:
            for connection in list(self.server_state.connections):
                if isinstance(connection, HttpProtocol):
                    connection.stop()

    def _orphaned(self) -> None:
        if self._lifeline is not None:
            asyncio.get_running_loop().remove_reader(self._lifeline)
        if not self._lifecycle.draining:
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._lifecycle.draining:
            if self._lifeline is None:
                self._stop_at_once(number)
            return
        self._lifecycle.draining = True
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.wind_down()
        log.info("%s: not ready any more; serving for %.1f s, then draining", number.name, self._drain_delay_s)
        asyncio.get_running_loop().call_later(self._drain_delay_s, self._close)

    def _stop_at_once(self, number: signal.Signals) -> None:
        log.warning("%s%s: stopping at once", number.name, " again" if self._lifecycle.draining else "")
        self._lifecycle.draining = True
        self.stopped_by = number
        self.should_exit = self.force_exit = True

    def _close(self) -> None:
        self.should_exit = True


def allow_descriptors(count: int) -> None:
    """Let this process open `count` files, which a connection is one of.

    Raises:
        DescriptorsError: the system's hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise DescriptorsError(
            f"max_connections needs {count} file descriptors, this process may open {hard} (ulimit -Hn): lower the "
            "setting or raise the limit"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def server_config(app: App, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration: its C event loop and parser, no access log, no websockets."""
    limits = ConnectionLimits(settings.max_connections, settings.max_head_kib << 10, settings.head_timeout_s)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=http_protocol(
            limits,
            app.direct,
            refused=lambda reason: app.metrics.rejections.labels(reason).inc(),
            stopping=lambda: app.lifecycle.draining,
            unheard=app.metrics.unheard.inc,
        ),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=True,
        proxy_headers=False,  # nothing here asks who the client is, and it costs 5 to 12 us a request
        backlog=4096,
        **tls_options(settings),
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.drain_limit_s,  # type: ignore[arg-type]  # awaited as a float
    )
