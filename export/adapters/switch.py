"""Switch Transformers' encoder layers and FFNs (transformers) -> top-1 mixtures of experts, in T5's blocks or alone.

The original drops a token when its expert has had `expert_capacity` others of the sequence: that would make an answer
depend on its neighbours. Here no token is dropped, and the proof compares with the original at unlimited capacity.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from export.adapters.experts import empty_ffn, prove_equal_to_experts
from export.adapters.parts import packing
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.t5 import packed_relative_bias, packed_t5_attention
from export.adapters.transformers_parts import eager, embedding_sampler, last_norm, rms_norm
from export.blocks import FFN, BlockStack, MixtureOfExperts, RelativeBias, ResidualFFN, Router, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_moe, pack_residual, pack_stack

_MODULE: Final = "transformers.models.switch_transformers.modeling_switch_transformers"
_FAMILY: Final = "switch"
_NO_CAPACITY: Final = 1 << 62


@register_adapter(f"{_MODULE}.SwitchTransformersSparseMLP")
def pack_sparse_mlp(mlp: Any, options: PackOptions) -> Packed:
    """Put the weights of a SwitchTransformersSparseMLP into a mixture of experts, proved to compute the same."""
    moe = switch_experts(mlp).eval()
    return prove_equal_to_experts(mlp, pack_moe(moe, _FAMILY), options)


@register_adapter(f"{_MODULE}.SwitchTransformersLayerFF")
def pack_layer_ff(layer: Any, options: PackOptions) -> Packed:
    """Put a SwitchTransformersLayerFF, sparse or dense, into an FFN with its pre-norm and residual; see above."""
    return prove_equal_to_experts(layer, pack_residual(switch_layer_ff(layer).eval(), _FAMILY), options)


@register_adapter(f"{_MODULE}.SwitchTransformersEncoderModel")
def pack_encoder_model(model: Any, options: PackOptions) -> Packed:
    """The layers and the last norm of a SwitchTransformersEncoderModel; see `pack_switch_stack`."""
    return pack_switch_stack(model.encoder, options)


@register_adapter(f"{_MODULE}.SwitchTransformersStack")
def pack_switch_stack(encoder: Any, options: PackOptions) -> Packed:
    """Put the layers, dense and sparse, and the last norm of an encoder into a stack, proved to compute the same.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    eager(encoder)
    blocks: list[TransformerBlock] = []
    bias: RelativeBias | None = None
    for index, layer in enumerate(encoder.block):
        with packing(f"layer {index}", layer):
            attention, last = layer.layer[0], layer.layer[-1]
            bias = packed_relative_bias(attention.SelfAttention) if bias is None else bias
            packed_attention = packed_t5_attention(attention.SelfAttention, bias)
            ffn = switch_layer_ff(last)
            norm = rms_norm(attention.layer_norm)
            blocks.append(TransformerBlock.of(packed_attention, ffn.ffn, norm, ffn.norm, place="pre"))
    if not blocks:
        raise ExportError("the encoder has no layers")
    stack = BlockStack(blocks, last_norm(encoder.final_layer_norm)).eval()

    def forward(rows: Tensor) -> Tensor:
        hidden: Tensor = encoder(inputs_embeds=rows).last_hidden_state
        return hidden

    packed = prove_equal_to_experts(
        encoder,
        pack_stack(stack, type(encoder).__name__),
        options,
        forward=forward,
        layers=[*encoder.block, encoder.final_layer_norm],
    )
    return replace(packed, sample=embedding_sampler(encoder.embed_tokens.weight))


def switch_layer_ff(layer: Any) -> ResidualFFN:
    """A pre-norm FFN with a residual that shares the weights of a SwitchTransformersLayerFF."""
    ffn = switch_experts(layer.mlp) if layer.is_sparse else switch_ffn(layer.mlp)
    return ResidualFFN(rms_norm(layer.layer_norm), ffn)


def switch_experts(mlp: Any) -> MixtureOfExperts:
    """A mixture that shares the weights of a SwitchTransformersSparseMLP, which is set to drop no token."""
    mlp.router.expert_capacity = _NO_CAPACITY
    classifier = mlp.router.classifier
    num_experts, d = classifier.weight.shape
    with torch.device("meta"):
        router = Router(d, num_experts, 1, normalise=False, bias=classifier.bias is not None)
    router.projection = classifier
    return MixtureOfExperts(router, [switch_ffn(expert) for expert in mlp.experts.values()])


def switch_ffn(dense: Any) -> FFN:
    """An FFN that shares the weights of a SwitchTransformersDenseActDense."""
    ffn = empty_ffn(dense.wi.in_features, dense.wi.out_features, dense.act)
    ffn.up, ffn.down = dense.wi, dense.wo
    return ffn
