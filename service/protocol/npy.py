"""npy in, npy out: tokens for curl and numpy users. Header by numpy, data by view."""

from __future__ import annotations

import io
import re
from math import prod
from typing import Final

import numpy as np

from service.errors import InvalidInput
from service.packing import Float32, Int64
from service.protocol.arrange import Decoded, Signature, arrange, check_shape, in_kind, show, token_shape

_FP32: Final = np.dtype("<f4")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_HEADER: Final = 4096  # bytes; numpy pads its headers to 64


def decode_npy(signature: Signature, body: memoryview, seq_lens: str | None) -> Decoded:
    """A .npy file of float32 tokens -> Decoded; `seq_lens` is the query parameter, whole numbers between commas."""
    if signature.d_memory is not None:
        raise InvalidInput("memory: missing, an npy body holds `tokens` alone; send JSON or binary tensors")
    head = io.BytesIO(bytes(body[:_HEADER]))
    try:
        version = np.lib.format.read_magic(head)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(head)
    except Exception as cause:  # numpy evaluates the header as a Python literal: it may fail in any way
        reason = _ADDRESS.sub("", str(cause))  # where things lie in our memory is nobody's business
        raise InvalidInput(f"npy: not a readable header of format 1.0 or 2.0: {reason}") from cause
    dims = check_shape(shape, "npy: shape")
    if dtype != _FP32:
        raise InvalidInput(f"npy: dtype {dtype.str}, expected <f4 (float32)")
    if fortran and len(dims) > 1:
        raise InvalidInput("npy: Fortran order, expected C order")
    data = body[head.tell() :]
    wanted = prod(dims) * 4
    if len(data) != wanted:
        raise InvalidInput(f"npy: {len(data)} bytes of data, shape {dims} needs {wanted}")
    lens = None if seq_lens is None else _lengths(seq_lens)
    tokens = token_shape(dims, "FP32", signature)
    return arrange(signature, np.frombuffer(data, _FP32), tokens, lens, npy=True)


def encode_npy(request: Decoded, out: Float32) -> list[bytes | memoryview]:
    """`out` (rows, d_out) -> the parts of a .npy file."""
    out = np.ascontiguousarray(in_kind(request, out))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(out))
    return [head.getvalue(), octets(out)]


def octets(out: Float32) -> bytes | memoryview:
    """The bytes of a contiguous array, uncopied."""
    return out.data.cast("B") if out.size else b""  # an empty array's view cannot be cast


def _lengths(text: str) -> Int64:
    try:
        return np.array([int(part) for part in text.split(",") if part], np.int64)
    except (ValueError, OverflowError) as cause:
        raise InvalidInput(f"seq_lens: found {show(text)}, expected whole numbers between commas") from cause
