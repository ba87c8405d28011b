"""Whether the port can be had, asked before models take minutes to load. Holds no socket: uvicorn opens its own."""

from __future__ import annotations

import errno
import socket

from service.errors import ListenError


def check_port(host: str, port: int) -> None:
    """Bind every address of `host` as the server will, and let go; port 0 is always free.

    Raises:
        ListenError: the host is unknown or not of this machine, the port is taken, or it is not ours to take.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, proto, _, address in addresses:
            _try(family, kind, proto, address)
    except OSError as cause:
        hint = " (--port 0 takes a free one)" if cause.errno == errno.EADDRINUSE else ""
        raise ListenError(f"{host}:{port}: {cause.strerror}{hint}") from cause


def _try(family: int, kind: int, proto: int, address: tuple[object, ...]) -> None:
    try:
        trial = socket.socket(family, kind, proto)
    except OSError:  # a machine without IPv6 still has names with such addresses: the event loop leaves them out too
        return
    with trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        trial.bind(address)
