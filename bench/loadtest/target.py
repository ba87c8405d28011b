"""The model under test, as its server describes it: names, datatypes and shapes of inputs, and requests made for it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.bodies import JSON_LENGTH, Body

DISCOVERY_S: Final = 10.0
DISCOVERY_BYTES: Final = 16 << 20
JSON_VALUE_BYTES: Final = 2  # a digit and a comma, at least
NUMPY: Final = {
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "<u1",
}


class TargetError(Exception):
    """The server cannot be asked, or its model cannot be load-tested; the message says why."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a model; -1 in `shape` is a dimension that a request chooses."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def random(self, tokens: int, rng: np.random.Generator) -> NDArray[Any]:
        """Values for a request of `tokens` tokens.

        Floats are from N(0, 1), with the first -1 the tokens, or, of two in a row, the second ([batch, seq, d]). A
        vector of integers holds the length of the request's one sequence; other integers are ones (ids, masks).
        """
        dtype = np.dtype(NUMPY[self.datatype])
        if dtype.kind in "iu" and len(self.shape) == 1:
            return np.array([tokens], dtype)
        variable = [axis for axis, size in enumerate(self.shape) if size == -1]
        of_tokens = variable[1] if variable[:2] == [0, 1] else variable[0] if variable else None
        shape = [tokens if axis == of_tokens else max(1, size) for axis, size in enumerate(self.shape)]
        if dtype.kind == "f":
            return rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        return np.ones(shape, dtype)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model answers, what it takes, and how it is asked: binary tensors or JSON.

    A 200 of less than `answer_bytes` is no answer, to one token or more.
    """

    url: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    binary: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    answer_bytes: int = 0

    def body(self, tokens: int, rng: np.random.Generator) -> Body:
        """A request of `tokens` random tokens."""
        tensors: list[dict[str, Any]] = []
        tail: list[bytes] = []
        for each in self.inputs:
            value = each.random(tokens, rng)
            tensor = {"name": each.name, "datatype": each.datatype, "shape": value.shape}
            if self.binary:
                tail.append(value.tobytes())
                tensors.append({**tensor, "parameters": {"binary_data_size": value.nbytes}})
            else:
                tensors.append({**tensor, "data": value.ravel().tolist()})
        document: dict[str, Any] = {"inputs": tensors}
        if self.binary:
            document["parameters"] = {"binary_data_output": True}
        head = json.dumps(document, separators=(",", ":")).encode()
        headers = {**dict(self.headers), "Content-Type": "application/json"}
        if self.binary:
            headers |= {"Content-Type": "application/octet-stream", JSON_LENGTH: str(len(head))}
        return Body(headers, b"".join([head, *tail]), tokens)


def discover(server: str, model: str, *, binary: bool = True, headers: Mapping[str, str] | None = None) -> Target:
    """The model's metadata, read from `server` (scheme, host and port), and one request of one token, checked.

    Raises:
        TargetError: the server does not answer as the protocol says, or an input has a type that no load is made for.
    """
    base, given = f"{server.rstrip('/')}/v2/models/{model}", dict(headers or {})
    metadata = _document(base, _ask(base, given, None)[1])
    try:
        inputs = tuple(Input(i["name"], i["datatype"], tuple(map(int, i["shape"]))) for i in metadata["inputs"])
        outputs = tuple(str(output["name"]) for output in metadata["outputs"])
    except (KeyError, TypeError, ValueError) as fault:
        raise TargetError(f"{base}: no metadata of a model: {str(metadata)[:200]}") from fault
    for each in inputs:
        if each.datatype not in NUMPY or (each.datatype == "FP16" and not binary):
            raise TargetError(
                f"input {each.name!r}: {each.datatype} cannot be sent {'binary' if binary else 'as JSON'}"
            )
    target = Target(f"{base}/infer", inputs, outputs, binary, tuple(given.items()))
    return replace(target, answer_bytes=_check(target))


def _check(target: Target) -> int:
    """Load on a model that only answers errors measures nothing: ask once before. Returns an answer's least size."""
    body = target.body(1, np.random.default_rng(0))
    headers, content = _ask(target.url, body.headers, body.content)
    size = headers.get(JSON_LENGTH)
    if size is not None and not (size.isdecimal() and int(size) <= len(content)):
        raise TargetError(f"{target.url}: {JSON_LENGTH}: {size}, of an answer of {len(content)} bytes")
    document = _document(target.url, content if size is None else content[: int(size)])
    try:
        answered = {str(output["name"]): prod(map(int, output["shape"])) for output in document["outputs"]}
    except (KeyError, TypeError, ValueError) as fault:
        raise TargetError(f"{target.url}: no answer of a model: {str(document)[:200]}") from fault
    if set(answered) != set(target.outputs):
        raise TargetError(f"{target.url}: answered {list(answered)}, its metadata says {list(target.outputs)}")
    return len(content) if size is not None else JSON_VALUE_BYTES * sum(answered.values())


def _document(url: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as fault:
        raise TargetError(f"{url}: no JSON: {content[:80]!r}") from fault


def _ask(url: str, headers: Mapping[str, str], content: bytes | None) -> tuple[Mapping[str, str], bytes]:
    if not url.startswith(("http://", "https://")):
        raise TargetError(f"{url}: expected http:// or https://")
    try:  # the scheme was just looked at
        request = urllib.request.Request(url, content, dict(headers))  # noqa: S310
        with urllib.request.urlopen(request, timeout=DISCOVERY_S) as answer:  # noqa: S310
            return answer.headers, _read(url, answer)
    except urllib.error.HTTPError as refusal:
        with refusal:
            raise TargetError(f"{url}: {refusal.code} {refusal.read(500)!r}") from refusal
    except (OSError, HTTPException) as fault:
        raise TargetError(f"{url}: {fault or type(fault).__name__}") from fault


def _read(url: str, answer: HTTPResponse) -> bytes:
    """The whole body, if it ends within bounds; urllib's own timeout starts again with every byte."""
    content, until = bytearray(), time.monotonic() + DISCOVERY_S
    while piece := answer.read1(1 << 16):
        content += piece
        if len(content) > DISCOVERY_BYTES or time.monotonic() > until:
            raise TargetError(f"{url}: {len(content)} bytes of an answer, and no end of it")
    if answer.length:
        raise TargetError(f"{url}: an answer that ends {answer.length} bytes early")
    return bytes(content)
