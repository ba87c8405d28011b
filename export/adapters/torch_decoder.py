"""nn.TransformerDecoderLayer and nn.TransformerDecoder -> packed decoder blocks that share their weights.

A subclass that computes something else is refused, whatever its class says: the proof runs its own forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export.adapters.equality import prove_equal
from export.adapters.parts import packing
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.torch_transformer import packed_attention
from export.blocks import FFN, CrossAttention, DecoderBlock, DecoderStack
from export.errors import ExportError
from export.packed import Packed, pack_decoder


@register_adapter(nn.TransformerDecoder, nn.TransformerDecoderLayer, accepts_causal=True)
def pack_torch_decoder(original: nn.TransformerDecoder | nn.TransformerDecoderLayer, options: PackOptions) -> Packed:
    """Put the weights of `original`, an exportable copy, into packed blocks and prove that they compute the same.

    With `causal` it is the original with a causal `tgt_mask`, as a decoder is used to generate; without, with none.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    if isinstance(original, nn.TransformerDecoder):
        layers, norm = list(original.layers), original.norm
    else:
        layers, norm = [original], None
    if not layers:
        raise ExportError(f"{type(original).__name__} has no layers")
    blocks = []
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            blocks.append(_block(layer, f"layer {index} ({type(layer).__name__})", options.causal))
    return prove_equal(
        original,
        pack_decoder(DecoderStack(blocks, norm).eval(), type(original).__name__),
        one_sequence=lambda rows, memory: _run(original, rows, memory, options.causal),
        layers=[*layers, *([] if norm is None else [norm])],
        seed=options.seed,
        hint="a subclass with another forward is not a decoder",
    )


def packed_cross_attention(attention: nn.Module, *, where: str = "attention") -> CrossAttention:
    """Put the weights of an nn.MultiheadAttention that attends to a memory into a packed block, which shares them.

    Raises:
        ExportError: it is something else, or has a part without a packed form.
    """
    own = packed_attention(attention, where=where)  # the same refusals, and the same one matrix
    d = own.out.out_features
    with torch.device("meta"):  # every weight is replaced below
        block = CrossAttention(d, own.num_heads)
    weight, bias = own.qkv.weight, own.qkv.bias
    block.q.weight, block.kv.weight = _parameter(weight[:d]), _parameter(weight[d:])
    block.q.bias, block.kv.bias = (None, None) if bias is None else (_parameter(bias[:d]), _parameter(bias[d:]))
    block.out = own.out
    return block


def _block(layer: nn.Module, where: str, causal: bool) -> DecoderBlock:
    if not isinstance(layer, nn.TransformerDecoderLayer):
        raise ExportError(f"{where}: expected an nn.TransformerDecoderLayer")
    attention = packed_attention(layer.self_attn, where=f"{where}: self_attn", causal=causal)
    cross = packed_cross_attention(layer.multihead_attn, where=f"{where}: multihead_attn")
    with torch.device("meta"):
        ffn = FFN(layer.linear1.in_features, layer.linear1.out_features, activation=layer.activation)
    ffn.up, ffn.down = layer.linear1, layer.linear2
    norms = (layer.norm1, layer.norm2, layer.norm3)
    return DecoderBlock.of(attention, cross, ffn, norms, place="pre" if layer.norm_first else "post")


def _parameter(rows: Tensor) -> nn.Parameter:
    return nn.Parameter(rows.detach(), requires_grad=False)


def _run(original: nn.Module, rows: Tensor, memory: Tensor, causal: bool) -> Tensor:
    layer = original.layers[0] if isinstance(original, nn.TransformerDecoder) else original
    assert isinstance(layer, nn.TransformerDecoderLayer)
    axis = 0 if layer.self_attn.batch_first else 1
    mask = nn.Transformer.generate_square_subsequent_mask(len(rows), dtype=rows.dtype) if causal else None
    out: Tensor = original(rows.unsqueeze(axis), memory.unsqueeze(axis), mask)
    return out.squeeze(axis)
