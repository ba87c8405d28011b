"""Every fault is told and counted alike, whether a request goes the direct way, the ASGI way or the traced one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import D
from tests.e2e.server import Server, answer, binary, out_of, serving

KEY = "alice-" + "a" * 16
LIMITS = ("--max-queue-tokens", "500", "--max-sequence-tokens", "50", "--max-body-mib", "1", "--max-json-mib", "0.1")
WAYS = ("direct", "asgi", "traced")


@pytest.fixture(scope="module")
def servers(models: Path) -> Iterator[tuple[Server, Server]]:
    """One without and one with tracing, to a collector that is not there."""
    keys = {"TOKENSLAB_API_KEYS": f"alice:{KEY}"}
    traced = {**keys, "TOKENSLAB_OTLP_ENDPOINT": "http://127.0.0.1:9/v1/traces"}
    with (
        serving(models, "--threads", "1", *LIMITS, **keys) as plain,
        serving(models, "--threads", "1", *LIMITS, **traced) as other,
    ):
        yield plain, other


def rows(count: int, width: int = D) -> Any:
    return np.ones((count, width), np.float32)


def json_body(**changes: Any) -> tuple[bytes, dict[str, str]]:
    entry = {"name": "tokens", "datatype": "FP32", "shape": [1, D], "data": [0.5] * D, **changes}
    return json.dumps({"inputs": [entry]}).encode(), {"Content-Type": "application/json"}


CASES: dict[str, tuple[str, tuple[bytes, dict[str, str]], int, str]] = {
    "width": ("ffn", binary(rows(2, D + 1)), 400, "invalid"),
    "lengths": ("mean", binary(rows(3), [1, 1]), 400, "invalid"),
    "json": ("ffn", (b"{", {"Content-Type": "application/json"}), 400, "invalid"),
    "data": ("ffn", json_body(data=[0.5]), 400, "invalid"),
    "nan": ("ffn", binary(rows(1) * np.nan, binary_data_output=False), 400, "invalid"),
    "priority": ("ffn", binary(rows(1), priority=9), 400, "invalid"),
    "model": ("none", binary(rows(1)), 404, "not_found"),
    "version": ("ffn/versions/7", binary(rows(1)), 404, "not_found"),
    "rows": ("ffn", binary(rows(501)), 413, "too_large"),
    "sequence": ("mean", binary(rows(51), [51]), 413, "too_large"),
    "answer": ("ffn", binary(rows(490), binary_data_output=False), 413, "too_large"),
    "body": ("ffn", binary(rows(5000)), 413, "too_large"),
    "media": ("ffn", (b"x", {"Content-Type": "text/plain"}), 415, "media_type"),
    "stateful": ("ffn", binary(rows(1), sequence_id=3), 501, "unsupported"),
    "coding": ("ffn", (b"x", {"Content-Encoding": "br"}), 501, "unsupported"),
}


def post(server: Server, model: str, body: bytes, headers: dict[str, str], key: str) -> tuple[int, Any, bytes]:
    link: HTTPConnection = server.connect()
    try:
        link.request("POST", f"/v2/models/{model}/infer", body, {**headers, "X-Api-Key": key})
        return answer(link.getresponse())
    finally:
        link.close()


def rejections(server: Server) -> dict[str, float]:
    text = server.ask("/metrics")[2].decode()
    return {k: float(v) for k, v in re.findall(r'^tokenslab_rejections_total{reason="(\w+)"} (\S+)$', text, re.M)}


def told(servers: tuple[Server, Server], way: str, case: str, key: str = KEY) -> tuple[int, str, dict[str, float]]:
    """Status, message, and what was counted of a fault."""
    model, (body, headers), _, _ = CASES[case]
    server = servers[way == "traced"]
    before = rejections(server)
    extra = {"Expect": "nothing"} if way == "asgi" else {}
    status, _, data = post(server, model, body, {**headers, **extra}, key)
    after = rejections(server)
    return (
        status,
        json.loads(data)["error"],
        {k: after[k] - before.get(k, 0) for k in after if after[k] > before.get(k, 0)},
    )


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_told_and_counted_alike_on_every_way(servers: tuple[Server, Server], case: str) -> None:
    direct, *others = [told(servers, way, case) for way in WAYS]
    assert others == [direct, direct]
    assert (direct[0], direct[2]) == (CASES[case][2], {CASES[case][3]: 1})


def test_a_wrong_key_is_refused_alike_on_every_way(servers: tuple[Server, Server]) -> None:
    found = [told(servers, way, "width", "wrong-" + "w" * 16) for way in WAYS]
    assert {(status, *counted.items()) for status, _, counted in found} == {(401, ("unauthorized", 1.0))}


def test_an_answer_is_the_same_on_every_way(servers: tuple[Server, Server]) -> None:
    plain, traced = servers
    x = np.random.default_rng().standard_normal((7, D), dtype=np.float32)
    body, headers = binary(x, [3, 4])
    answers = [
        post(plain, "mean", body, headers, KEY),
        post(plain, "mean", body, {**headers, "Expect": "nothing"}, KEY),
        post(traced, "mean", body, headers, KEY),
    ]
    assert [status for status, _, _ in answers] == [200] * 3
    assert len({out_of(got, data).tobytes() for _, got, data in answers}) == 1


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v2/models/none", None, "not_found"),
        ("/nowhere", None, "not_found"),
        ("/v2/models/ffn", b"", "method"),
        ("/v2/repository/index", b"[", "invalid"),
    ],
)
def test_faults_on_every_other_path_are_counted_too(
    servers: tuple[Server, Server], path: str, body: bytes | None, reason: str
) -> None:
    server = servers[0]
    before = rejections(server).get(reason, 0)
    assert server.ask(path, body, {"X-Api-Key": KEY, "Content-Type": "application/json"})[0] >= 400
    assert rejections(server)[reason] == before + 1
