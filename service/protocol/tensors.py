"""Tensors of the Open Inference Protocol: the entries of `inputs` and their values, JSON or binary."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from service.errors import InvalidInput, Unsupported
from service.packing import Float32, Int64
from service.protocol.arrange import check_shape, show

INPUTS: Final = ("tokens", "seq_lens")
MEMORY_INPUTS: Final = (*INPUTS, "memory", "memory_seq_lens")
_SEQ_DTYPES: Final[dict[str, np.dtype[Any]]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}
_FP32: Final = np.dtype("<f4")


@dataclass(slots=True)
class Tensor:
    """One entry of `inputs`."""

    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    size: int | None = None  # binary_data_size
    start: int = 0  # of its bytes after the JSON part


def tensors(document: dict[str, Any], binary_size: int, names: tuple[str, ...] = INPUTS) -> dict[str, Tensor]:
    """The inputs by name, one of `names`, each with its place in the binary part, all of which must be spoken for."""
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise InvalidInput(f"inputs: found {show(inputs)}, expected a list with 'tokens'")
    if len(inputs) > len(names):
        raise InvalidInput(f"inputs: {len(inputs)} entries, expected at most {len(names)} ({', '.join(names)})")
    found: dict[str, Tensor] = {}
    at = 0
    for i, entry in enumerate(inputs):
        tensor = _tensor(entry, f"inputs[{i}]", names)
        if tensor.name in found:
            raise InvalidInput(f"inputs[{i}].name: {tensor.name!r} appears twice")
        if tensor.size is not None:
            if at + tensor.size > binary_size:
                raise InvalidInput(
                    f"{tensor.name}: binary_data_size {tensor.size}, but only {binary_size - at} bytes follow the JSON"
                )
            tensor.start = at
            at += tensor.size
        found[tensor.name] = tensor
    if at != binary_size:
        raise InvalidInput(f"body: {binary_size - at} bytes after the last tensor; the inputs declare {at} in all")
    return found


def _tensor(entry: Any, where: str, names: tuple[str, ...]) -> Tensor:
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where}: found {kind(entry)}, expected an object")
    name = entry.get("name")
    if name not in names:
        raise InvalidInput(f"{where}.name: found {show(name)}, expected {' or '.join(map(repr, names))}")
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str):
        raise InvalidInput(f"{where}.datatype: found {show(datatype)}, expected a string such as 'FP32'")
    shape = check_shape(shape, f"{where}.shape")
    parameters = json_object(entry.get("parameters"), f"{where}.parameters")
    refuse_shared_memory(parameters, where)
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidInput(f"{where}.parameters.binary_data_size: found {show(size)}, expected a number of bytes")
    if (size is None) == ("data" not in entry):
        both = "both" if size is not None else "neither"
        raise InvalidInput(f"{where}: {both} 'data' and parameters.binary_data_size given, expected one of them")
    return Tensor(name, shape, datatype, entry.get("data"), size)


def check_size(tensor: Tensor) -> None:
    """Whether a binary FP32 tensor has as many bytes as its shape says; raises InvalidInput."""
    size = prod(tensor.shape) * 4
    if tensor.size != size:
        raise InvalidInput(
            f"{tensor.name}: binary_data_size {tensor.size}, shape {tensor.shape} of FP32 needs {size} bytes"
        )


def floats(tensor: Tensor, binary: memoryview) -> Float32:
    if tensor.size is not None:
        check_size(tensor)
        return np.frombuffer(binary, _FP32, prod(tensor.shape), tensor.start)
    flat = _flat(tensor, (int, float), "numbers")
    with np.errstate(over="ignore"):
        try:
            values = np.array(flat, np.float64).astype(_FP32)
        except OverflowError as cause:
            raise InvalidInput(f"{tensor.name}: data holds a number that FP32 cannot represent") from cause
    if not np.isfinite(values).all():
        raise InvalidInput(
            f"{tensor.name}: data holds a number that FP32 cannot represent; NaN and Inf go as binary tensors"
        )
    return values


def lengths(tensor: Tensor, binary: memoryview) -> Int64:
    if len(tensor.shape) != 1:
        raise InvalidInput(f"{tensor.name}: shape {tensor.shape} has rank {len(tensor.shape)}, expected [sequences]")
    dtype = _SEQ_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise InvalidInput(f"{tensor.name}: datatype {show(tensor.datatype)}, expected 'INT64' or 'INT32'")
    if tensor.size is not None:
        wanted = tensor.shape[0] * dtype.itemsize
        if tensor.size != wanted:
            raise InvalidInput(
                f"{tensor.name}: binary_data_size {tensor.size}, "
                f"shape {tensor.shape} of {dtype.name} needs {wanted} bytes"
            )
        return np.frombuffer(binary, dtype, tensor.shape[0], tensor.start).astype(np.int64)
    try:
        return np.array(_flat(tensor, (int,), "whole numbers"), np.int64)
    except OverflowError as cause:
        raise InvalidInput(f"{tensor.name}: data holds a number beyond INT64") from cause


def _flat(tensor: Tensor, kinds: tuple[type, ...], wanted: str) -> list[Any]:
    """`data`, flat or nested as the shape says, as one flat list of numbers."""
    data, shape = tensor.data, tensor.shape
    if not isinstance(data, list):
        raise InvalidInput(f"{tensor.name}: data is {kind(data)}, expected a list of {wanted}")
    if data and type(data[0]) is list:
        for depth, size in enumerate(shape[1:], 1):
            if len(data) != prod(shape[:depth]) or any(type(row) is not list or len(row) != size for row in data):
                raise InvalidInput(f"{tensor.name}: data is not nested as shape {shape} says (depth {depth})")
            data = [value for row in data for value in row]
    if len(data) != prod(shape):
        raise InvalidInput(f"{tensor.name}: data has {len(data)} values, shape {shape} needs {prod(shape)}")
    strange = set(map(type, data)).difference(kinds)
    if strange:
        found = ", ".join(sorted(_KINDS[k] for k in strange))
        raise InvalidInput(f"{tensor.name}: data holds {found}, expected {wanted}")
    return data


_KINDS: Final[dict[type, str]] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a fraction",
    type(None): "null",
}


def json_object(value: Any, where: str) -> dict[str, Any]:
    """`value` as an object; absent is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: found {kind(value)}, expected an object")
    return value


def refuse_shared_memory(parameters: dict[str, Any], where: str) -> None:
    """Raise Unsupported if the tensor is to travel through shared memory."""
    if "shared_memory_region" in parameters:
        raise Unsupported(f"{where}.parameters.shared_memory_region: shared memory is not supported")


def kind(value: Any) -> str:
    """A JSON value's kind in words."""
    return _KINDS[type(value)]
