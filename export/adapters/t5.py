"""T5's encoder layers (transformers) -> pre-norm blocks with a relative position bias that all of them share.

Hidden states in, hidden states out: the embeddings stay outside, the last norm is inside where a whole encoder is
given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from export.adapters.equality import prove_equal
from export.adapters.parts import packing
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.transformers_parts import (
    eager,
    embedding_sampler,
    gated_activation,
    in_float64,
    last_norm,
    plain_activation,
    rms_norm,
    side_by_side,
)
from export.blocks import FFN, BlockStack, RelativeBias, SelfAttention, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_stack

_MODULE: Final = "transformers.models.t5.modeling_t5"


@register_adapter(f"{_MODULE}.T5EncoderModel")
def pack_encoder_model(model: Any, options: PackOptions) -> Packed:
    """The layers and the last norm of a T5EncoderModel; see `pack_t5_stack`."""
    return pack_t5_stack(model.encoder, options)


@register_adapter(f"{_MODULE}.T5Stack")
def pack_t5_stack(encoder: Any, options: PackOptions) -> Packed:
    """Put the layers and the last norm of an encoder into a stack and prove that they compute the same.

    Raises:
        ExportError: it is a decoder, or a part has no packed form.
        ProofError: the original computes something else.
    """
    if encoder.is_decoder:
        raise ExportError("this T5Stack is a decoder, which attends to a memory as well: pass the encoder's")
    layers = list(encoder.block)
    stack = _stack(encoder, layers, last_norm(encoder.final_layer_norm))

    def forward(rows: Tensor) -> Tensor:
        hidden: Tensor = encoder(inputs_embeds=rows).last_hidden_state
        return hidden

    packed = _proved(encoder, stack, forward, [*layers, encoder.final_layer_norm], options)
    return replace(packed, sample=embedding_sampler(encoder.embed_tokens.weight))


@register_adapter(f"{_MODULE}.T5Block")
def pack_t5_block(block: Any, options: PackOptions) -> Packed:
    """One encoder layer that holds the position bias, as the first of a stack does; see `pack_t5_stack`."""
    if block.is_decoder:
        raise ExportError("this T5Block is a decoder's, which attends to a memory as well: pass an encoder's")

    def forward(rows: Tensor) -> Tensor:
        hidden: Tensor = block(rows)[0]
        return hidden

    return _proved(block, _stack(block, [block], None), forward, [block], options)


def packed_relative_bias(attention: Any) -> RelativeBias:
    """The position bias of a T5Attention, which shares its weight.

    Raises:
        ExportError: the attention has none of its own; the first of a stack has it for all.
    """
    if not attention.has_relative_attention_bias:
        raise ExportError("this T5 layer takes its position bias from the first of its stack: pass the whole stack")
    weight = attention.relative_attention_bias.weight
    bias = RelativeBias(
        attention.relative_attention_num_buckets,
        attention.relative_attention_max_distance,
        attention.n_heads,
        bidirectional=not attention.is_decoder,
    )
    bias.weight = weight
    return bias


def packed_t5_attention(attention: Any, bias: RelativeBias) -> SelfAttention:
    """A T5Attention of a sequence to itself as ours, which multiplies by q, k and v at once; causal in a decoder."""
    with torch.device("meta"):  # every weight is replaced below
        packed = SelfAttention(
            attention.d_model,
            attention.n_heads,
            head_size=attention.key_value_proj_dim,
            causal=attention.is_decoder,
            scale=attention.scaling,
        )
    packed.qkv = side_by_side([attention.q, attention.k, attention.v])
    packed.out = attention.o
    packed.relative_bias = bias
    return packed


def packed_t5_ffn(dense: Any, activation: str) -> FFN:
    """T5DenseActDense or T5DenseGatedActDense as ours; `activation` is the config's `dense_act_fn`."""
    gated = hasattr(dense, "wi_0")
    with torch.device("meta"):  # every weight is replaced below
        ffn = FFN(1, 1, activation=gated_activation(activation) if gated else plain_activation(activation, dense.act))
    ffn.up = side_by_side([dense.wi_0, dense.wi_1]) if gated else dense.wi
    ffn.down = dense.wo
    return ffn


def _stack(original: nn.Module, layers: list[Any], norm: nn.Module | None) -> BlockStack:
    eager(original)
    if not layers:
        raise ExportError(f"{type(original).__name__} has no layers")
    blocks = []
    bias: RelativeBias | None = None
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            attention = layer.layer[0].SelfAttention
            bias = packed_relative_bias(attention) if bias is None else bias
            blocks.append(_block(layer, packed_t5_attention(attention, bias)))
    return BlockStack(blocks, norm).eval()


def _block(layer: Any, attention: SelfAttention) -> TransformerBlock:
    first, last = layer.layer[0], layer.layer[-1]
    ffn = packed_t5_ffn(last.DenseReluDense, first.SelfAttention.config.dense_act_fn)
    return TransformerBlock.of(attention, ffn, rms_norm(first.layer_norm), rms_norm(last.layer_norm), place="pre")


def _proved(original: Any, stack: BlockStack, forward: Any, layers: list[nn.Module], options: PackOptions) -> Packed:
    return prove_equal(
        original,
        pack_stack(stack, type(original).__name__),
        one_sequence=in_float64(forward),
        layers=layers,
        seed=options.seed,
    )
