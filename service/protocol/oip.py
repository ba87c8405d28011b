"""Open Inference Protocol v2 over HTTP: an infer body -> Decoded, and the answer's headers and body."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np
import orjson

from service.errors import InvalidInput, TooLarge, Unsupported
from service.packing import Float32
from service.protocol.arrange import Decoded, Signature, arrange, in_kind, memory_shape, show, token_shape
from service.protocol.memory import arrange_memory
from service.protocol.npy import octets
from service.protocol.tensors import (
    INPUTS,
    MEMORY_INPUTS,
    Tensor,
    check_size,
    floats,
    json_object,
    kind,
    lengths,
    refuse_shared_memory,
    tensors,
)

OUTPUT: Final = "out"
_FP32: Final = np.dtype("<f4")
_KNOWN_HEAD: Final = 1024  # bytes; a longer head carries data
_JSON_FLOAT: Final = 12  # bytes of a float32 and its comma, about


def decode(signature: Signature, body: memoryview, header_length: bytes | None, max_json: int) -> Decoded:
    """An infer body, JSON alone or JSON and binary tensors, -> Decoded."""
    if header_length is None:
        json_size = len(body)
    else:
        json_size = _header_size(header_length, len(body))
        if json_size == 0:
            return _decode_raw(signature, body)
    if json_size > max_json:
        raise TooLarge(f"JSON part: {json_size} bytes, the limit is {max_json} (max_json_mib); send binary tensors")
    head = bytes(body[:json_size])
    # Clients send the same head again and again, unless they number their requests.
    read = _read_known_head if json_size <= _KNOWN_HEAD and b'"id"' not in head else _read_head
    request = read(signature, head, len(body) - json_size, max_json)
    if request.plain is not None:
        tokens = np.ndarray(request.plain, _FP32, body, json_size + request.tokens.start)
        return Decoded(
            tokens,
            None,
            None,
            None,
            request.id,
            request.binary,
            False,
            request.timeout_s,
            None,
            request.priority,
            request.isolate,
        )
    binary = body[json_size:]
    values = floats(request.tokens, binary)
    lens = None if request.seq_lens is None else lengths(request.seq_lens, binary)
    decoded = arrange(
        signature,
        values,
        request.tokens.shape,
        lens,
        id=request.id,
        binary=request.binary,
        timeout_s=request.timeout_s,
        priority=request.priority,
        isolate=request.isolate,
    )
    if request.memory is not None:
        rows = floats(request.memory, binary).reshape(request.memory.shape)
        memory_lens = None if request.memory_seq_lens is None else lengths(request.memory_seq_lens, binary)
        decoded.memory = arrange_memory(rows, memory_lens, request.tokens.shape, lens)
    return decoded


@dataclass(frozen=True, slots=True)
class _Head:
    """All that the JSON part says."""

    tokens: Tensor
    seq_lens: Tensor | None
    id: str | None
    binary: bool
    timeout_s: float | None
    memory: Tensor | None
    memory_seq_lens: Tensor | None
    priority: int
    isolate: bool
    plain: tuple[int, int] | None  # (rows, d_in) where the tokens are binary, packed, and all that there is


def _read_head(signature: Signature, text: bytes, binary_size: int, max_json: int) -> _Head:
    document = _parse(text)
    parameters = json_object(document.get("parameters"), "parameters")
    _refuse_unsupported(parameters)
    inputs = tensors(document, binary_size, INPUTS if signature.d_memory is None else MEMORY_INPUTS)
    tokens = inputs.get("tokens")
    if tokens is None:
        raise InvalidInput("inputs: 'tokens' is missing")
    id_ = document.get("id")
    if id_ is not None and not isinstance(id_, str):
        raise InvalidInput(f"id: found {kind(id_)}, expected a string")
    binary = _wants_binary(document, parameters)
    shape = token_shape(tokens.shape, tokens.datatype, signature)
    if not binary:
        _refuse_large_json(prod(shape[:-1]) * signature.d_out, max_json)
    memory = inputs.get("memory")
    if memory is not None:
        memory_shape(memory.shape, memory.datatype, len(shape), signature)
    elif signature.d_memory is not None:
        raise InvalidInput("inputs: 'memory' is missing: this model's tokens attend to one memory per sequence")
    plain = None
    if len(inputs) == 1 and len(shape) == 2 and tokens.size and not signature.has_sequences:
        check_size(tokens)
        plain = shape[0], shape[1]
    return _Head(
        *(tokens, inputs.get("seq_lens"), id_, binary),
        timeout_s=_whole(parameters, "timeout", "microseconds") / 1e6 or None,
        memory=memory,
        memory_seq_lens=inputs.get("memory_seq_lens"),
        priority=_whole(parameters, "priority", "1 (highest) and on, or 0 for the default"),
        isolate=_flag(parameters, "isolate", "parameters", default=False),
        plain=plain,
    )


_read_known_head = lru_cache(maxsize=1024)(_read_head)


def encode(signature: Signature, request: Decoded, out: Float32) -> tuple[int | None, list[bytes | memoryview]]:
    """`out` (rows, d_out) -> the length of the JSON part if tensors follow it (else None), and the body's parts."""
    if request.binary:
        out = np.ascontiguousarray(in_kind(request, out))
        if request.id is None:
            head = _known_binary_head(signature, out.shape)
        else:
            head = _binary_head(signature, out.shape, request.id)
        return len(head), [head, octets(out)]
    return None, [b"".join(encode_json(signature, request, out, max(1, out.size)))]


