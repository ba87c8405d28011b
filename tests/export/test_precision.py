"""Whatever state a module arrives in, it leaves its copy in eval, float32, on the CPU, and itself as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from export.errors import ExportError
from export.precision import exportable_copy, float64_layer_by_layer, parameter_count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_copy_is_float32_eval_without_gradients_and_the_original_keeps_its_state(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).to(dtype).train()
    copied = exportable_copy(module)
    assert not copied.training
    assert {tensor.dtype for tensor in copied.state_dict().values()} == {torch.float32, torch.int64}
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert module.training
    assert next(module.parameters()).dtype == dtype
    assert next(module.parameters()).requires_grad


def test_float32_weights_are_shared_with_the_copy_and_never_written() -> None:
    module = nn.Linear(4, 4)
    before = module.weight.clone()
    copied = exportable_copy(module)
    assert isinstance(copied, nn.Linear)
    assert copied.weight.data_ptr() == module.weight.data_ptr()
    with float64_layer_by_layer([copied]):
        copied(torch.randn(2, 4, dtype=torch.float64))
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, before)


def test_a_forward_that_writes_to_its_buffers_writes_to_the_copy_alone() -> None:
    module = nn.BatchNorm1d(4)
    module.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    copied = exportable_copy(module)
    for _, buffer in copied.named_buffers():
        buffer += 1
    assert before.keys() == {"running_mean", "running_var", "num_batches_tracked", "calls"}
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_tied_weights_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    copied = exportable_copy(module)
    assert isinstance(copied, nn.Sequential)
    assert copied[0].weight is copied[1].weight
    assert parameter_count(copied) == 16


def test_one_layer_is_upcast_at_a_time_and_all_come_back() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    seen: list[list[torch.dtype]] = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append([each.weight.dtype for each in layers]))
    weights = [layer.weight.detach().clone() for layer in layers]
    with float64_layer_by_layer(layers):
        nn.Sequential(*layers)(torch.randn(2, 4, dtype=torch.float64))
    f32, f64 = torch.float32, torch.float64
    assert seen == [[f64, f32, f32], [f32, f64, f32], [f32, f32, f64]]
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))


def test_a_layer_that_raises_is_float32_again() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), float64_layer_by_layer([layer]):
        layer(torch.randn(2, 5, dtype=torch.float64))
    assert layer.weight.dtype == torch.float32


def sparse() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(module.weight.detach().to_sparse())
    return module


def with_nan() -> nn.Module:
    module = nn.Linear(4, 4).requires_grad_(False)
    module.weight[1, 2] = float("nan")
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(4, 4, device="meta"), "weight is on the meta device"),
        (with_nan(), "weight holds NaN or infinite"),
        (nn.Linear(4, 4, dtype=torch.complex64), "weight is torch.complex64"),
        (sparse(), "weight is torch.sparse_coo: only dense weights"),
    ],
)
def test_weights_without_usable_values_are_refused_by_name(module: nn.Module, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        exportable_copy(module)


def test_lazy_modules_are_refused_until_they_have_run() -> None:
    with pytest.raises(ExportError, match="weight is not initialised"):
        exportable_copy(nn.LazyLinear(4))
