"""Starting and stopping: not ready until warm, clear words when it cannot start, and nothing lost when it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from bench.process import free_port
from tests.bundles import relu_ffn, write_bundle
from tests.e2e.conftest import D
from tests.e2e.server import Server, answer, binary, end, out_of, serving, start, wait_until_listening


def outcome(server: Server) -> tuple[int, str]:
    output, _ = server.process.communicate(timeout=60)  # closes its pipe too
    return server.process.returncode, output


def test_a_bundle_that_cannot_be_served_is_named_and_the_service_does_not_start(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, "ffn", relu_ffn(8, 16))
    (folder / "fp32.onnx").write_bytes(b"broken")
    code, output = outcome(start(tmp_path))
    assert code == 1
    assert "fp32.onnx: its SHA-256 is" in output
    assert "Traceback" not in output


def test_a_provider_that_is_not_there_is_refused(models: Path) -> None:
    code, output = outcome(start(models, "--provider", "cuda"))
    assert code == 1
    assert "cuda" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("--max-window-tokens", "0"), {}, "max_window_tokens"),
        (("--provider", "tpu"), {}, "provider"),
        ((), {"TOKENSLAB_TIMEOUT": "3"}, "TOKENSLAB_TIMEOUT is no setting"),
        ((), {"TOKENSLAB_THREADS": "many"}, "threads"),
    ],
)
def test_a_wrong_setting_is_named(
    models: Path, flags: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    code, output = outcome(start(models, *flags, **environment))
    assert code == 2
    assert message in output
    assert "Traceback" not in output


@pytest.mark.parametrize("setting", ["API_KEYS_FILE", "SSL_CERTFILE"])
def test_a_file_that_cannot_be_used_is_named_before_models_are_loaded(models: Path, setting: str) -> None:
    code, output = outcome(start(models, **{f"TOKENSLAB_{setting}": "/nowhere/file"}))
    assert (code, f"{setting.lower()}" in output) == (1, True)
    assert "loaded" not in output


def test_it_starts_and_answers_where_nothing_can_be_written(models: Path) -> None:
    # No file of any size: what a full disk and a read-only root have in common. The log goes to a pipe.
    command = f"ulimit -f 0; exec {sys.executable} -m tokenslab serve --models {models} --port 0 --threads 1"
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": "/nowhere"},
    )
    server = Server(process)
    try:
        wait_until_listening(server)
        assert server.infer("ffn", np.zeros((2, D), np.float32)).shape == (2, D)
        large = {"name": "tokens", "datatype": "FP32", "shape": [200, D], "data": [0.5] * (200 * D)}
        assert server.ask("/v2/models/ffn/infer", json.dumps({"inputs": [large]}).encode())[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        end(server)
    assert not [line for line in server.log if "Traceback" in line]


MOUNTS = {
    "read-only": 'mount -t tmpfs -o ro none "$TMPDIR" && mount --bind "$MODELS" "$MODELS" &&'
    ' mount -o remount,ro,bind "$MODELS"',
    "full": 'mount -t tmpfs -o size=4k none "$TMPDIR" && ! head -c 8192 /dev/zero 2>/dev/null >"$TMPDIR/fill"',
}
WRITES_NOWHERE = {"read-only": '! touch "$MODELS/x" 2>/dev/null && ! touch "$TMPDIR/x" 2>/dev/null', "full": "true"}


def may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("case", MOUNTS)
def test_it_starts_answers_and_drains_on_file_systems_that_take_nothing(tmp_path: Path, case: str) -> None:
    if not may_mount():
        pytest.skip("mounting a file system needs CAP_SYS_ADMIN")
    models, temporary = tmp_path / "models", tmp_path / "temporary"
    write_bundle(models, "ffn", relu_ffn(D, D))
    temporary.mkdir()
    serve = f'exec {sys.executable} -m tokenslab serve --models "$MODELS" --port 0 --threads 1 --poll-s 0.1'
    process = subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", f"{MOUNTS[case]} && {WRITES_NOWHERE[case]} && {serve}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MODELS": str(models), "TMPDIR": str(temporary)},
    )
    server = Server(process)
    try:
        wait_until_listening(server)
        assert server.infer("ffn", np.zeros((2, D), np.float32)).shape == (2, D)
        large = {"name": "tokens", "datatype": "FP32", "shape": [200, D], "data": [0.5] * (200 * D)}
        assert server.ask("/v2/models/ffn/infer", json.dumps({"inputs": [large]}).encode())[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        end(server)
    assert not [line for line in server.log if "Traceback" in line]


def test_a_log_on_a_full_disk_keeps_nobody_from_an_answer(models: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tokenslab", "serve", "--models", str(models), "--port", str(port)]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen([*command, "--threads", "1", "--log-level", "debug"], stdout=full, stderr=full)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                link = HTTPConnection("127.0.0.1", port, timeout=20)
                body, headers = binary(np.zeros((2, D), np.float32))
                link.request("POST", "/v2/models/ffn/infer", body, headers)
                status, _, _ = answer(link.getresponse())
                break
            except ConnectionRefusedError:
                assert process.poll() is None, f"it exited {process.returncode}"
                assert time.monotonic() < until
                time.sleep(0.05)
            finally:
                link.close()
        assert status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("case", ["no folder", "a file", "not readable"])
def test_a_repository_that_cannot_be_read_is_named_with_the_systems_reason(tmp_path: Path, case: str) -> None:
    root = tmp_path / "models"
    if case == "a file":
        root.write_text("nothing")
    elif case == "not readable":
        folder = write_bundle(root, "ffn", relu_ffn(8, 16))
        (folder / "fp32.onnx").unlink()
        (folder / "fp32.onnx").mkdir()  # permissions do not stop root
    code, output = outcome(start(root))
    assert code == 1
    assert str(root) in output
    assert "Traceback" not in output


def test_a_port_in_use_is_said_before_any_model_is_loaded(models: Path) -> None:
    with serving(models) as server:
        code, output = outcome(start(models, "--port", str(server.port)))
    assert code == 1
    assert output == f"tokenslab serve: 127.0.0.1:{server.port}: Address already in use (--port 0 takes a free one)\n"


def test_uvicorns_own_command_serves_the_factory(models: Path) -> None:
    command = [sys.executable, "-m", "uvicorn", "service.app:create_app", "--factory", "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TOKENSLAB_MODELS": str(models)},
    )
    server = Server(process)
    try:
        wait_until_listening(server)
        assert server.infer("ffn", np.zeros((2, D), np.float32)).shape == (2, D)
    finally:
        end(server)


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
