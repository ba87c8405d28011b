"""A stop and requests behind one another: what was accepted is answered in order, what came later is not run at all."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.server import Server, eventually, out_of, serving
from tests.e2e.test_direct import read, request, tokens


def accepted(server: Server, rows: int) -> bool:
    return eventually(lambda: server.accepted_tokens() >= rows)


@pytest.mark.parametrize("lines", [(), ("Expect: nothing",)], ids=["direct", "asgi"])
@pytest.mark.parametrize("early", [0, 30], ids=["whole", "half"])
def test_accepted_requests_are_answered_in_order_and_the_last_answer_says_that_it_is_the_last(
    models: Path, lines: tuple[str, ...], early: int
) -> None:
    """`early` bytes of the request that comes too late are there before the signal: a head that is not whole."""
    xs, late = [tokens(rows) for rows in (1, 4, 2)], request(tokens(3), *lines)
    # Every window waits: the service stops while the first request of the row is unanswered, and the others are behind.
    with serving(models, "--max-wait-ms", "1500", "--drain-delay", "60") as server, server.raw() as link:
        link.sendall(b"".join(request(x, *lines) for x in xs) + late[:early])
        assert accepted(server, 1)
        server.signal(signal.SIGTERM)
        server.logged("not ready any more")
        link.sendall(late[early:])
        held = bytearray()
        answers = [read(link, held) for _ in xs]
        assert [(status, headers.get("connection")) for status, headers, _ in answers] == [
            *((200, None), (200, None), (200, "close"))
        ]
        assert not held
        assert link.recv(1) == b""
        for x, (_, headers, data) in zip(xs, answers, strict=True):
            np.testing.assert_array_equal(out_of(headers, data), server.infer("ffn", x))
        assert eventually(lambda: server.metric("tokenslab_unheard_connections_total") == 1)
        assert server.accepted_tokens() == 2 * 7  # those of the row, and the same again one by one
        assert server.metric("tokenslab_body_bytes") == 0


def test_a_request_on_an_idle_connection_is_accepted_while_the_listener_is_open_and_is_its_last(models: Path) -> None:
    x = tokens(2)
    with serving(models, "--drain-delay", "60") as server, server.raw() as link:
        link.sendall(request(x))
        assert "connection" not in read(link, bytearray())[1]
        server.signal(signal.SIGTERM)
        server.logged("not ready any more")
        link.sendall(request(x))
        status, headers, data = read(link, bytearray())
        assert (status, headers["connection"]) == (200, "close")
        assert link.recv(1) == b""
        np.testing.assert_array_equal(out_of(headers, data), server.infer("ffn", x))
        assert server.metric("tokenslab_unheard_connections_total") == 0


def test_a_body_that_still_comes_when_the_service_stops_is_an_accepted_request(models: Path) -> None:
    x = tokens(3)
    with serving(models, "--drain-delay", "0", "--drain-limit", "30") as server, server.raw() as link:
        link.sendall(request(x)[:-1])
        assert eventually(lambda: server.metric("tokenslab_body_bytes") > 0)
        server.signal(signal.SIGTERM)
        server.logged("Shutting down")
        link.sendall(request(x)[-1:])
        status, headers, data = read(link, bytearray())
        assert (status, headers["connection"]) == (200, "close")
        assert out_of(headers, data).shape == x.shape
        assert server.wait() == 0
