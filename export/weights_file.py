"""A graph's weights in a file beside it, `<graph>.onnx.data`: beyond 2 GiB protobuf cannot hold them.

Weights are written one at a time and referred to afterwards, so that nobody has to hold them: not torch, whose copy can
go, and not the graph. It knows graphs and files, no precisions and no bundle.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
from torch import nn

PROTOBUF_LIMIT: Final = (1 << 31) - (1 << 20)  # protobuf stops at 2 GiB; the rest of the graph needs room too
SCRATCH: Final = "scratch"  # how the names of files begin that are for the making of one graph, and go with it
_COMPUTED: Final = f"{SCRATCH}.data"  # weights that were computed from those in a file
_INLINE: Final = 1024  # bytes of the largest tensor that stays in the graph, where constants are looked for


def weight_bytes(model: ir.Model) -> int:
    """Bytes of the initializers that a file beside the graph would hold."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.nbytes > _INLINE)


def data_file(path: Path) -> Path:
    """Where the weights of the graph `path` are, if they are not in it."""
    return path.with_name(f"{path.name}.data")


def move_out(model: ir.Model, path: Path) -> None:
    """Write the weights of `model` to `path`'s data file and refer to them there, in place.

    Small tensors become the graph's own: nothing in it refers to torch's memory any more.
    """
    ir.external_data.unload_from_model(model, path.parent, data_file(path).name, size_threshold_bytes=_INLINE)
    for graph in model.graphs():
        for value in graph.initializers.values():
            if (tensor := value.const_value) is not None and not isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=tensor.name)


def forget(model: ir.Model) -> None:
    """Unmap what was read of weights that are in a file; they are read again when they are needed."""
    for value in model.graph.initializers.values():
        let_go(value)


def let_go(value: ir.Value) -> None:
    """The same of one weight, of whose values nobody holds a view."""
    if isinstance(value.const_value, ir.ExternalTensor):
        value.const_value.release()


def in_the_place_of(
    old: ir.Value, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], name: str
) -> ir.TensorProtocol:
    """`array` as a tensor that is where `old`'s is: in memory, or in a file, the scratch file beside that one."""
    tensor = old.const_value
    if not isinstance(tensor, ir.ExternalTensor) or array.nbytes <= _INLINE:
        return ir.tensor(array, name=name)
    folder = Path(tensor.path).parent
    with (folder / _COMPUTED).open("ab") as file:
        offset = file.tell()
        file.write(np.ascontiguousarray(array).data)
    dtype, shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
    return ir.ExternalTensor(_COMPUTED, offset, array.nbytes, dtype, shape=shape, name=name, base_dir=folder)


def save(model: ir.Model, path: Path, *, external_above: int) -> list[Path]:
    """Write `model` as `path`, its weights beside it if they are more than `external_above` bytes.

    `model` may refer to another graph's data file, and then takes what it uses into its own; it is changed in place.

    Returns:
        The files beside `path`.
    """
    if weight_bytes(model) <= external_above:
        ir.external_data.load_to_model(model)
        ir.save(model, path)
        return []
    beside = data_file(path)
    external = [
        tensor
        for value in model.graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    ]
    if not (external and all(Path(tensor.path) == beside for tensor in external)):
        move_out(model, path)
    ir.save(model, path)
    return [beside]


@contextmanager
def provisional(path: Path) -> Iterator[None]:
    """Make the graph `path` inside, in one call that holds all that it needs; whatever comes of it, only files stay.

    Scratch files beside it go at the end, and so does memory: a graph refers to itself in circles, and an exception to
    the frames that it came through, with their sessions and arrays; they are emptied. After an exception `path` and
    its data file go too.
    """
    try:
        yield
    except BaseException as cause:
        _clear_frames(cause)
        for file in (path, data_file(path)):
            file.unlink(missing_ok=True)
        raise
    finally:
        for file in path.parent.glob(f"{SCRATCH}.*"):
            file.unlink()
        gc.collect()


def _clear_frames(cause: BaseException | None) -> None:
    """Empty the finished frames of an exception and of those it came from."""
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def release_weights(module: nn.Module) -> None:
    """Make `module`'s weights shapes without values; the memory goes with the last module that shares it.

    torch's exporter keeps the parameters themselves, out of reach of the garbage collector: they are emptied.
    """
    shapes = {parameter: nn.Parameter(parameter.to("meta"), requires_grad=False) for parameter in module.parameters()}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = shapes[parameter]
    for parameter in shapes:
        parameter.data = parameter.data.new_empty(0)
    gc.collect()


def empty_weights(module: nn.Module) -> None:
    """Let `module` hold no weights any more, so that those who share them decide when their memory goes."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
