"""Starting: clear words when it cannot, and answers once it listens, though nothing can be written anywhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from bench.process import free_port
from tests.bundles import relu_ffn, write_bundle
from tests.e2e.conftest import D
from tests.e2e.server import Server, answer, binary, launch, listening, serving, start


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
    assert_answers_and_drains(launch(["bash", "-c", command], TMPDIR="/nowhere"))


def assert_answers_and_drains(server: Server) -> None:
    """A small request, one whose JSON another process reads, and SIGTERM; and no traceback in the log."""
    large = {"name": "tokens", "datatype": "FP32", "shape": [200, D], "data": [0.5] * (200 * D)}
    with listening(server):
        assert server.infer("ffn", np.zeros((2, D), np.float32)).shape == (2, D)
        assert server.ask("/v2/models/ffn/infer", json.dumps({"inputs": [large]}).encode())[0] == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
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
    command = ["unshare", "--mount", "bash", "-c", f"{MOUNTS[case]} && {WRITES_NOWHERE[case]} && {serve}"]
    assert_answers_and_drains(launch(command, MODELS=str(models), TMPDIR=str(temporary)))


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
    with listening(launch(command, TOKENSLAB_MODELS=str(models))) as server:
        assert server.infer("ffn", np.zeros((2, D), np.float32)).shape == (2, D)
