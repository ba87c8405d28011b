"""Requests that contradict HTTP, the protocol or the model, with the statuses that the documents give them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bench.bodies import JSON_LENGTH, infer_body
from bench.chaos.asks import Ask
from bench.chaos.wire import head, request


@dataclass(frozen=True, slots=True)
class Bad:
    """One bad request, whole as its sender sees it."""

    name: str
    data: bytes
    statuses: tuple[int, ...]
    answer_has_body: bool = True


def malformed(asks: Sequence[Ask]) -> tuple[Bad, ...]:
    """The list for the models that are there."""
    rows = next(ask for ask in asks if "ffn" in ask.model)
    sequences = next(ask for ask in asks if "block" in ask.model)
    return _malformed(rows.model, sequences.model, rows.shape[1])


@lru_cache(maxsize=4)
def _malformed(rows: str, sequences: str, d: int) -> tuple[Bad, ...]:
    return (
        *_of_http(f"/v2/models/{rows}/infer", d),
        *_of_protocol(rows, d),
        *_of_sequences(sequences, d),
        *_of_paths(rows),
    )


def _of_http(path: str, d: int) -> list[Bad]:
    good = np.zeros((2, d), np.float32).tobytes()
    raw = {JSON_LENGTH: "0"}
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(good), good)
    both = head("POST", path, len(chunk), {**raw, "Transfer-Encoding": "chunked"}) + chunk
    lengths = head("POST", path, len(good), {**raw, "content-length": str(len(good) + 1)}) + good
    start = head("POST", path, None, {**raw, "Transfer-Encoding": "chunked"})
    return [
        Bad("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
        Bad("length and chunks", both, (400,)),
        Bad("two lengths", lengths, (400,)),
        Bad("negative length", head("POST", path, -5, raw), (400,)),
        Bad("length beyond 64 bits", head("POST", path, 1 << 70, raw), (400,)),
        Bad("chunk of no size", start + b"zz\r\n" + good, (400,)),
        Bad("unknown transfer coding", head("POST", path, None, {**raw, "Transfer-Encoding": "x"}) + good, (400,)),
        Bad("space in a header's name", b"POST %b HTTP/1.1\r\nHost : x\r\n\r\n" % path.encode(), (400,)),
        Bad("bare line feeds in a value", b"POST %b HTTP/1.1\r\nX: a\rb\r\n\r\n" % path.encode(), (400,)),
        Bad("TRACE", head("TRACE", path), (405,)),
        Bad("HEAD", head("HEAD", path), (405,), answer_has_body=False),
        Bad("OPTIONS", head("OPTIONS", path), (405,)),
        Bad("DELETE", head("DELETE", path, 0), (405,)),
        Bad("form", request("POST", path, good, {"Content-Type": "application/x-www-form-urlencoded"}), (415,)),
        Bad("brotli", request("POST", path, good, {**raw, "Content-Encoding": "br"}), (501,)),
        Bad("gzip that is none", request("POST", path, good, {**raw, "Content-Encoding": "gzip"}), (400,)),
        Bad("two JSON lengths", request("POST", path, good, {**raw, JSON_LENGTH.lower(): "1"}), (400,)),
    ]


def _document(name: str, path: str, document: Any, status: int = 400) -> Bad:
    return Bad(name, request("POST", path, json.dumps(document).encode()), (status,))


def _of_protocol(model: str, d: int) -> list[Bad]:
    path = f"/v2/models/{model}/infer"
    body = infer_body(np.zeros((3, d), np.float32))

    def tokens(shape: Any, data: Any = (), datatype: Any = "FP32", **rest: Any) -> dict[str, Any]:
        return {"inputs": [{"name": "tokens", "shape": shape, "datatype": datatype, "data": list(data), **rest}]}

    def binary(name: str, content: bytes, **headers: str) -> Bad:
        changed = {**body.headers, **{key.replace("_", "-"): value for key, value in headers.items()}}
        return Bad(name, request("POST", path, content, changed), (400,))

    zeros = [0.0] * d
    return [
        _document("no object", path, []),
        _document("no inputs", path, {}),
        _document("no tokens", path, {"inputs": []}),
        _document("too many values", path, tokens([1, d], [*zeros, 0.0])),
        _document("wrong width", path, tokens([1, d + 1], [*zeros, 0.0])),
        _document("wrong datatype", path, tokens([1, d], zeros, "FP64")),
        _document("negative shape", path, tokens([-1, d], zeros)),
        _document("shape beyond 64 bits", path, tokens([1 << 65, d], zeros)),
        _document("shape whose product overflows", path, tokens([1 << 62, 1 << 62, d], zeros)),
        _document("shape of words", path, tokens(["1", d], zeros)),
        _document("words for numbers", path, tokens([1, d], ["x"] * d)),
        _document("values beyond float32", path, tokens([1, d], [1e300] * d)),
        _document("priority of words", path, {**tokens([1, d], zeros), "parameters": {"priority": "high"}}),
        _document("endless timeout", path, {**tokens([1, d], zeros), "parameters": {"timeout": 1 << 70}}),
        _document("other output", path, {**tokens([1, d], zeros), "outputs": [{"name": "none"}]}),
        Bad("NaN in JSON", request("POST", path, json.dumps(tokens([1, d], [float("nan")] * d)).encode()), (400,)),
        Bad("deep JSON", request("POST", path, b"[" * 50_000), (400,)),
        Bad("cut JSON", request("POST", path, b'{"inputs": ['), (400,)),
        Bad("no UTF-8", request("POST", path, b'{"inputs": "\xff\xfe"}'), (400,)),
        binary("short tensor", body.content[:-1]),
        binary("long tensor", body.content + b"\0"),
        binary("JSON length beyond the body", body.content, Inference_Header_Content_Length="999999"),
        binary("JSON length of words", body.content, Inference_Header_Content_Length="1e3"),
        Bad(
            "no npy", request("POST", path, b"\x93NUMPY\x01\x00\xff\xff", {"Content-Type": "application/x-npy"}), (400,)
        ),
    ]


def _of_sequences(model: str, d: int) -> list[Bad]:
    path = f"/v2/models/{model}/infer"
    tokens = np.zeros((6, d), np.float32)
    lens = {"sum": [2, 3], "negative": [-2, 8], "sum that overflows": [2**62, 2**62, 2**62, 2**62, 6]}
    bad = []
    for name, values in lens.items():
        body = infer_body(tokens, np.array(values, np.int64))
        bad.append(Bad(f"seq_lens: {name}", request("POST", path, body.content, body.headers), (400, 413)))
    return bad


def _of_paths(model: str) -> list[Bad]:
    names = ["none", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..", "a%00b", "%ff%fe", "%F0%9F%92%A9", "x" * 3000]
    bad = [Bad(f"model {name[:20]}", request("POST", f"/v2/models/{name}/infer"), (404,)) for name in names]
    versions = ["9", "-1", "1.0", "01", "%2e%2e", str(1 << 70)]
    return bad + [
        Bad(f"version {version[:20]}", request("POST", f"/v2/models/{model}/versions/{version}/infer"), (404,))
        for version in versions
    ]
