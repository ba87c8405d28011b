"""Stopping: nothing that was accepted is lost, whoever is left unanswered is told, and nobody can hold it up."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

from tests.e2e.conftest import D
from tests.e2e.server import Server, answer, binary, out_of, serving


def keep_alive_client(
    server: Server, stop: threading.Event, tally: dict[str, int], lock: threading.Lock, want: bytes
) -> None:
    """Requests on one connection after another until the listener is closed."""
    body, headers = binary(np.ones((16, D), np.float32))
    while not stop.is_set():
        link = server.connect()
        try:
            link.connect()
        except OSError:
            return  # the listener is closed: nothing was accepted
        closed = False
        while not stop.is_set() and not closed:
            closed = one_request(link, body, headers, tally, lock, want)
        link.close()


def one_request(
    link: HTTPConnection, body: bytes, headers: dict[str, str], tally: dict[str, int], lock: threading.Lock, want: bytes
) -> bool:
    try:
        link.request("POST", "/v2/models/ffn/infer", body, headers)
        status, got, data = answer(link.getresponse())
    except OSError:
        outcome, closed = "reset", True
    else:
        right = status == 200 and out_of(got, data).tobytes() == want
        outcome, closed = "right" if right else "wrong", got.get("connection") == "close"
    with lock:
        tally[outcome] = tally.get(outcome, 0) + 1
    return closed


def test_sigterm_under_load_loses_nothing_and_exits_zero(models: Path) -> None:
    with serving(models, "--drain-delay", "1", "--drain-limit", "5") as server:
        want = server.infer("ffn", np.ones((16, D), np.float32)).tobytes()
        stop, lock = threading.Event(), threading.Lock()
        tally: dict[str, int] = {}
        threads = [
            threading.Thread(target=keep_alive_client, args=(server, stop, tally, lock, want)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        while tally.get("right", 0) < 100:
            stop.wait(0.01)
        server.signal(signal.SIGTERM)
        status = 200
        while status == 200:
            status, headers, data = server.ask("/v2/health/ready")
        assert (status, json.loads(data)) == (503, {"error": "draining"})
        assert headers["connection"] == "close"
        body, sent = binary(np.ones((16, D), np.float32))
        status, headers, _ = server.ask("/v2/models/ffn/infer", body, sent)
        assert (status, headers["connection"]) == (200, "close"), "requests are served until the listener closes"
        assert server.wait() == 0
        stop.set()
        for thread in threads:
            thread.join()
    # What the service accepted, it answered; what it answered, a client received, besides the two asked by hand. A
    # reset is a connection that the listener had not accepted yet when it closed.
    accounts = re.search(r"stopped: (\d+) requests accepted, (\d+) answered", "".join(server.log))
    assert accounts is not None
    assert int(accounts[1]) == int(accounts[2]) == tally["right"] + 2
    assert tally.keys() <= {"right", "reset"}
    assert tally.get("reset", 0) <= len(threads), "each client at most once, at the very end"


def test_what_was_accepted_before_the_listener_closed_is_answered(models: Path) -> None:
    body, headers = binary(np.ones((500, D), np.float32))
    # Generous limits: on a machine that does other work, four windows take more than 20 s.
    with serving(models, "--drain-delay", "0", "--drain-limit", "120", "--timeout", "120") as server:
        links = [server.connect(120) for _ in range(4)]
        for link in links:
            link.request("POST", "/v2/models/slow/infer", body, headers)
        while server.accepted_tokens() < 4 * 500:
            pass
        server.signal(signal.SIGTERM)
        assert [answer(link.getresponse())[0] for link in links] == [200] * 4
        for link in links:
            link.close()
        assert server.wait() == 0


def test_an_idle_server_exits_zero_on_sigterm_and_on_sigint(models: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with serving(models, "--drain-delay", "0") as server:
            server.signal(number)
            assert server.wait() == 0


def test_a_second_signal_stops_at_once(models: Path) -> None:
    with serving(models, "--drain-delay", "60") as server:
        server.signal(signal.SIGTERM)
        while server.ask("/v2/health/ready")[0] == 200:
            pass
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 128 + signal.SIGTERM


LEAVING = """
import sys, threading
import numpy as np
from service.cli import leave
from service.session import open_session
from pathlib import Path

session = open_session(Path(sys.argv[1]), "cpu", 1)
tokens, running = np.ones((1 << 14, 64), np.float32), threading.Event()

def run():
    while True:
        running.set()
        session.run(None, {"tokens": tokens})

threading.Thread(target=run, daemon=True).start()
running.wait()
print("the last words")
leave(7)
"""


def test_a_process_may_end_while_onnx_runtime_still_runs(models: Path) -> None:
    model = models / "slow" / "1" / "fp32.onnx"
    done = subprocess.run([sys.executable, "-c", LEAVING, model], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "the last words\n"), done.stderr


def test_what_the_drain_limit_leaves_unanswered_is_told_so(models: Path) -> None:
    body, headers = binary(np.ones((2000, D), np.float32))
    flags = ("--drain-delay", "0", "--drain-limit", "0.1", "--max-queue-tokens", "200000", "--timeout", "600")
    with serving(models, *flags) as server:
        links = [server.connect() for _ in range(12)]
        for link in links:
            link.request("POST", "/v2/models/slow/infer", body, headers)
        while server.accepted_tokens() < 12 * 2000:
            pass
        server.signal(signal.SIGTERM)
        got = [answer(link.getresponse()) for link in links]
        for link in links:
            link.close()
        assert server.wait() == 0
    assert {status for status, _, _ in got} <= {200, 503}
    late = [data for status, _, data in got if status == 503]
    assert late
    assert all("stopped before" in json.loads(data)["error"] for data in late)
    assert not [line for line in server.log if "Traceback" in line]


def unread_request() -> bytes:
    """A request whose answer of 15 MB nobody will read."""
    body, headers = binary(np.ones((60_000, D), np.float32))
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = f"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode() + body


def test_neither_a_stalled_body_nor_an_unread_answer_keeps_a_stopping_server_alive(models: Path) -> None:
    with serving(models, "--drain-delay", "0", "--drain-limit", "1") as server:
        link = server.raw(b"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc")
        reader = server.raw(unread_request())
        server.infer("ffn", np.zeros((1, D), np.float32))
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert link.recv(100).startswith(b"HTTP/1.1 503 ")
        link.close()
        reader.close()
    assert not [line for line in server.log if "Traceback" in line]
