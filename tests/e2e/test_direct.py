"""The direct way and the ASGI way answer alike: known heads and new ones, bodies in pieces, requests in a row."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import D
from tests.e2e.server import Server, binary, out_of, serving

RNG = np.random.default_rng()


@pytest.fixture(scope="module")
def small(models: Path) -> Iterator[Server]:
    """Holds at most a body and a half."""
    flags = ("--threads", "1", "--max-body-mib", "2", "--max-bodies-mib", "3", "--body-timeout", "0.5")
    with serving(models, *flags, TOKENSLAB_KEEP_ALIVE_S="1") as running:
        yield running


def tokens(rows: int) -> Any:
    return RNG.standard_normal((rows, D), dtype=np.float32)


def request(x: Any, *lines: str) -> bytes:
    body, headers = binary(x)
    head = [*(f"{k}: {v}" for k, v in headers.items()), f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(["POST /v2/models/ffn/infer HTTP/1.1", "Host: x", *head, "", ""]).encode() + body


def read(link: socket.socket, held: bytearray) -> tuple[int, dict[str, str], bytes]:
    """The next answer of a connection; what was read beyond it stays in `held`."""
    while b"\r\n\r\n" not in held:
        data = link.recv(1 << 16)
        assert data, "closed before an answer"
        held += data
    head, _, rest = bytes(held).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    size = int(headers["content-length"])
    while len(rest) < size:
        data = link.recv(1 << 16)
        assert data, "closed within an answer"
        rest += data
    held[:] = rest[size:]
    return int(first.split()[1]), headers, rest[:size]


def outputs(link: socket.socket, count: int) -> list[Any]:
    held = bytearray()
    answers = [read(link, held) for _ in range(count)]
    assert [status for status, _, _ in answers] == [200] * count
    return [out_of(headers, data) for _, headers, data in answers]


@pytest.mark.parametrize("lines", [(), ("Expect: nothing",)], ids=["direct", "asgi"])
def test_requests_in_pieces_cut_anywhere_are_answered_with_their_own_rows(
    server: Server, lines: tuple[str, ...]
) -> None:
    cuts = random.Random()
    with server.raw() as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(30):
            x = tokens(3)
            data = request(x, *lines)
            at = sorted(cuts.sample(range(1, len(data)), cuts.randint(0, 3)))
            for start, stop in zip([0, *at], [*at, len(data)], strict=True):
                link.sendall(data[start:stop])
            np.testing.assert_array_equal(outputs(link, 1)[0], server.infer("ffn", x))


def test_requests_behind_one_another_are_answered_in_order_whichever_way_they_go(server: Server) -> None:
    xs = [tokens(rows) for rows in (1, 1, 4, 1, 2, 1)]
    ways: list[tuple[str, ...]] = [(), (), ("Expect: nothing",), (), ("Transfer-Note: x",), ()]
    with server.raw() as link:
        for _ in range(3):
            link.sendall(b"".join(request(x, *way) for x, way in zip(xs, ways, strict=True)))
            for x, out in zip(xs, outputs(link, len(xs)), strict=True):
                np.testing.assert_array_equal(out, server.infer("ffn", x))


def test_a_known_head_with_another_line_is_read_anew(server: Server) -> None:
    with server.raw() as link:
        for _ in range(2):
            link.sendall(request(tokens(1)))
            outputs(link, 1)
        link.sendall(request(tokens(1), "Content-Length: 1"))
        status, headers, _ = read(link, bytearray())
        assert (status, headers["connection"]) == (400, "close")


def test_a_fault_in_a_body_does_not_end_the_connection(server: Server) -> None:
    good, wrong = request(tokens(1)), request(np.zeros((1, D + 1), np.float32))
    with server.raw() as link:
        for data, wanted in [(good, 200), (wrong, 400), (wrong, 400), (good, 200)]:
            link.sendall(data)
            status, headers, _ = read(link, bytearray())
            assert (status, "connection" in headers) == (wanted, False)


def test_a_body_that_finds_no_room_is_told_so_and_one_that_stalls_is_given_up(small: Server) -> None:
    big = request(tokens(7000))  # 1.8 MB: two of them are too many
    with small.raw() as first, small.raw() as second:
        for link in (first, second):  # their head is known from now on
            link.sendall(big)
            outputs(link, 1)
        first.sendall(big[:-1])
        while small.metric("tokenslab_body_bytes") < 1_700_000:
            pass
        second.sendall(big)
        status, headers, _ = read(second, bytearray())
        assert (status, headers["connection"]) == (429, "close")
        assert read(first, bytearray())[0] == 408
    assert small.metric("tokenslab_body_bytes") == 0
    assert small.metric("tokenslab_rejections_total", reason="bodies_full") == 1
    assert small.metric("tokenslab_rejections_total", reason="body_timeout") == 1


def test_a_client_that_leaves_within_a_body_is_counted(small: Server) -> None:
    with small.raw() as link:
        link.sendall(request(tokens(2)))
        outputs(link, 1)
        before = small.metric("tokenslab_disconnects_total", stage="body")
        link.sendall(request(tokens(2))[:-1])
    while small.metric("tokenslab_disconnects_total", stage="body") == before:
        pass
    assert small.metric("tokenslab_body_bytes") == 0


def test_an_idle_connection_is_closed_after_the_keep_alive_time_and_no_earlier(small: Server) -> None:
    with small.raw() as link:
        link.sendall(request(tokens(1)))
        outputs(link, 1)
        link.settimeout(0.5)
        with pytest.raises(TimeoutError):
            link.recv(1)
        link.settimeout(20)
        link.sendall(request(tokens(1)))
        outputs(link, 1)
        assert link.recv(1) == b""


def test_a_slow_reader_of_a_direct_answer_is_counted_and_cut_off(models: Path) -> None:
    with serving(models, "--threads", "1", TOKENSLAB_WRITE_TIMEOUT_S="0.3") as server, server.raw() as link:
        link.sendall(request(tokens(60_000)))
        while server.metric("tokenslab_disconnects_total", stage="reply") == 0:
            pass
        assert server.metric("tokenslab_body_bytes") == 0
