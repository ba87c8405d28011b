"""nn.TransformerEncoderLayer and nn.TransformerEncoder -> packed blocks that share their weights.

A subclass that computes something else is refused, whatever its class says: the proof runs its own forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export.adapters.equality import prove_equal
from export.adapters.parts import packing
from export.adapters.registry import PackOptions, register_adapter
from export.blocks import BlockStack, SelfAttention, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_stack


@register_adapter(nn.TransformerEncoder, nn.TransformerEncoderLayer, accepts_causal=True)
def pack_encoder(original: nn.TransformerEncoder | nn.TransformerEncoderLayer, options: PackOptions) -> Packed:
    """Put the weights of `original`, an exportable copy, into packed blocks and prove that they compute the same.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    if isinstance(original, nn.TransformerEncoder):
        layers, norm = list(original.layers), original.norm
    else:
        layers, norm = [original], None
    if not layers:
        raise ExportError(f"{type(original).__name__} has no layers")
    blocks = []
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            blocks.append(_block(layer, index, options.causal))
    stack = BlockStack(blocks, norm).eval()
    return prove_equal(
        original,
        pack_stack(stack, type(original).__name__),
        one_sequence=lambda rows: _run(original, rows, options.causal),
        layers=[*layers, *([] if norm is None else [norm])],
        seed=options.seed,
        hint="a subclass with another forward is not an encoder",
    )


def _block(layer: nn.Module, index: int, causal: bool) -> TransformerBlock:
    where = f"layer {index} ({type(layer).__name__})"
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise ExportError(f"{where}: expected an nn.TransformerEncoderLayer")
    attention = packed_attention(layer.self_attn, where=f"{where}: self_attn", causal=causal)
    with torch.device("meta"):  # every weight is replaced below
        block = TransformerBlock(
            attention.out.out_features,
            attention.num_heads,
            layer.linear1.out_features,
            place="pre" if layer.norm_first else "post",
            activation=layer.activation,
            causal=causal,
        )
    block.attention = attention
    block.ffn.up, block.ffn.down = layer.linear1, layer.linear2
    block.norm1, block.norm2 = layer.norm1, layer.norm2
    return block


def packed_attention(attention: nn.Module, *, where: str = "attention", causal: bool = False) -> SelfAttention:
    """Put the weights of an nn.MultiheadAttention that attends to its own sequence into a packed block.

    Args:
        attention: its weights are shared with the block.
        where: begins the message of a refusal.
        causal: whether a token attends to itself and earlier tokens only.

    Raises:
        ExportError: it is something else, or has a part without a packed form.
    """
    if not isinstance(attention, nn.MultiheadAttention) or attention.in_proj_weight is None:
        raise ExportError(f"{where} must be an nn.MultiheadAttention with one in_proj_weight")
    if not isinstance(attention.in_proj_weight, nn.Parameter):
        raise ExportError(
            f"{where}: in_proj_weight is computed from other tensors (a parametrization); remove it first, leaving the "
            "weight in place"
        )
    if attention.bias_k is not None or attention.add_zero_attn:
        raise ExportError(f"{where}: add_bias_kv and add_zero_attn add a key to every sequence and have no packed form")
    with torch.device("meta"):  # every weight is replaced below
        block = SelfAttention(attention.embed_dim, attention.num_heads, causal=causal)
    block.qkv.weight = attention.in_proj_weight
    block.qkv.bias = attention.in_proj_bias
    block.out = attention.out_proj
    return block


def _run(original: nn.Module, rows: Tensor, causal: bool) -> Tensor:
    layer = original.layers[0] if isinstance(original, nn.TransformerEncoder) else original
    assert isinstance(layer, nn.TransformerEncoderLayer)
    axis = 0 if layer.self_attn.batch_first else 1
    mask = nn.Transformer.generate_square_subsequent_mask(len(rows), dtype=rows.dtype) if causal else None
    out: Tensor = original(rows.unsqueeze(axis), mask)
    return out.squeeze(axis)
