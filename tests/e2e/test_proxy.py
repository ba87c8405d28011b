"""Behind a proxy that tries again elsewhere: servers that are killed and started again cost nobody a wrong answer."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import numpy as np
import pytest

from bench.process import free_port
from tests.e2e.conftest import D
from tests.e2e.server import answer, binary, end, out_of, serving, start, wait_until_listening

HAPROXY = shutil.which("haproxy")

# Infer changes nothing, so a request may be sent again. haproxy does so from its buffer, which must hold all of it.
CONFIG = """
global
    tune.bufsize 1048576
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    option redispatch 1
    retries 20
    retry-on all-retryable-errors
frontend in
    bind 127.0.0.1:{port}
    option http-buffer-request
    default_backend services
backend services
    balance roundrobin
    server a 127.0.0.1:{a} check inter 100ms
    server b 127.0.0.1:{b} check inter 100ms
"""


def ask(port: int, body: bytes, headers: dict[str, str], want: bytes) -> str:
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request("POST", "/v2/models/ffn/infer", body, headers)
        status, got, data = answer(link.getresponse())
        if status != 200:
            return f"refused {status}"
        return "right" if out_of(got, data).tobytes() == want else "wrong"
    except (OSError, HTTPException):
        return "cut off"  # its client knows that it has no answer
    finally:
        link.close()


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (apt-get install haproxy)")
def test_kill_and_restart_behind_a_proxy_give_no_wrong_answer(models: Path, tmp_path: Path) -> None:
    assert HAPROXY is not None
    x = np.random.default_rng().standard_normal((200, D), dtype=np.float32)
    body, headers = binary(x)
    port, a = free_port(), free_port()
    tally: Counter[str] = Counter()
    stop = threading.Event()
    with serving(models, "--threads", "1") as b:
        victim = start(models, "--threads", "1", "--port", str(a))
        (tmp_path / "haproxy.cfg").write_text(CONFIG.format(port=port, a=a, b=b.port))
        try:
            wait_until_listening(victim)
            want = b.infer("ffn", x).tobytes()
            proxy = subprocess.Popen([HAPROXY, "-db", "-q", "-f", str(tmp_path / "haproxy.cfg")])

            def client() -> None:
                while not stop.is_set():
                    tally[ask(port, body, headers, want)] += 1

            threads = [threading.Thread(target=client) for _ in range(4)]
            try:
                _until_listening(port)
                for thread in threads:
                    thread.start()
                for _ in range(2):
                    _until(partial(_more_right, tally, tally["right"] + 30))
                    end(victim)  # SIGKILL
                    victim = start(models, "--threads", "1", "--port", str(a))
                    wait_until_listening(victim)
                _until(partial(_more_right, tally, tally["right"] + 30))
            finally:
                stop.set()
                for thread in threads:
                    if thread.is_alive():
                        thread.join()
                proxy.kill()
                proxy.wait()
        finally:
            end(victim)
    assert tally["wrong"] == 0, tally
    assert tally["right"] > 90, tally
    assert not [outcome for outcome in tally if outcome.startswith("refused")], tally


def _more_right(tally: Counter[str], count: int) -> bool:
    return tally["right"] > count


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def _until_listening(port: int) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < until
        else:
            return
