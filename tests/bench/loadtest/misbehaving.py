"""A server of a few lines that answers as a test says, however wrong that is."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

Serve = Callable[[socket.socket, int], bool]


@contextmanager
def serve_each(serve: Serve, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[int]]]:
    """One connection at a time; `serve(connection, no)` answers its request `no` and says whether it goes on.

    Gives the URL, and how many requests each connection brought.
    """
    counts: list[int] = []

    def answer(connection: socket.socket) -> None:
        counts.append(0)
        while _read_request(connection):
            counts[-1] += 1
            if not serve(connection, sum(counts)):
                return

    def work() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test is over
                return
            with connection:
                try:
                    if tls is None:
                        answer(connection)
                        continue
                    with tls.wrap_socket(connection, server_side=True) as secured:
                        answer(secured)
                except OSError:  # the client has left, or does not trust this
                    continue

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/infer", counts
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _read_request(connection: socket.socket) -> bool:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        if not piece:
            return False
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return True
