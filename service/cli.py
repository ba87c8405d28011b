"""`tokenslab serve`: settings from flags and environment, then the server."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from service.errors import TokenslabError
from service.listening import check_port
from service.logs import configure_logs
from service.replicas import AT_ONCE, Place, supervise
from service.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command to the console script."""
    app.command(epilog="Example: tokenslab serve --models models --port 8000")(serve)


def serve(
    models: Annotated[Path | None, typer.Option(help="Model repository (default: models)")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one (default: 8000)")] = None,
    provider: Annotated[str | None, typer.Option(help="cpu or cuda: exactly this, or no start (default: cpu)")] = None,
    versions: Annotated[str | None, typer.Option(help="latest, all, or 2,5 (default: latest)")] = None,
    poll_s: Annotated[float | None, typer.Option(help="Seconds between looks for new versions; 0: never")] = None,
    threads: Annotated[int | None, typer.Option(help="ONNX Runtime threads (default: the CPU quota)")] = None,
    replicas: Annotated[int | None, typer.Option(help="Processes behind the port (default: 1)")] = None,
    windows: Annotated[bool | None, typer.Option(help="Pack requests together, or one a run (default: pack)")] = None,
    max_window_tokens: Annotated[int | None, typer.Option(help="Token budget of a window")] = None,
    max_wait_ms: Annotated[float | None, typer.Option(help="How long a free engine waits for more")] = None,
    max_chunk_ms: Annotated[float | None, typer.Option(help="Compute of a large request per window")] = None,
    max_queue_tokens: Annotated[int | None, typer.Option(help="Tokens accepted and not yet answered")] = None,
    max_sequence_tokens: Annotated[int | None, typer.Option(help="Longest sequence through attention")] = None,
    max_body_mib: Annotated[float | None, typer.Option(help="Largest request body")] = None,
    max_bodies_mib: Annotated[float | None, typer.Option(help="All bodies in flight together")] = None,
    max_json_mib: Annotated[float | None, typer.Option(help="Largest JSON part, in or out")] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Deadline of a request, seconds")] = None,
    body_timeout_s: Annotated[
        float | None, typer.Option("--body-timeout", help="Longest silence in a body, seconds")
    ] = None,
    drain_delay_s: Annotated[
        float | None, typer.Option("--drain-delay", help="SIGTERM to closed listener, seconds")
    ] = None,
    drain_limit_s: Annotated[float | None, typer.Option("--drain-limit", help="Then, time to answer, seconds")] = None,
    max_memory_mib: Annotated[float | None, typer.Option(help="Weights and arenas of all models; 0: any")] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="Keys of clients, name:key a line")] = None,
    admin_keys_file: Annotated[Path | None, typer.Option(help="Keys of those who may load and unload")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate chain, PEM")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, PEM")] = None,
    console: Annotated[bool | None, typer.Option(help="The page at / (default: there)")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
    replica: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve every bundle of a model repository over HTTP.

    Settings are also environment variables: docs/settings.md lists them all, and what turning each up costs. On
    SIGTERM the service drains and exits 0; a second signal stops it at once.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
    given.pop("replica", None)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        secret = {"api_keys", "admin_keys", "ssl_keyfile_password", "otlp_endpoint"} & set(first["loc"])
        found = "" if secret or isinstance(first["input"], dict | Settings) else f" (got {first['input']!r})"
        typer.echo(f"tokenslab serve: {where}{first['msg'].removeprefix('Value error, ')}{found}", err=True)
        raise typer.Exit(2) from None
    configure_logs(settings.log_level, settings.log_format)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by default it ends a process; whoever loads reads the keys later
    if replica is not None:
        if "threads" not in settings.model_fields_set:
            settings = settings.model_copy(update={"threads": max(1, settings.threads // settings.replicas)})
        _run(settings, Place.parse(replica))
    elif settings.replicas > 1:
        try:
            code = supervise(settings)
        except TokenslabError as error:
            typer.echo(f"tokenslab serve: {error}", err=True)
            raise typer.Exit(1) from None
        raise typer.Exit(code)
    else:
        _run(settings, None)


def _run(settings: Settings, place: Place | None) -> None:
    # Nothing is lost while models load. An import may swallow a KeyboardInterrupt, and as a container's PID 1 a process
    # ignores SIGTERM unless it has a handler. The server brings its own later.
    for number in (signal.SIGTERM, signal.SIGINT, *(() if place is None else (AT_ONCE,))):
        signal.signal(number, _stop_loading)
    # Here and not above, so that `tokenslab --help` loads no ONNX Runtime.
    from service.app import create_app
    from service.auth import Gate
    from service.loading import load_repository
    from service.server import Server
    from service.tls import tls_options

    try:
        # Both are read again when they are used; what is wrong with them is not to be learnt after minutes of loading.
        Gate(settings)
        tls_options(settings)
        if place is None:
            check_port(settings.host, settings.port)
        app = create_app(settings, load_repository(settings))
    except TokenslabError as error:
        typer.echo(f"tokenslab serve: {error}", err=True)
        raise typer.Exit(1) from None
    # What is loaded now stays: collections need not walk it again, and come seldom (1 to 4 us a request, measured).
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    try:
        server = Server(app, settings, None if place is None else place.lifeline)
    except TokenslabError as error:
        typer.echo(f"tokenslab serve: {error}", err=True)
        raise typer.Exit(1) from None
    server.run(None if place is None else place.sockets())
    if server.stopped_by is not None:
        leave(128 + server.stopped_by)
    leave(0 if server.started else 1)


def leave(code: int) -> NoReturn:
    """Exit with `code`, at once if a window or a load still runs.

    The interpreter's end would take from such a thread what it is using: ONNX Runtime then aborts the process.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def _stop_loading(number: int, _: object) -> NoReturn:
    os._exit(128 + number)
