"""Graphs keep one shape of weight matmul, symbolic sizes, and say no to every other use of a weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from export.blocks import FFN
from export.errors import ExportError
from export.graph import to_graph, weight_flops, width_of_output
from export.precision import exportable_copy
from export.scan import check_weights
from service.session import open_session


def run_at(model: ir.Model, folder: Path, sizes: list[int], d: int, module: nn.Module) -> None:
    path = folder / "model.onnx"
    ir.save(model, path)
    session = open_session(path, "cpu", 1)
    for n in sizes:
        tokens = torch.randn(n, d)
        with torch.no_grad():
            expected = module(tokens).numpy()
        out = session.run(["out"], {"tokens": tokens.numpy()})[0]
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


class Computed(nn.Module):
    """A large weight that is computed from constants, as reparametrizations do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(96, 128))
        self.mix = nn.Parameter(torch.randn(128, 128) / 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.inner(tokens)
        return hidden @ (self.mix.T + torch.eye(128))


def test_computed_weights_are_folded_into_initializers(tmp_path: Path) -> None:
    module = exportable_copy(Computed())
    model = to_graph(module, "position-wise", 96)
    check_weights(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "MatMul"]
    assert weight_flops(model) == 2 * (96 * 128 + 128 * 128)
    run_at(model, tmp_path, [1, 3, 8], 96, module)


def test_linears_become_matmuls_with_their_weights_on_the_right(tmp_path: Path) -> None:
    module = exportable_copy(FFN(6, 10, activation="swiglu"))
    model = to_graph(module, "position-wise", 6)
    check_weights(model)
    matmuls = [node for node in model.graph if node.op_type == "MatMul"]
    assert [tuple(node.inputs[1].shape or ()) for node in matmuls if node.inputs[1]] == [(6, 20), (10, 6)]
    assert not [node for node in model.graph if node.op_type == "Gemm"]
    assert width_of_output(model) == 6
    run_at(model, tmp_path, [1, 2, 257], 6, module)


class Parts(nn.Module):
    """Each token reshaped into two parts that share a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.part(tokens.reshape(-1, 2, 4)).reshape(-1, 8)  # type: ignore[no-any-return]


def test_a_matmul_that_runs_twice_a_token_counts_twice(tmp_path: Path) -> None:
    module = exportable_copy(Parts())
    model = to_graph(module, "position-wise", 8)
    assert weight_flops(model) == 2 * 2 * 16
    run_at(model, tmp_path, [1, 5], 8, module)


class Uses(nn.Module):
    """One use of a matrix that is not `tokens @ weight`."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.vector = nn.Parameter(torch.randn(8))
        self.conv = nn.Conv1d(8, 8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor
        if self.use == "left":
            out = (self.weight @ tokens.T).T
        elif self.use == "product":
            out = (tokens[:, :, None] * self.weight).sum(1)
        elif self.use == "conv":
            out = self.conv(tokens.T[None])[0].T
        elif self.use == "gather":
            out = tokens + self.weight[tokens.argmax(-1)]
        else:
            out = tokens + (tokens @ self.vector)[:, None]
        return out


@pytest.mark.parametrize(
    ("use", "operator"),
    [
        ("left", "MatMul"),
        ("product", "Mul"),
        ("conv", "Conv"),
        ("gather", "GatherND"),
        ("vector", "MatMul"),
    ],
)
def test_other_uses_of_a_weight_are_refused_by_operator_and_name(use: str, operator: str) -> None:
    model = to_graph(exportable_copy(Uses(use)), "position-wise", 8)
    with pytest.raises(ExportError, match=rf"operator {operator} \(node .*\) uses the weight '.+' of shape"):
        check_weights(model)


class Baked(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + torch.arange(5.0)[:, None]


def test_a_number_of_tokens_baked_into_the_module_is_refused() -> None:
    with pytest.raises(ExportError, match="the number of tokens is baked into the graph"):
        to_graph(exportable_copy(Baked()), "position-wise", 4)


class Ignores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(tokens.mean(dim=0))  # type: ignore[no-any-return]


def test_an_output_without_a_row_for_each_token_is_refused() -> None:
    with pytest.raises(ExportError, match=r"out has shape .*expected \(tokens, d_out\)"):
        to_graph(exportable_copy(Ignores()), "position-wise", 4)


def test_recurrent_weights_are_refused() -> None:
    weight = ir.val("w", const_value=ir.tensor(np.ones((1, 12, 4), np.float32)))
    inputs = [ir.val("x", ir.DataType.FLOAT, [5, 1, 4]), weight]
    node = ir.node("GRU", inputs, {"hidden_size": 4}, name="recurrent")
    graph = ir.Graph(inputs[:1], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 21})
    with pytest.raises(
        ExportError, match=r"operator GRU \(node 'recurrent'\) uses the weight 'w' of shape \(1, 12, 4\)"
    ):
        check_weights(ir.Model(graph, ir_version=10))
