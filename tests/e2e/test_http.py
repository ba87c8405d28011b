"""HTTP below the protocol: heads, pipelines, slow readers, and what a hostile or unlucky connection may cost."""

from __future__ import annotations

import io
import json
import re
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from service.errors import DescriptorsError
from service.json_decoder import INLINE_JSON
from service.server import SPARE_DESCRIPTORS, allow_descriptors
from service.turned_away import LINGERING
from tests.e2e.conftest import D
from tests.e2e.server import Server, binary, eventually, serving


@pytest.fixture(scope="module")
def strict(models: Path) -> Iterator[Server]:
    flags = ("--max-body-mib", "4", "--max-bodies-mib", "8", "--body-timeout", "1")
    limits = {"TOKENSLAB_HEAD_TIMEOUT_S": "0.5", "TOKENSLAB_WRITE_TIMEOUT_S": "0.5", "TOKENSLAB_MAX_HEAD_KIB": "8"}
    with serving(models, *flags, **limits) as server:
        yield server
        assert not [line for line in server.log if "ERROR" in line or "Traceback" in line], server.log


def post(model: str, rows: int, extra: str = "") -> bytes:
    body, headers = binary(np.ones((rows, D), np.float32))
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + extra
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return head.encode() + body


def everything(link: socket.socket) -> bytes:
    with link.makefile("rb") as file:
        return file.read()


