"""What becomes of a request whose server misbehaves, and whom the client trusts."""

from __future__ import annotations

import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trustme

from bench.loadtest.driver import Job, drive
from bench.loadtest.records import CONNECT, LOST, NO_ANSWER, TIMEOUT
from bench.loadtest.target import Input, Target
from tests.bench.loadtest.misbehaving import serve_each

ANSWER = (
    b'HTTP/1.1 200 OK\r\nserver-timing: queue;dur=1.5, compute;dur=2.5, window;desc="9"\r\ncontent-length: 2\r\n\r\n{}'
)


def _target(url: str) -> Target:
    return Target(url, (Input("tokens", "FP32", (-1, 8)),), ("out",))


def _answer(connection: socket.socket, _no: int) -> bool:
    connection.sendall(ANSWER)
    return True


def _open_loop(url: str, requests: int, timeout_s: float = 5.0) -> list[int]:
    times = np.arange(requests, dtype=np.float64) * 0.02
    part = drive(Job(_target(url), np.ones(requests, np.int64), 1, 1.0, timeout_s, 0, times))
    return [int(status) for status in part.records["status"]]


def test_connections_are_kept_and_what_the_server_says_of_its_window_is_recorded() -> None:
    with serve_each(_answer) as (url, counts):
        part = drive(Job(_target(url), np.ones(5, np.int64), 1, 1.0, 5.0, 0, np.arange(5, dtype=np.float64) * 0.01))
        assert counts == [5]
    assert [part.records[name].tolist() for name in ("queue_ms", "compute_ms", "window_tokens")] == [
        [1.5] * 5,
        [2.5] * 5,
        [9] * 5,
    ]


def test_a_request_whose_connection_ends_is_lost_and_not_sent_again_unseen() -> None:
    def end_the_second(connection: socket.socket, no: int) -> bool:
        return no != 2 and _answer(connection, no)

    with serve_each(end_the_second) as (url, counts):
        assert _open_loop(url, 4) == [200, LOST, 200, 200]
        assert sum(counts) == 4


def test_an_answer_cut_short_is_lost() -> None:
    def cut(connection: socket.socket, _no: int) -> bool:
        connection.sendall(ANSWER[:-1])
        return False

    with serve_each(cut) as (url, _):
        assert _open_loop(url, 2) == [LOST, LOST]


def test_a_200_that_holds_less_than_any_answer_is_an_error() -> None:
    def serve(connection: socket.socket, no: int) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\ngarbage" if no == 1 else ANSWER)
        return True

    with serve_each(serve) as (url, _):
        target = replace(_target(url), answer_bytes=8)
        part = drive(Job(target, np.ones(2, np.int64), 1, 1.0, 5.0, 0, np.array([0.0, 0.02])))
    assert part.records["status"].tolist() == [NO_ANSWER, NO_ANSWER]


def test_what_is_no_http_is_lost() -> None:
    def babble(connection: socket.socket, _no: int) -> bool:
        connection.sendall(b"\x00\x01nothing that a client knows\r\n\r\n")
        return False

    with serve_each(babble) as (url, _):
        assert _open_loop(url, 1) == [LOST]


def test_a_server_that_says_nothing_is_given_up_after_the_timeout() -> None:
    silent = threading.Event()
    with serve_each(lambda *_: silent.wait(10) and False) as (url, _):
        assert _open_loop(url, 1, timeout_s=0.1) == [TIMEOUT]
        silent.set()


def test_a_certificate_counts_if_this_machine_trusts_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with serve_each(_answer, context) as (url, _):
        assert _open_loop(url, 1) == [CONNECT]
        trusted = tmp_path / "trusted.pem"
        authority.cert_pem.write_to_path(str(trusted))
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        assert _open_loop(url, 2) == [200, 200]


@pytest.mark.parametrize("connections", [0, 1 << 40])
def test_connections_are_as_many_as_there_may_be_open_files(connections: int) -> None:
    with pytest.raises(ValueError, match=r"expected 1 to \d+ \(ulimit -n"):
        drive(Job(_target("http://127.0.0.1:1/"), np.ones(1, np.int64), connections, 0.1, 1.0, 0))
