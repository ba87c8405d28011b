"""Requests in every form of the wire, and answers taken apart again, without a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from service.protocol import Decoded, Signature, decode

FFN = Signature("ffn", "3", 4, 4, has_sequences=False)
BLOCK = Signature("block", "1", 4, 4, has_sequences=True)
MIB = 1 << 20

TOKENS = np.arange(12, dtype=np.float32).reshape(3, 4) / np.float32(8)


def request(*inputs: dict[str, Any], **rest: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def tokens_json(tokens: Any = TOKENS, **change: Any) -> dict[str, Any]:
    return {
        "name": "tokens",
        "datatype": "FP32",
        "shape": list(np.shape(tokens)),
        "data": np.asarray(tokens).tolist(),
        **change,
    }


def binary(tokens: np.ndarray[Any, Any] = TOKENS, lens: np.ndarray[Any, Any] | None = None) -> tuple[bytes, bytes]:
    """-> body, header length."""
    inputs = [
        {
            "name": "tokens",
            "datatype": "FP32",
            "shape": list(tokens.shape),
            "parameters": {"binary_data_size": tokens.nbytes},
        }
    ]
    tail = tokens.tobytes()
    if lens is not None:
        kind = {8: "INT64", 4: "INT32"}[lens.dtype.itemsize]
        inputs.append(
            {
                "name": "seq_lens",
                "datatype": kind,
                "shape": list(lens.shape),
                "parameters": {"binary_data_size": lens.nbytes},
            }
        )
        tail += lens.tobytes()
    head = request(*inputs, parameters={"binary_data_output": True})
    return head + tail, str(len(head)).encode()


def read(body: bytes, signature: Signature = FFN, header: bytes | None = None, max_json: int = MIB) -> Decoded:
    return decode(signature, memoryview(body), header, max_json)


def parts(value: tuple[int | None, list[Any]]) -> tuple[dict[str, Any], bytes]:
    length, chunks = value
    body = b"".join(chunks)
    return json.loads(body[:length]), body[length:] if length is not None else b""
