"""GPT-2's layers (transformers) -> causal pre-norm blocks. Hidden states in, hidden states out: the embeddings of words
and positions stay outside, the last norm is inside where a whole model is given.
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
    causal_mask,
    eager,
    embedding_sampler,
    in_float64,
    last_norm,
    linear_of_conv1d,
    plain_activation,
)
from export.blocks import FFN, BlockStack, SelfAttention, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_stack

_MODULE: Final = "transformers.models.gpt2.modeling_gpt2"


@register_adapter(f"{_MODULE}.GPT2LMHeadModel")
def pack_lm_head_model(model: Any, options: PackOptions) -> Packed:
    """The layers and the last norm of a language model; see `pack_model`."""
    return pack_model(model.transformer, options)


@register_adapter(f"{_MODULE}.GPT2Model")
def pack_model(model: Any, options: PackOptions) -> Packed:
    """Put the layers and the last norm of `model` into a stack and prove that they compute the same.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    stack = _stack(model, list(model.h), last_norm(model.ln_f))

    def forward(rows: Tensor) -> Tensor:
        positions = model.wpe.weight[: rows.shape[1]].to(rows.dtype)  # the model adds them to whatever it is given
        hidden: Tensor = model(inputs_embeds=rows - positions, use_cache=False).last_hidden_state
        return hidden

    packed = _proved(model, stack, forward, [*model.h, model.ln_f], options)
    return replace(packed, sample=embedding_sampler(model.wte.weight, model.wpe.weight))


@register_adapter(f"{_MODULE}.GPT2Block")
def pack_block(block: Any, options: PackOptions) -> Packed:
    """One layer; see `pack_model`."""
    config = block.attn.config

    def forward(rows: Tensor) -> Tensor:
        hidden: Tensor = block(rows, attention_mask=causal_mask(config, rows))
        return hidden

    return _proved(block, _stack(block, [block], None), forward, [block], options)


def _stack(original: nn.Module, layers: list[Any], norm: nn.Module | None) -> BlockStack:
    eager(original)
    blocks = []
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            blocks.append(_block(layer))
    if not blocks:
        raise ExportError(f"{type(original).__name__} has no layers")
    return BlockStack(blocks, norm).eval()


def _block(layer: Any) -> TransformerBlock:
    if hasattr(layer, "crossattention"):
        raise ExportError("this GPT-2 attends to an encoder as well (add_cross_attention): it has no packed form")
    layer.attn.reorder_and_upcast_attn = False  # the same sums in another order, in float32
    with torch.device("meta"):  # every weight is replaced below
        attention = SelfAttention(layer.attn.embed_dim, layer.attn.num_heads, causal=True, scale=layer.attn.scaling)
        activation = plain_activation(layer.attn.config.activation_function, layer.mlp.act)
        ffn = FFN(1, 1, activation=activation)
    attention.qkv, attention.out = linear_of_conv1d(layer.attn.c_attn), linear_of_conv1d(layer.attn.c_proj)
    ffn.up, ffn.down = linear_of_conv1d(layer.mlp.c_fc), linear_of_conv1d(layer.mlp.c_proj)
    return TransformerBlock.of(attention, ffn, layer.ln_1, layer.ln_2, place="pre")


def _proved(original: Any, stack: BlockStack, forward: Any, layers: list[nn.Module], options: PackOptions) -> Packed:
    return prove_equal(
        original,
        pack_stack(stack, type(original).__name__),
        one_sequence=in_float64(forward),
        layers=layers,
        seed=options.seed,
    )
