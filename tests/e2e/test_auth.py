"""Keys on a running service: what is open, what needs which key, and that no key reaches the log."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import Server, binary, end, serving, start, wait_until_listening

D = 8
ALICE, ROOT, LATER = "alice-" + "a" * 16, "root-" + "r" * 16, "later-" + "l" * 16


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "clients"
    file.write_text(f"alice:{ALICE}\n")
    return file


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_bundle(folder, "ffn", relu_ffn(D, 2 * D))
    return folder


@pytest.fixture(scope="module")
def guarded(root: Path, keys: Path) -> Iterator[Server]:
    flags = ("--threads", "1", "--api-keys-file", str(keys), "--log-level", "debug")
    with serving(root, *flags, TOKENSLAB_ADMIN_KEYS=f"root:{ROOT}") as server:
        yield server
        for key in (ALICE, ROOT, LATER):
            assert not [line for line in server.log if key in line]


def ask(server: Server, path: str, key: str | None, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
    return server.ask(path, body, {} if key is None else {"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/metrics"])
def test_health_and_metrics_are_open(guarded: Server, path: str) -> None:
    assert ask(guarded, path, None)[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2", None),
        ("/docs", None),
        ("/v2/models/ffn", None),
        ("/v2/models/none", None),
        ("/v2/models/ffn/infer", b"{}"),
        ("/v2/models/none/infer", b"{}"),
        ("/v2/repository/index", b""),
        ("/nowhere", None),
    ],
)
def test_everything_else_needs_a_key_and_says_how_to_send_it(guarded: Server, path: str, body: bytes | None) -> None:
    for key in (None, "x" * 20):
        status, headers, data = ask(guarded, path, key, body)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert set(json.loads(data)) == {"error"}
    assert ask(guarded, path, ALICE, body)[0] != 401
    assert guarded.metric("tokenslab_rejections_total", reason="unauthorized") >= 2


def test_a_client_infers_with_its_key_through_tritons_own_client(guarded: Server) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{guarded.port}")
    tokens = triton.InferInput("tokens", [3, D], "FP32").set_data_from_numpy(np.ones((3, D), np.float32))
    headers = {"Authorization": f"Bearer {ALICE}"}
    assert client.infer("ffn", [tokens], headers=headers).as_numpy("out").shape == (3, D)
    with pytest.raises(triton.InferenceServerException, match="no key"):
        client.infer("ffn", [tokens])
    client.close()


def test_a_refused_body_is_not_read(guarded: Server) -> None:
    body, headers = binary(np.ones((4000, D), np.float32))
    assert guarded.ask("/v2/models/ffn/infer", body, headers)[0] == 401
    head = b"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    with guarded.raw(head) as link:  # and sends nothing of it: the answer does not wait
        told = link.recv(1 << 12).lower()
    assert told.startswith(b"http/1.1 401 ")
    assert b"\r\nconnection: close\r\n" in told


def test_load_and_unload_are_for_admins_through_tritons_own_client(guarded: Server) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{guarded.port}")
    admin = {"Authorization": f"Bearer {ROOT}"}
    path = "/v2/repository/models/ffn/unload"
    assert (ask(guarded, path, None, b"")[0], ask(guarded, path, ALICE, b"")[0]) == (401, 403)
    client.unload_model("ffn", headers=admin)
    assert not client.is_model_ready("ffn", headers=admin)
    states = {row["name"]: (row["state"], row["reason"]) for row in client.get_model_repository_index(headers=admin)}
    assert states == {"ffn": ("UNAVAILABLE", "unloaded")}
    client.load_model("ffn", headers=admin)
    assert client.is_model_ready("ffn", headers=admin)
    with pytest.raises(triton.InferenceServerException, match="not spoken here"):
        client.load_model("ffn", headers=admin, config="{}")
    with pytest.raises(triton.InferenceServerException, match="no bundle 'none'"):
        client.load_model("none", headers=admin)
    client.close()
    status, _, data = ask(guarded, "/v2/repository/models/ffn/load", ROOT, b'{"parameters": {"version": 7}}')
    assert (status, json.loads(data)["error"]) == (404, "'ffn' has no version 7; in its folder: 1")


def test_a_hangup_rotates_the_keys(guarded: Server, keys: Path) -> None:
    keys.write_text(f"later:{LATER}\nalice:{ALICE}\n")
    guarded.signal(signal.SIGHUP)
    until = time.monotonic() + 20
    while ask(guarded, "/v2", LATER)[0] != 200:
        assert time.monotonic() < until
    assert ask(guarded, "/v2", ALICE)[0] == 200


def test_a_hangup_while_models_load_ends_nothing(root: Path, keys: Path) -> None:
    server = start(root, "--threads", "1", "--api-keys-file", str(keys))
    try:
        assert server.process.stdout is not None
        assert "loaded ffn" in server.process.stdout.readline()
        server.signal(signal.SIGHUP)
        wait_until_listening(server)
        assert ask(server, "/v2", ALICE)[0] == 200
    finally:
        end(server)


def test_without_an_admin_key_nobody_may_load(models: Path) -> None:
    with serving(models, "--threads", "1") as server:
        for path in ("/v2/repository/models/ffn/load", "/v2/repository/models/ffn/unload", "/v2/settings"):
            status, _, data = server.ask(path, b"")
            assert (status, "this endpoint is off" in json.loads(data)["error"]) == (403, True)
        document = json.loads(server.ask("/openapi.json")[2])
        assert "401" in document["paths"]["/v2/models/{name}/infer"]["post"]["responses"]
