"""Request bodies and answers in the Open Inference Protocol's binary form, as a client sees them.

Written apart from service.protocol, so that the benchmark's bodies are a second reading of the wire. It knows no
server, and no load generator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

JSON_LENGTH: Final = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Body:
    """One infer request: its headers and bytes, and how many tokens it carries."""

    headers: dict[str, str]
    content: bytes
    tokens: int


def infer_body(tokens: Float32, seq_lens: Int64 | None = None) -> Body:
    """`tokens` (rows, d) and, for sequences, `seq_lens` (sequences,), as binary tensors; so will the answer be."""
    tensors: list[tuple[str, str, NDArray[Any]]] = [("tokens", "FP32", np.ascontiguousarray(tokens, "<f4"))]
    if seq_lens is not None:
        tensors.append(("seq_lens", "INT64", np.ascontiguousarray(seq_lens, "<i8")))
    document = {
        "inputs": [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype,
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, datatype, array in tensors
        ],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/octet-stream", JSON_LENGTH: str(len(head))}
    return Body(headers, b"".join([head, *(array.tobytes() for _, _, array in tensors)]), len(tokens))


def read_answer(headers: Mapping[str, str], content: bytes) -> Float32:
    """The output `out` (rows, d_out) of a binary answer; `headers` must find names whatever their case.

    Raises:
        ValueError: the answer is not one FP32 tensor whose bytes its shape explains.
    """
    size = headers.get(JSON_LENGTH)
    if size is None:
        raise ValueError(f"the answer has no {JSON_LENGTH}: {content[:200]!r}")
    document = json.loads(content[: int(size)])
    outputs = document["outputs"]
    if len(outputs) != 1 or (outputs[0]["name"], outputs[0]["datatype"]) != ("out", "FP32"):
        raise ValueError(f"expected one FP32 output 'out', found {outputs}")
    return np.frombuffer(content[int(size) :], "<f4").reshape(outputs[0]["shape"])


def random_tokens(rows: int, d: int, seed: int) -> Float32:
    """(rows, d) from N(0, 1)."""
    return np.random.default_rng(seed).standard_normal((rows, d), dtype=np.float32)


def write_bodies(bodies: list[Body], folder: Path) -> None:
    """Each body as `<i>.headers` (a `Name: value` per line), `<i>.body` and `<i>.tokens`, for load.lua."""
    folder.mkdir(parents=True)
    for i, body in enumerate(bodies):
        (folder / f"{i}.headers").write_text("".join(f"{name}: {value}\n" for name, value in body.headers.items()))
        (folder / f"{i}.body").write_bytes(body.content)
        (folder / f"{i}.tokens").write_text(str(body.tokens))