def encode_json(signature: Signature, request: Decoded, out: Float32, values: int) -> Iterator[bytes]:
    """The parts of `encode`'s JSON, `values` numbers at a time: the caller may do something else between them."""
    out = np.ascontiguousarray(in_kind(request, out))
    if not np.isfinite(out).all():
        raise InvalidInput("out: NaN or Inf has no form in JSON; ask for binary tensors (binary_data_output)")
    return _json_parts(signature, request, out, values)


def _json_parts(signature: Signature, request: Decoded, out: Float32, values: int) -> Iterator[bytes]:
    # No `parameters` here: the C++ client takes any for a sign of binary data.
    frame = orjson.dumps(_reply(signature, out.shape, None, {"data": []}))
    before, _, after = frame.rpartition(b"[]")
    flat = out.ravel()
    yield before + b"["
    for start in range(0, flat.size, values):
        numbers = orjson.dumps(flat[start : start + values], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"," + numbers if start else numbers
    end = b"]" + after
    if request.id is not None:
        end = end[:-1] + b',"id":' + orjson.dumps(request.id) + b"}"
    yield end


def _binary_head(signature: Signature, shape: tuple[int, ...], id_: str | None = None) -> bytes:
    return orjson.dumps(_reply(signature, shape, id_, {"parameters": {"binary_data_size": prod(shape) * 4}}))


_known_binary_head = lru_cache(maxsize=1024)(_binary_head)


def _reply(signature: Signature, shape: tuple[int, ...], id_: str | None, content: dict[str, Any]) -> dict[str, Any]:
    output = {"name": OUTPUT, "datatype": "FP32", "shape": list(shape), **content}
    reply: dict[str, Any] = {"model_name": signature.name, "model_version": signature.version, "outputs": [output]}
    if id_ is not None:
        reply["id"] = id_
    return reply


def _refuse_large_json(values: int, max_json: int) -> None:
    """The answer's JSON is bounded before the model runs."""
    size = values * _JSON_FLOAT
    if size > max_json:
        raise TooLarge(
            f"out: about {size} bytes as JSON, the limit is {max_json} (max_json_mib); ask for binary_data_output"
        )


def _header_size(value: bytes, body_size: int) -> int:
    if not value.isdigit() or len(value) > 18:
        raise InvalidInput(f"Inference-Header-Content-Length: found {value[:40]!r}, expected a number of bytes")
    size = int(value)
    if size > body_size:
        raise InvalidInput(f"Inference-Header-Content-Length: {size}, but the body has {body_size} bytes")
    return size


def _decode_raw(signature: Signature, body: memoryview) -> Decoded:
    """A body that is nothing but `tokens`: one variable dimension, the rows."""
    if signature.d_memory is not None:
        raise InvalidInput("memory: missing, a raw body holds `tokens` alone; send JSON or binary tensors")
    row = signature.d_in * 4
    if len(body) % row:
        raise InvalidInput(f"tokens: {len(body)} raw bytes, expected a multiple of {row} ({signature.d_in} x FP32)")
    shape = [len(body) // row, signature.d_in]
    return arrange(signature, np.frombuffer(body, _FP32), shape, None, binary=True)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as cause:
        raise InvalidInput(f"JSON: {cause}") from cause
    if not isinstance(document, dict):
        raise InvalidInput(f"JSON: found {kind(document)}, expected an object")
    return document


def _refuse_unsupported(parameters: dict[str, Any]) -> None:
    for key in parameters:
        if key.startswith("triton_"):
            raise InvalidInput(f"parameters.{key}: names that begin with triton_ are reserved")
        if key in ("sequence_id", "sequence_start", "sequence_end") and parameters[key]:
            raise Unsupported(f"parameters.{key}: stateful sequences are not supported")


def _whole(parameters: dict[str, Any], key: str, what: str) -> int:
    value = parameters.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"parameters.{key}: found {show(value)}, expected {what}, a whole number >= 0")
    return value


def _wants_binary(document: dict[str, Any], parameters: dict[str, Any]) -> bool:
    binary = _flag(parameters, "binary_data_output", "parameters", default=False)
    outputs = document.get("outputs")
    if outputs is None:
        return binary
    if not isinstance(outputs, list):
        raise InvalidInput(f"outputs: found {kind(outputs)}, expected a list")
    if len(outputs) > 1:
        raise InvalidInput(f"outputs: {len(outputs)} entries, this model has one output, {OUTPUT!r}")
    for i, entry in enumerate(outputs):
        where = f"outputs[{i}]"
        output = json_object(entry, where)
        if output.get("name") != OUTPUT:
            raise InvalidInput(f"{where}.name: found {show(output.get('name'))}, expected {OUTPUT!r}")
        own = json_object(output.get("parameters"), f"{where}.parameters")
        if own.get("classification"):
            raise Unsupported(f"{where}.parameters.classification: this service returns tensors only")
        refuse_shared_memory(own, where)
        binary = _flag(own, "binary_data", f"{where}.parameters", default=binary)
    return binary


def _flag(parameters: dict[str, Any], key: str, where: str, *, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"{where}.{key}: found {show(value)}, expected true or false")
    return value
