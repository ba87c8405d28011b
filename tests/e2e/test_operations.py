"""What an operator sees and sets: TLS, logs, ids of requests, metrics of models."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import numpy as np
import pytest
import trustme

from tests.bundles import relu_ffn, write_bundle
from tests.e2e.server import Server, answer, binary, end, out_of, serving, start

D = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_bundle(folder, "ffn", relu_ffn(D, 2 * D))
    return folder


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, issued = tmp_path_factory.mktemp("tls"), authority.issue_cert("127.0.0.1")
    chain, key = folder / "chain.pem", folder / "key.pem"
    for index, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(chain, append=index > 0)
    issued.private_key_pem.write_to_path(key)
    return chain, key


@pytest.fixture(scope="module")
def logged(root: Path) -> Iterator[Server]:
    with serving(root, "--threads", "1", "--log-format", "json", "--log-level", "debug") as server:
        yield server


def _get(link: HTTPSConnection, path: str) -> int:
    link.request("GET", path)
    return link.getresponse().status


def test_tls_is_spoken_with_the_certificate_and_nothing_else_is(
    root: Path, authority: trustme.CA, certificate: tuple[Path, Path]
) -> None:
    chain, key = certificate
    with serving(root, "--threads", "1", "--ssl-certfile", str(chain), "--ssl-keyfile", str(key)) as server:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        link = HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
        body, headers = binary(np.ones((300, D), np.float32))
        for _ in range(3):  # keep-alive, and the lean way of infer
            link.request("POST", "/v2/models/ffn/infer", body, headers)
            status, got, data = answer(link.getresponse())
            assert (status, out_of(got, data).shape) == (200, (300, D))
        link.close()
        with server.raw(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n") as plain:
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")
        stranger = HTTPSConnection("127.0.0.1", server.port, timeout=20, context=ssl.create_default_context())
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger.request("GET", "/v2")


def test_a_client_that_idles_over_tls_does_not_hold_up_the_stop(
    root: Path, authority: trustme.CA, certificate: tuple[Path, Path]
) -> None:
    chain, key = certificate
    flags = ("--ssl-certfile", str(chain), "--ssl-keyfile", str(key), "--drain-delay", "0", "--drain-limit", "60")
    with serving(root, "--threads", "1", *flags) as server:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        link = HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
        link.request("GET", "/v2")
        assert link.getresponse().read()
        server.signal(signal.SIGTERM)  # its goodbye is not read, as that of any pooled connection
        assert server.wait(30) == 0
        link.close()


def test_clients_without_a_certificate_of_the_authority_are_kept_out(
    root: Path, authority: trustme.CA, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    chain, key = certificate
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with serving(
        *(root, "--threads", "1", "--ssl-certfile", str(chain), "--ssl-keyfile", str(key)),
        TOKENSLAB_SSL_CA_CERTS=str(tmp_path / "ca.pem"),
    ) as server:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        link = HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
        with pytest.raises((ssl.SSLError, ConnectionError)):  # TLS 1.3 tells it with the first answer
            _get(link, "/v2")
        authority.issue_cert("client.example").configure_cert(context)
        link = HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
        assert _get(link, "/v2/health/ready") == 200
        link.close()


@pytest.mark.parametrize("case", ["missing", "no certificate", "key alone", "wrong key", "encrypted"])
def test_a_certificate_that_cannot_be_used_is_named_before_anything_listens(
    root: Path, certificate: tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    chain, key = certificate
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    flags = {
        "missing": ("--ssl-certfile", str(tmp_path / "none.pem")),
        "no certificate": ("--ssl-certfile", str(broken)),
        "key alone": ("--ssl-keyfile", str(key)),
        "wrong key": ("--ssl-certfile", str(chain), "--ssl-keyfile", str(other)),
        "encrypted": ("--ssl-certfile", str(chain), "--ssl-keyfile", str(broken)),
    }[case]
    server = start(root, "--threads", "1", *flags)
    try:
        output, _ = server.process.communicate(timeout=60)
        assert server.process.returncode == 1
        assert "ssl_certfile" in output
        assert "Traceback" not in output
    finally:
        end(server)


def test_the_log_is_json_a_line_with_a_window_a_line(logged: Server) -> None:
    logged.infer("ffn", np.ones((3, D), np.float32))
    logged.ask("/v2/models/ffn/infer", b"{}")
    assert json.loads(logged.logged("3 tokens"))["level"] == "DEBUG"
    lines = [json.loads(line) for line in list(logged.log) if "running on http" not in line]
    assert all({"timestamp", "level", "logger", "message"} <= line.keys() for line in lines)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", None),
        ("/v2/models/none", None),
        ("/v2/models/ffn/infer", b"{}"),
        ("/v2/models/none/infer", b"{}"),
        ("/v2/models/ffn/infer", b'{"inputs": [{"name": "tokens", "datatype": "FP32", "shape": [0, 8], "data": []}]}'),
    ],
)
def test_every_answer_names_its_request(logged: Server, path: str, body: bytes | None) -> None:
    for given, taken in (("a-1/b:2", True), ("<script>", False), ("x" * 200, False)):
        echoed = logged.ask(path, body, {"X-Request-Id": given})[1]["x-request-id"]
        assert (echoed == given) == taken
    made = {logged.ask(path, body)[1]["x-request-id"] for _ in range(3)}
    assert len(made) == 3


ROOT_KEY = "root-" + "r" * 16


@pytest.fixture
def tuned(root: Path) -> Iterator[Server]:
    with serving(root, "--threads", "1", TOKENSLAB_ADMIN_KEYS=f"root:{ROOT_KEY}") as server:
        yield server


def test_settings_are_shown_without_secrets_and_a_few_change_while_it_runs(tuned: Server) -> None:
    admin = {"Authorization": f"Bearer {ROOT_KEY}"}
    status, _, data = tuned.ask("/v2/settings", None, admin)
    shown = json.loads(data)
    assert (status, shown["max_window_tokens"], shown["admin_keys"]) == (200, 2048, "**********")
    change = {"max_window_tokens": 64, "max_wait_ms": 1.5, "timeout_s": 9, "log_level": "debug"}
    status, _, data = tuned.ask("/v2/settings", json.dumps(change).encode(), admin, method="PATCH")
    changed = json.loads(data)
    assert status == 200
    assert {name: changed[name] for name in change} == change
    tokens = np.random.default_rng().standard_normal((200, D), dtype=np.float32)
    whole = tuned.infer("ffn", tokens)
    np.testing.assert_array_equal(whole[:3], tuned.infer("ffn", tokens[:3]))
    metadata = json.loads(tuned.ask("/v2/models/ffn")[2])
    assert metadata["parameters"]["max_window_tokens"] == 64
    for wrong, name in (({"port": 1}, "port"), ({"max_window_tokens": 0}, "max_window_tokens")):
        status, _, data = tuned.ask("/v2/settings", json.dumps(wrong).encode(), admin, method="PATCH")
        assert (status, name in json.loads(data)["error"]) == (400, True)
    assert tuned.ask("/v2/settings", b"{}", method="PATCH")[0] == 401
    assert not [line for line in tuned.log if ROOT_KEY in line]


def test_metrics_tell_the_state_and_the_memory_of_models(tuned: Server) -> None:
    assert tuned.metric("tokenslab_model_state", model="ffn", state="READY") == 1
    assert tuned.metric("tokenslab_model_state", model="ffn", state="UNAVAILABLE") == 0
    assert tuned.metric("tokenslab_model_memory_bytes", model="ffn-fp32") > 0
    assert tuned.metric("tokenslab_resident_bytes") > 1 << 20
    tuned.ask("/v2/repository/models/ffn/unload", b"", {"X-API-Key": ROOT_KEY})
    assert tuned.metric("tokenslab_model_state", model="ffn", state="UNAVAILABLE") == 1


def test_the_padding_that_was_dropped_is_counted(models: Path) -> None:
    with serving(models, "--threads", "1") as server:
        width = 64
        inputs = [
            {"name": "tokens", "datatype": "FP32", "shape": [2, 3, width], "data": [0.5] * (6 * width)},
            {"name": "seq_lens", "datatype": "INT64", "shape": [2], "data": [3, 1]},
        ]
        assert server.ask("/v2/models/mean/infer", json.dumps({"inputs": inputs}).encode())[0] == 200
        assert server.metric("tokenslab_padding_tokens_total", model="mean-fp32") == 2


def test_a_collector_that_never_answers_does_not_keep_the_service_from_stopping(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces"
        patience = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
        flags = ("--threads", "1", "--drain-delay", "0")
        with serving(root, *flags, TOKENSLAB_OTLP_ENDPOINT=endpoint, **patience) as server:
            server.infer("ffn", np.ones((1, D), np.float32))
            server.signal(signal.SIGTERM)
            assert server.wait(60) == 0
        server.logged("the last spans were not taken")
