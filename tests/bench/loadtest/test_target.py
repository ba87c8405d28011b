"""A server that is asked what it serves and misbehaves: a message each time, no traceback and no wait without end."""

from __future__ import annotations

import json
import re
import socket
from itertools import count

import pytest

from bench.loadtest import target
from bench.loadtest.target import TargetError, discover
from tests.bench.loadtest.misbehaving import serve_each

METADATA = {
    "name": "ffn",
    "inputs": [{"name": "tokens", "datatype": "FP32", "shape": [-1, 8]}],
    "outputs": [{"name": "out", "datatype": "FP32", "shape": [-1, 8]}],
}


def answer(content: bytes, *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", f"Content-Length: {len(content)}", *lines))
    return head.encode() + b"\r\n" + content


def output(**fields: object) -> bytes:
    return json.dumps({"outputs": [{"name": "out", "datatype": "FP32", "shape": [1, 8], **fields}]}).encode()


FAULTS = {
    "nothing": (b"", "closed connection"),
    "no http": (b"lalala\r\n\r\n", "lalala"),
    "cut short": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nabc", "ends 96 bytes early"),
    "chunk cut short": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc", "IncompleteRead"),
    "without end": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(70_000), "and no end of it"),
    "no JSON": (answer(b"\xff[{"), "no JSON: b"),
    "deep JSON": (answer(b"[" * 60_000), "no JSON: b"),
    "a list": (answer(b"[]"), "no answer of a model"),
    "no outputs": (answer(b"{}"), "no answer of a model"),
    "words for a shape": (answer(output(shape="ab")), "no answer of a model"),
    "another output": (answer(output(name="other")), "its metadata says"),
    "JSON length of words": (answer(output(), "Inference-Header-Content-Length: x"), "Content-Length: x, of"),
    "JSON length beyond": (answer(output(), "Inference-Header-Content-Length: 9999"), "9999, of an answer"),
}

JSON = ("a list", "no outputs", "words for a shape", "another output", "JSON length of words", "JSON length beyond")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", ["metadata", "first request"])
def test_what_is_no_answer_is_named_with_its_url(monkeypatch: pytest.MonkeyPatch, fault: str, stage: str) -> None:
    monkeypatch.setattr(target, "DISCOVERY_BYTES", 65_536)
    data, message = FAULTS[fault]
    if stage == "metadata" and fault in JSON:
        message = "no metadata of a model"
    good, number = answer(json.dumps(METADATA).encode(), "Connection: close"), count()

    def serve(connection: socket.socket, _no: int) -> bool:
        connection.sendall(good if stage == "first request" and not next(number) else data)
        return False

    with serve_each(serve) as (url, _), pytest.raises(TargetError, match=re.escape(message)) as raised:
        discover(url.removesuffix("/infer"), "ffn")
    assert str(raised.value).startswith("http://127.0.0.1:")


def test_the_least_that_an_answer_is_comes_from_the_first() -> None:
    first = answer(output() + bytes(32), f"Inference-Header-Content-Length: {len(output())}")
    good, number = answer(json.dumps(METADATA).encode(), "Connection: close"), count()

    def serve(connection: socket.socket, _no: int) -> bool:
        connection.sendall(first if next(number) else good)
        return False

    with serve_each(serve) as (url, _):
        assert discover(url.removesuffix("/infer"), "ffn").answer_bytes == len(output()) + 32
