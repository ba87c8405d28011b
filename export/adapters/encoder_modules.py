"""Encoder layers of transformers in memory -> a stack of blocks that shares their weights.

It imports no transformers: the modules come with their classes, and a family's `Layout` names their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from export.adapters.encoder_files import Layout
from export.adapters.equality import prove_equal
from export.adapters.parts import packing
from export.adapters.registry import PackOptions
from export.blocks import BlockStack, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_stack

# transformers' classes -> ours, which ONNX Runtime fuses; any other elementwise callable stays as it is
_ACTIVATIONS: Final = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}


def pack_encoder_modules(
    original: nn.Module,
    layers: Sequence[nn.Module],
    layout: Layout,
    *,
    activation: str,
    options: PackOptions,
) -> Packed:
    """Put the weights of `layers` into packed blocks and prove that they compute what `original` does.

    Args:
        original: what was passed in, called with (1, n, d) hidden states.
        layers: its layers, in order.
        layout: names of a layer's parts, seen from the layer.
        activation: name of the part that is the FFN's elementwise function.
        options: of the export.

    Raises:
        ExportError: a part is missing or has no packed form.
        ProofError: the original computes something else.
    """
    if not layers:
        raise ExportError(f"{type(original).__name__} has no layers")
    blocks = []
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            blocks.append(_block(layer, layout, activation))
    _attend_in_the_dtype_of_the_tokens(original)
    return prove_equal(
        original,
        pack_stack(BlockStack(blocks).eval(), layout.family.lower()),
        one_sequence=lambda rows: _run(original, rows),
        layers=layers,
        seed=options.seed,
    )


def _block(layer: nn.Module, layout: Layout, activation: str) -> TransformerBlock:
    query, key, value, out, up, down = (_linear(layer, name) for name in layout.linears)
    attention = layer.get_submodule(layout.query.rpartition(".")[0])
    heads = attention.num_attention_heads
    assert isinstance(heads, int)
    with torch.device("meta"):  # every weight is replaced below
        block = TransformerBlock(
            query.in_features,
            heads,
            up.out_features,
            place=layout.place,
            activation=_attribute(layer, activation),
        )
    parts = (query, key, value)
    block.attention.qkv.weight = _joined([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)):
        raise ValueError("some of query, key and value have a bias and some have none")
    block.attention.qkv.register_parameter("bias", _joined(biases) if biases else None)
    block.attention.out, block.ffn.up, block.ffn.down = out, up, down
    block.norm1, block.norm2 = layer.get_submodule(layout.norm1), layer.get_submodule(layout.norm2)
    return block


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    part = layer.get_submodule(name)
    if not isinstance(part, nn.Linear):
        raise TypeError(f"{name} is a {type(part).__name__}, expected an nn.Linear")
    return part


def _attribute(layer: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    found = getattr(layer.get_submodule(parent), last)
    return _ACTIVATIONS.get(type(found).__name__, found)


def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)


def _attend_in_the_dtype_of_the_tokens(original: nn.Module) -> None:
    """transformers' eager attention of some families computes its softmax in float32, which no float64 proof can pass.

    The copy's config is the copy's own.
    """
    for part in original.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "sdpa"


def _run(original: nn.Module, rows: Tensor) -> Tensor:
    out: Any = original(rows.unsqueeze(0))
    if not isinstance(out, Tensor):
        out = out[0]
    hidden: Tensor = out
    return hidden.squeeze(0)
