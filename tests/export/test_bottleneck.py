"""Bottleneck adapters after attention and FFN, as Houlsby and Pfeiffer place them, in modules and in bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from export.adapters.random_weights import random_stack
from export.adapters.registry import pack
from export.blocks import BlockStack, BottleneckAdapter, TransformerBlock
from export.pipeline import Options, export_module
from export.precision import float64
from service.manifest import read_manifest


def adapted(place: Any, houlsby: bool) -> BlockStack:
    stack = random_stack(16, 4, 24, layers=2, place=place)
    for block in stack.blocks:
        assert isinstance(block, TransformerBlock)
        block.adapter2 = BottleneckAdapter(16, 5)
        if houlsby:
            block.adapter1 = BottleneckAdapter(16, 5, activation=torch.tanh)
    return stack.eval()


def by_hand(block: TransformerBlock, x: Tensor, seq_lens: Tensor) -> Tensor:
    """Figure 2 of Houlsby et al. 2019, and of Pfeiffer et al. 2021 where there is no first adapter."""
    pre = block.place == "pre"

    def adapt(adapter: Any, rows: Tensor, function: Any) -> Tensor:
        hidden = function(rows @ adapter.down.weight.T + adapter.down.bias)
        out: Tensor = rows + hidden @ adapter.up.weight.T + adapter.up.bias
        return out

    attended = block.attention(block.norm1(x) if pre else x, seq_lens)
    if block.adapter1 is not None:
        attended = adapt(block.adapter1, attended, torch.tanh)
    x = x + attended if pre else block.norm1(x + attended)
    fed = adapt(block.adapter2, block.ffn(block.norm2(x) if pre else x), torch.relu)
    out: Tensor = x + fed if pre else block.norm2(x + fed)
    return out


@pytest.mark.parametrize("place", ["post", "pre"])
@pytest.mark.parametrize("houlsby", [True, False])
def test_an_adapter_stands_before_the_block_s_residual(place: str, houlsby: bool) -> None:
    stack = adapted(place, houlsby)
    tokens, seq_lens = torch.randn(9, 16, dtype=torch.float64), torch.tensor([4, 1, 4])
    with float64(stack):
        expected = tokens
        for block in stack.blocks:
            assert isinstance(block, TransformerBlock)
            expected = by_hand(block, expected, seq_lens)
        if stack.norm is not None:
            expected = stack.norm(expected)
        assert float((stack(tokens, seq_lens) - expected).norm() / expected.norm()) < 1e-14
        bare = random_stack(16, 4, 24, layers=2, place="pre" if place == "pre" else "post")
    with float64(bare):
        assert not torch.allclose(bare(tokens, seq_lens), expected)


def test_a_bundle_has_its_adapters_quantized_and_named(tmp_path: Path) -> None:
    manifest = read_manifest(export_module(adapted("post", True), Options("adapted", tmp_path)))
    assert manifest.architecture["adapters_after"] == "attention and FFN"
    assert manifest.architecture["d_bottleneck"] == 5
    assert {v.certificate.kind for v in manifest.variants} == {"exact"}
    assert {(v.precision, v.quantized_matmuls) for v in manifest.variants} == {("fp32", 0), ("int8", 2 * 8)}


def test_alone_it_is_position_wise() -> None:
    assert pack(BottleneckAdapter(8, 3)).kind == "position-wise"
    assert pack(adapted("pre", False)).architecture["adapters_after"] == "FFN"


@pytest.mark.parametrize("activation", ["swiglu", "nothing"])
def test_an_activation_that_gates_or_is_unknown_is_refused(activation: str) -> None:
    with pytest.raises(ValueError, match=f"activation '{activation}': expected one of relu, gelu"):
        BottleneckAdapter(8, 3, activation=activation)