def close_with_reset(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def test_a_head_without_end_is_cut_off_early(strict: Server) -> None:
    sent = 0
    with strict.raw(b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: ") as link:
        try:
            for _ in range(1000):
                sent += link.send(b"a" * 100_000)
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 50 << 20
    assert strict.ask("/v2/health/live")[0] == 200


def test_a_head_over_the_limit_is_a_431_that_names_it(strict: Server) -> None:
    with strict.raw(b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 9000) as link:
        assert eventually(lambda: _answered(link, b"b"))
        got = everything(link)
    assert got.startswith(b"HTTP/1.1 431 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"] == "head: more than 8192 bytes (max_head_kib)"


def test_a_head_over_the_limit_that_comes_in_one_piece_is_a_431_too(strict: Server) -> None:
    many = "".join(f"X-{i}: {'a' * 100}\r\n" for i in range(90))
    with strict.raw(b"GET /v2 HTTP/1.1\r\n" + many.encode() + b"\r\n" + b"more" * 1000) as link:
        assert everything(link).startswith(b"HTTP/1.1 431 ")


def test_a_refusal_waits_for_the_answers_before_it(strict: Server) -> None:
    x = b"".join(post("slow", rows) for rows in (40, 1))
    chunks = b"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for bad, status in (
        (b"NONSENSE\r\n\r\n", 400),
        (chunks + b"zz\r\n", 400),
        (chunks + b"5\r\nabcde\r\n-1\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
    ):
        with strict.raw(x + bad + post("ffn", 1)) as link:
            got = everything(link)
        assert re.findall(rb"HTTP/1\.1 (\d+) ", got) == [b"200", b"200", b"%d" % status], got[-500:]
        with strict.raw(bad + post("ffn", 1)) as link:
            assert re.findall(rb"HTTP/1\.1 (\d+) ", everything(link)) == [b"%d" % status]


def test_half_a_head_behind_a_request_does_not_cost_that_request_its_answer(strict: Server) -> None:
    with strict.raw(
        post("slow", 1000) + b"GET /v2 HTTP/1.1\r\n", timeout_s=60
    ) as link:  # longer than the head's timeout
        assert everything(link).startswith(b"HTTP/1.1 200 ")


def test_a_head_begun_in_the_read_before_is_not_known_by_its_end_alone(strict: Server) -> None:
    x = np.random.default_rng().standard_normal((3, D), dtype=np.float32)
    body, headers = binary(x)
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    good = f"POST /v2/models/mean/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode()
    begun = b"POST /v2/models/ffn/infer HTTP/1.1\r\nX: "  # and the rest of this line would be another request's first
    with strict.raw(post("ffn", 1, f"X: {x[0, 0]}\r\n") + begun) as link:
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        link.sendall(good + body)
        assert b'"model_name":"ffn"' in link.recv(1 << 16)
    with strict.raw(good + body) as link:
        assert b'"model_name":"mean"' in link.recv(1 << 16), "another client's head was taken for what it is not"


def test_trailers_are_no_headers(strict: Server) -> None:
    body, headers = binary(np.ones((2, D), np.float32))
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = f"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{lines}\r\n".encode()
    trailer = b"Content-Encoding: gzip\r\nInference-Header-Content-Length: 0\r\n"
    with strict.raw(head + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer)) as link:
        assert link.recv(100).startswith(b"HTTP/1.1 200 ")


def _answered(link: socket.socket, more: bytes) -> bool:
    """Send a little until there is something to read."""
    link.sendall(more)
    link.settimeout(0.05)
    try:
        return bool(link.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        link.settimeout(20)


def test_a_head_that_stalls_or_never_comes_is_closed(strict: Server) -> None:
    for start in (b"", b"GET /v2 HTTP/1.1\r\nHost:"):
        with strict.raw(start) as link:
            assert everything(link) == b""


def test_what_is_no_http_gets_the_protocols_error(strict: Server) -> None:
    with strict.raw(b"NONSENSE\r\n\r\n") as link:
        got = everything(link)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"].startswith("HTTP: ")


@pytest.mark.parametrize("before", [b"", b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "later"])
@pytest.mark.parametrize("target", ["http://x", "http://x?y", "http://[::1", "http://x:99999/v2", "mailto:x"])
def test_a_target_that_is_none_is_told_so_and_costs_the_answer_before_nothing(
    strict: Server, target: str, before: bytes
) -> None:
    method = "CONNECT" if target == "mailto:x" else "GET"  # for which the parser itself takes anything
    with strict.raw(before + f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) as link:
        got = everything(link)
    assert [part[:4] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200 "] * bool(before) + [b"400 "]
    assert json.loads(got.rpartition(b"\r\n\r\n")[2])["error"].startswith("HTTP: ")


def test_a_transfer_coding_beside_chunked_is_refused(strict: Server) -> None:
    body = post("ffn", 1).partition(b"\r\n\r\n")[2]
    lines = "Host: x\r\nConnection: close\r\nTransfer-Encoding: gzip, chunked"
    start = f"POST /v2/models/ffn/infer HTTP/1.1\r\n{lines}\r\n\r\n"
    with strict.raw(start.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)) as link:
        got = everything(link)
    assert got.startswith(b"HTTP/1.1 501 ")
    assert b"Transfer-Encoding: found 'gzip, chunked'" in got


def test_an_upgrade_that_is_not_spoken_is_ignored_and_the_body_is_read(strict: Server) -> None:
    extra = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    with strict.raw(post("ffn", 3, extra)) as link:
        assert link.recv(100).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_and_dropped_when_their_client_leaves(strict: Server) -> None:
    with strict.raw(b"".join(post("ffn", rows) for rows in (1, 2, 3))) as link:
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 3 or len(received) < 6 * D * 4:
            received += link.recv(1 << 16)
    for _ in range(20):
        close_with_reset(strict.raw(post("ffn", 5) * 100))
    assert strict.infer("ffn", np.ones((1, D), np.float32)).shape == (1, D)
    assert eventually(lambda: strict.metric("tokenslab_queue_tokens") == 0)


def test_those_who_read_nothing_are_cut_off_and_their_answers_count_meanwhile(strict: Server) -> None:
    before = psutil.Process(strict.process.pid).memory_info().rss
    links = []
    for _ in range(40):
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(20)
        link.connect(("127.0.0.1", strict.port))
        link.sendall(post("ffn", 12_000))  # an answer of 3 MB each, if all were let in
        links.append(link)
    assert eventually(lambda: strict.metric("tokenslab_disconnects_total", stage="reply") >= 1)
    grown = psutil.Process(strict.process.pid).memory_info().rss - before
    for link in links:
        link.close()
    assert grown < 100 << 20
    body, headers = binary(np.ones((9000, D), np.float32))
    assert eventually(lambda: strict.ask("/v2/models/ffn/infer", body, headers)[0] == 200)


def test_announced_bytes_lock_nobody_out_and_a_trickle_ends(strict: Server) -> None:
    head = f"POST /v2/models/ffn/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {4 << 20}\r\n\r\n".encode()
    links = [strict.raw(head + b"a") for _ in range(8)]
    assert strict.infer("ffn", np.ones((1000, D), np.float32)).shape == (1000, D)
    assert eventually(lambda: _answered(links[0], b"a")), "a byte now and then kept the connection for ever"
    assert everything(links[0]).startswith(b"HTTP/1.1 408 ")
    for link in links:
        link.close()


def test_a_request_that_says_two_things_is_refused(strict: Server) -> None:
    file = io.BytesIO()
    np.save(file, np.ones((4, D), np.float32))
    npy = {"Content-Type": "application/x-npy"}
    status, _, data = strict.ask("/v2/models/mean/infer?seq_lens=4&seq_lens=1,3", file.getvalue(), npy)
    assert (status, b"seq_lens: 2 times in the query" in data) == (400, True)
    with strict.raw(post("ffn", 1, "Inference-Header-Content-Length: 3\r\n")) as link:
        assert link.recv(100).startswith(b"HTTP/1.1 400 ")
    with strict.raw(post("ffn", 1, "Content-Encoding: gzip\r\nContent-Encoding: identity\r\n")) as link:
        assert link.recv(100).startswith(b"HTTP/1.1 501 ")
    assert strict.ask("/v2/models/ffn/versions//infer", b"{}")[0] == 404


def test_a_connection_beyond_the_limit_is_told_so_and_one_that_ends_makes_room(models: Path) -> None:
    alive = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(models, "--threads", "1", TOKENSLAB_MAX_CONNECTIONS="3") as server:
        links = [server.raw(alive) for _ in range(3)]
        for link in links:
            assert link.recv(100).startswith(b"HTTP/1.1 200 ")
        for sent in (b"", alive, post("ffn", 1000)):
            with server.raw() as late:
                late.settimeout(20)
                got = late.recv(1 << 16)  # unasked
                with suppress(ConnectionError):
                    late.sendall(sent)
                    assert late.recv(1) == b""
            assert got.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in got
            assert "max_connections" in json.loads(got.partition(b"\r\n\r\n")[2])["error"]
        links.pop().close()
        assert eventually(lambda: server.ask("/v2/health/live")[0] == 200)
        assert eventually(lambda: server.metric("tokenslab_connections") == 3)
        assert server.metric("tokenslab_rejections_total", reason="connections") >= 3
        for link in links:
            link.close()


def test_those_who_are_turned_away_take_no_descriptor_that_the_service_needs(models: Path) -> None:
    values = ",".join(["0.12345678"] * (D * 200))
    entry = f'{{"name": "tokens", "datatype": "FP32", "shape": [200, {D}], "data": [{values}]}}'
    large = f'{{"inputs": [{entry}]}}'.encode()  # so that another process is started for it
    assert len(large) > INLINE_JSON
    with serving(models, "--threads", "1", TOKENSLAB_MAX_CONNECTIONS="3") as server:
        link = server.connect()
        link.request("GET", "/v2/health/live")
        assert link.getresponse().read()
        process = psutil.Process(server.process.pid)
        process.rlimit(psutil.RLIMIT_NOFILE, (3 + SPARE_DESCRIPTORS, process.rlimit(psutil.RLIMIT_NOFILE)[1]))
        crowd = [server.raw() for _ in range(LINGERING + 100)]
        link.request("POST", "/v2/models/ffn/infer", large)
        response = link.getresponse()
        assert response.status == 200, response.read()
        link.close()
        for one in crowd:
            one.close()


def test_more_connections_than_the_system_allows_files_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    with pytest.raises(DescriptorsError, match="needs 1001 file descriptors, this process may open 1000"):
        allow_descriptors(1001)
    allow_descriptors(100)
    assert not allowed
    allow_descriptors(900)
    assert allowed == [(900, 1000)]
