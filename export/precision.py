"""The dtype, device and mode a module is exported in, and the float64 that it is proved in.

A module arrives in any state and belongs to its caller: it is copied, never changed. Parameters that already are
float32 on the CPU are shared with the copy, so that a large module is not held twice; buffers are not, for a forward
may write to them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from export.errors import ExportError, first_line


def exportable_copy(module: nn.Module) -> nn.Module:
    """Copy `module` in eval mode, float32 (integers stay integers), on the CPU, without gradients.

    Raises:
        ExportError: a weight is on the meta device, not initialised, complex, or not finite; or it cannot be copied.
    """
    memo: dict[int, object] = {}
    for name, tensor in _named_tensors(module):
        if id(tensor) in memo:
            continue
        memo[id(tensor)] = _exportable(name, tensor)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as cause:
        raise ExportError(f"{type(module).__name__} cannot be copied: {first_line(cause)}") from cause
    return copied.eval()


@contextmanager
def float64(module: nn.Module) -> Iterator[None]:
    """Inside, all of `module` is float64, in place; before and after it is float32."""
    cast_floats(module, torch.float64)
    try:
        with torch.no_grad():
            yield
    finally:
        cast_floats(module, torch.float32)


@contextmanager
def float64_layer_by_layer(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each of `layers` is float64 while it runs and float32 before and after: one upcast at a time.

    Parameters keep their float32 storage, so that what they share with another module stays shared. The modules are
    changed in place and must belong to the caller.
    """
    before: dict[nn.Parameter, Tensor] = {}

    def up(layer: nn.Module, _args: object) -> None:
        before.update({p: p.data for p in layer.parameters() if p.is_floating_point() and p not in before})
        cast_floats(layer, torch.float64)

    def down(layer: nn.Module, _args: object, _result: object) -> None:
        for parameter in layer.parameters():
            if parameter in before:
                parameter.data = before.pop(parameter)
        cast_floats(layer, torch.float32)

    layers = list(layers)
    hooks = [layer.register_forward_pre_hook(up, prepend=True) for layer in layers]
    hooks += [layer.register_forward_hook(down, always_call=True) for layer in layers]
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:  # a layer that raised before its hook ran
            down(layer, None, None)


def cast_floats(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating-point tensor of `module` in place, plain tensor attributes too (`Module.to` skips those)."""
    module.to(dtype)
    for part in module.modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
                setattr(part, key, value.detach().to(dtype))


def parameter_count(module: nn.Module) -> int:
    """Numbers in the weights: parameters, each counted once however often it is shared."""
    return sum(parameter.numel() for parameter in module.parameters())


def stored_as(dtypes: Mapping[str, int]) -> str:
    """What dtypes were, in words, such as "float16 (103), widened to float32"; float64 loses its last bits."""
    counts = ", ".join(f"{name} ({count})" for name, count in sorted(dtypes.items()))
    return f"{counts}, {'rounded' if 'float64' in dtypes else 'widened'} to float32"


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{key}" if prefix else key, value


def _exportable(name: str, tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        raise ExportError(f"{name} is not initialised: run the lazy module once before exporting it")
    if tensor.device.type == "meta":
        raise ExportError(f"{name} is on the meta device: it has a shape and no values; load its weights first")
    if tensor.layout != torch.strided:
        raise ExportError(f"{name} is {tensor.layout}: only dense weights can be exported; call its to_dense() first")
    if tensor.is_complex() or tensor.is_quantized:
        raise ExportError(f"{name} is {tensor.dtype}: only real floating-point weights can be exported")
    parameter = isinstance(tensor, nn.Parameter)
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    moved = tensor.detach().to("cpu", dtype, copy=not parameter)
    if parameter:
        if not bool(moved.isfinite().all()):
            raise ExportError(f"{name} holds NaN or infinite values (in float32)")
        return nn.Parameter(moved, requires_grad=False)
    return moved
