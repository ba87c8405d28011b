"""The wire against a real server: right answers in every form, the right status for every fault, no harm to others."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import socket
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import D
from tests.e2e.server import Server, answer, binary, out_of

RNG = np.random.default_rng()


def tokens(rows: int) -> Any:
    return RNG.standard_normal((rows, D), dtype=np.float32)


def error_of(data: bytes) -> str:
    body = json.loads(data)
    assert list(body) == ["error"]
    return str(body["error"])


def test_health_metadata_and_index(server: Server) -> None:
    assert server.ask("/v2/health/live")[0] == 200
    assert server.ask("/v2/health/ready")[0] == 200
    assert json.loads(server.ask("/v2")[2])["name"] == "tokenslab"
    metadata = json.loads(server.ask("/v2/models/mean")[2])
    assert metadata["inputs"] == [
        {"name": "tokens", "datatype": "FP32", "shape": [-1, D]},
        {"name": "seq_lens", "datatype": "INT64", "shape": [-1]},
    ]
    assert metadata["parameters"]["certificate"]["kind"] == "exact"
    assert server.ask("/v2/models/mean/versions/1/ready")[0] == 200
    index = json.loads(server.ask("/v2/repository/index", b"")[2])
    assert [(m["name"], m["state"]) for m in index][:2] == [("ffn", "READY"), ("ffn-fp32", "READY")]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v2/models/none", "GET", 404),
        ("/v2/models/none/infer", "POST", 404),
        ("/v2/models/ffn/versions/9/infer", "POST", 404),
        ("/v2/models/ffn/versions/9", "GET", 404),
        ("/v2/models/ffn/infer", "GET", 405),
        ("/v2/models/ffn/", "GET", 404),
        ("/v2/health/ready/", "GET", 404),
        ("/v2/health/live", "POST", 405),
        ("/nothing", "GET", 404),
    ],
)
def test_unknown_paths_and_methods_have_the_protocols_error(
    server: Server, path: str, method: str, status: int
) -> None:
    got, _, data = server.ask(path, b"" if method == "POST" else None, method=method)
    assert got == status
    assert error_of(data)


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health_is_told_to_who_asks_for_the_head_alone(server: Server, path: str) -> None:
    status, headers, body = server.ask(path, method="HEAD")
    assert (status, body) == (200, b"")
    assert headers["content-length"] == server.ask(path)[1]["content-length"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v2/models", "GET /v2/models: Not Found; /docs has the paths"),
        ("/v2/repository/index", "GET /v2/repository/index: Method Not Allowed; it takes POST"),
    ],
)
def test_who_takes_a_wrong_turn_is_told_where_to_go(server: Server, path: str, said: str) -> None:
    assert error_of(server.ask(path)[2]) == said


def test_json_binary_raw_and_npy_give_the_same_bits(server: Server) -> None:
    x = tokens(3)
    want = server.infer("ffn", x)
    entry = {"name": "tokens", "datatype": "FP32", "shape": [3, D], "data": x.tolist()}
    _, headers, data = server.ask("/v2/models/ffn/infer", json.dumps({"inputs": [entry], "id": "q"}).encode())
    reply = json.loads(data)
    assert headers["content-type"] == "application/json"
    assert reply["id"] == "q"
    np.testing.assert_array_equal(np.float32(reply["outputs"][0]["data"]).reshape(3, D), want)
    raw = server.ask("/v2/models/ffn/versions/1/infer", x.tobytes(), {"Inference-Header-Content-Length": "0"})
    np.testing.assert_array_equal(out_of(raw[1], raw[2]), want)
    file = io.BytesIO()
    np.save(file, x)
    npy = server.ask("/v2/models/ffn/infer", file.getvalue(), {"Content-Type": "application/x-npy"})
    assert npy[1]["content-type"] == "application/x-npy"
    np.testing.assert_array_equal(np.load(io.BytesIO(npy[2])), want)


def test_npy_for_sequences_takes_their_lengths_from_the_query(server: Server) -> None:
    x = tokens(5)
    file = io.BytesIO()
    np.save(file, x)
    got = server.ask("/v2/models/mean/infer?seq_lens=2,3", file.getvalue(), {"Content-Type": "application/x-npy"})
    np.testing.assert_array_equal(np.load(io.BytesIO(got[2])), server.infer("mean", x, [2, 3]))


def test_every_answer_says_where_its_time_went(server: Server) -> None:
    body, headers = binary(tokens(2))
    timing = server.ask("/v2/models/ffn/infer", body, headers)[1]["server-timing"]
    queue, compute, window = timing.split(", ")
    assert float(queue.removeprefix("queue;dur=")) >= 0
    assert float(compute.removeprefix("compute;dur=")) > 0
    assert int(window.removeprefix('window;desc="').removesuffix('"')) >= 2


def test_zero_rows_zero_sequences_and_zero_batches_are_answered_with_as_many_rows(server: Server) -> None:
    assert server.infer("ffn", tokens(0)).shape == (0, D)
    assert server.infer("mean", tokens(0)).shape == (0, D)
    assert server.infer("mean", tokens(3), [0, 3, 0]).shape == (3, D)
    assert server.infer("mean", np.zeros((2, 0, D), np.float32)).shape == (2, 0, D)
    assert server.infer("mean", np.zeros((0, 4, D), np.float32)).shape == (0, 4, D)


def test_a_padded_batch_equals_its_sequences_alone_and_zeros(server: Server) -> None:
    x = RNG.standard_normal((3, 6, D), dtype=np.float32)
    lens = [4, 0, 6]
    out = server.infer("mean", x, lens)
    for row, original, n in zip(out, x, lens, strict=True):
        if n:
            np.testing.assert_array_equal(row[:n], server.infer("mean", original[:n]))
        assert not row[n:].any()


def test_tritons_client_works_unchanged(server: Server) -> None:
    from tritonclient import http
    from tritonclient.utils import InferenceServerException

    client = http.InferenceServerClient(f"127.0.0.1:{server.port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mean")
    assert client.get_model_metadata("mean", "1")["name"] == "mean"
    assert {m["name"] for m in client.get_model_repository_index()} >= {"ffn", "mean"}
    x = tokens(5)
    for binary_data in (True, False):
        first = http.InferInput("tokens", x.shape, "FP32").set_data_from_numpy(x, binary_data)
        lens = http.InferInput("seq_lens", [2], "INT64").set_data_from_numpy(np.array([2, 3]), binary_data)
        wanted = [http.InferRequestedOutput("out", binary_data)]
        result = client.infer("mean", [first, lens], outputs=wanted, request_id="r1", timeout=5_000_000)
        np.testing.assert_array_equal(result.as_numpy("out"), server.infer("mean", x, [2, 3]))
        assert result.get_response()["id"] == "r1"
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer("none", [first])
    client.close()


def test_tritons_aio_client_works_unchanged(server: Server) -> None:
    from tritonclient.http import aio

    async def run() -> Any:
        client = aio.InferenceServerClient(f"127.0.0.1:{server.port}")
        try:
            assert await client.is_server_ready()
            x = tokens(4)
            inputs = [aio.InferInput("tokens", x.shape, "FP32").set_data_from_numpy(x)]
            results = await asyncio.gather(*(client.infer("ffn", inputs) for _ in range(8)))
            return x, [r.as_numpy("out") for r in results]
        finally:
            await client.close()

    x, outs = asyncio.run(run())
    for out in outs:
        np.testing.assert_array_equal(out, server.infer("ffn", x))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_inflated_within_the_body_limit(server: Server, encoding: str) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if encoding == "gzip" else zlib.compress
    x = tokens(3)
    body, headers = binary(x)
    headers["Content-Encoding"] = encoding
    status, got, data = server.ask("/v2/models/ffn/infer", pack(body), headers)
    assert status == 200
    np.testing.assert_array_equal(out_of(got, data), server.infer("ffn", x))
    for broken, expected, message in (
        (pack(body)[:-3], 400, "cut short"),
        (pack(body) + b"more", 400, "followed by other bytes"),
        (body, 400, f"not {encoding}"),
        (pack(bytes(64 << 20)), 413, f"after {encoding} (max_body_mib)"),
    ):
        status, _, data = server.ask("/v2/models/ffn/infer", broken, headers)
        assert (status, message in error_of(data)) == (expected, True), data


def test_tritons_client_may_compress(server: Server) -> None:
    from tritonclient import http

    x = tokens(6)
    with http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        inputs = [http.InferInput("tokens", x.shape, "FP32").set_data_from_numpy(x)]
        for algorithm in ("gzip", "deflate"):
            result = client.infer("ffn", inputs, request_compression_algorithm=algorithm)
            np.testing.assert_array_equal(result.as_numpy("out"), server.infer("ffn", x))


def altered(change: str) -> tuple[bytes, dict[str, str]]:
    body, headers = binary(tokens(3))
    length = int(headers["Inference-Header-Content-Length"])
    match change:
        case "short":
            return body[:-1], headers
        case "long":
            return body + b"\0", headers
        case "header beyond body":
            return body, {**headers, "Inference-Header-Content-Length": str(len(body) + 1)}
        case "no header":
            return body, {"Content-Type": "application/octet-stream"}
        case "text":
            return body, {**headers, "Content-Type": "text/plain"}
        case "gzip":
            return body, {**headers, "Content-Encoding": "br"}
        case "width":
            return binary(np.zeros((3, D + 1), np.float32))
        case "rank":
            return binary(np.zeros((1, 1, 3, D), np.float32))
        case "dtype":
            return body.replace(b"FP32", b"FP64"), headers
        case "overflow":
            head = body[:length].replace(f"[3, {D}]".encode(), f"[{2**62}, {D}]".encode())
            return head + body[length:], {**headers, "Inference-Header-Content-Length": str(len(head))}
        case "deep":
            return b"[" * 100_000, {}
        case "npy dtype":
            file = io.BytesIO()
            np.save(file, np.zeros((3, D)))
            return file.getvalue(), {"Content-Type": "application/x-npy"}
        case "sequence":
            return binary(np.zeros((2049, D), np.float32))
    raise AssertionError(change)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ("short", 400, "binary_data_size"),
        ("long", 400, "1 bytes after the last tensor"),
        ("header beyond body", 400, "Inference-Header-Content-Length"),
        ("no header", 400, "Inference-Header-Content-Length: missing"),
        ("text", 415, "Content-Type: found 'text/plain'"),
        ("gzip", 501, "Content-Encoding: found 'br'"),
        ("width", 400, f"width {D + 1}, expected {D}"),
        ("rank", 400, "rank 4"),
        ("dtype", 400, "FP64"),
        ("overflow", 400, "more than any body can hold"),
        ("deep", 400, "JSON"),
        ("npy dtype", 400, "dtype <f8"),
    ],
)
def test_a_bad_request_gets_its_status_and_its_neighbours_get_their_answers(
    server: Server, change: str, status: int, message: str
) -> None:
    x = tokens(7)
    want = server.infer("ffn", x)
    stop, wrong = threading.Event(), []

    def neighbour() -> None:
        while not stop.is_set():
            if not np.array_equal(server.infer("ffn", x), want):
                wrong.append(x)

    threads = [threading.Thread(target=neighbour) for _ in range(3)]
    for thread in threads:
        thread.start()
    body, headers = altered(change)
    for _ in range(5):
        got, _, data = server.ask("/v2/models/ffn/infer", body, headers)
        assert got == status
        assert message in error_of(data)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_sequence_over_the_maximum_is_too_large(server: Server) -> None:
    status, _, data = server.ask("/v2/models/mean/infer", *altered("sequence"))
    assert (status, "max_sequence_tokens" in error_of(data)) == (413, True)


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Server) -> None:
    size = 5 << 20
    head = f"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    with server.raw(head) as link:  # not one byte of the body is sent
        got = link.makefile("rb").read()
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in got.lower()
    assert b"max_body_mib" in got
    status, _, data = server.ask("/v2/models/ffn/infer", bytes(size))
    assert (status, "max_body_mib" in error_of(data)) == (413, True), "a client that sends first still sees the answer"


def test_a_chunked_body_is_read_and_bounded(server: Server) -> None:
    x = tokens(2)

    def post(data: bytes) -> tuple[int, bytes]:
        link = server.connect()
        pieces = [data[i : i + 100_000] for i in range(0, len(data), 100_000)]
        link.request(
            "POST",
            "/v2/models/ffn/infer",
            iter(pieces),
            {"Inference-Header-Content-Length": "0"},
            encode_chunked=True,
        )
        status, _, body = answer(link.getresponse())
        link.close()
        return status, body

    status, body = post(x.tobytes())
    assert status == 200
    assert server.infer("ffn", x).tobytes() in body
    assert post(bytes(5 << 20))[0] == 413


def test_a_body_that_stalls_is_timed_out_and_one_that_ends_early_is_counted(server: Server) -> None:
    body, headers = binary(tokens(4))
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = f"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode()
    with server.raw(head + body[:100]) as link:
        got = link.makefile("rb").read()
    assert got.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout_s" in got
    before = server.metric("tokenslab_disconnects_total", stage="body")
    server.raw(head + body[:100]).close()
    deadline = threading.Event()
    for _ in range(200):
        if server.metric("tokenslab_disconnects_total", stage="body") == before + 1:
            break
        deadline.wait(0.02)
    else:
        pytest.fail("a lost body was not counted")


def test_a_passed_deadline_is_a_504_that_says_how_long(server: Server) -> None:
    body, headers = binary(tokens(2000), timeout=1)
    status, _, data = server.ask("/v2/models/slow/infer", body, headers)
    assert status == 504
    assert "timeout: not answered within" in error_of(data)


def test_nan_leaves_as_binary_and_never_as_json(server: Server) -> None:
    x = tokens(1)
    x[0, 0] = np.nan
    assert np.isnan(server.infer("ffn", x)).all()
    body, headers = binary(x, binary_data_output=False)
    status, _, data = server.ask("/v2/models/ffn/infer", body, headers)
    assert (status, "binary" in error_of(data)) == (400, True)


def test_the_work_of_clients_that_left_is_dropped_before_packing(server: Server) -> None:
    before = server.metric("tokenslab_disconnects_total", stage="queue")
    body, headers = binary(tokens(2000))
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode()
    links = [server.raw(head + body) for _ in range(8)]
    for link in links:
        link.close()
    assert server.infer("slow", tokens(1)).shape == (1, D)
    assert server.metric("tokenslab_disconnects_total", stage="queue") - before >= 4


def test_docs_name_no_other_host(server: Server) -> None:
    page = server.ask("/docs")[2].decode()
    assert "swagger" in page
    assert "https://" not in page
    assert "//cdn" not in page
    document = json.loads(server.ask("/openapi.json")[2])
    operation = document["paths"]["/v2/models/{name}/infer"]["post"]
    assert set(operation["responses"]) >= {"200", "400", "404", "408", "413", "415", "429", "504"}


def test_a_control_route_takes_no_large_body(server: Server) -> None:
    status, _, data = server.ask("/v2/repository/index", bytes(1 << 20), {"Content-Type": "application/json"})
    assert (status, "control routes" in error_of(data)) == (413, True)


def test_garbage_that_is_no_http_costs_only_its_own_connection(server: Server) -> None:
    with server.raw(b"\x16\x03\x01 not http\r\n\r\n") as link:
        assert link.makefile("rb").read().startswith(b"HTTP/1.1 400 ")
    with server.raw(b"POST /v2/models/ffn/infer HTTP/1.1\r\n") as link:
        link.shutdown(socket.SHUT_RDWR)
    assert server.infer("ffn", tokens(1)).shape == (1, D)


@pytest.mark.parametrize("way", ["json", "binary"])
def test_large_json_in_and_out_gives_the_same_bits(server: Server, way: str) -> None:
    x = tokens(2500)  # 160,000 values: over what is parsed, and written, in one turn of the loop
    headers: dict[str, str] = {}
    if way == "json":
        entry = {"name": "tokens", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}
        body = json.dumps({"inputs": [entry]}).encode()
    else:
        body, headers = binary(x, binary_data_output=False)
    status, got, data = server.ask("/v2/models/ffn/infer", body, headers)
    assert (status, got["content-type"]) == (200, "application/json")
    out = np.float32(json.loads(data)["outputs"][0]["data"]).reshape(x.shape)
    np.testing.assert_array_equal(out, server.infer("ffn", x))
