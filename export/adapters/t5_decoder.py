"""T5's decoder layers (transformers) -> pre-norm decoder blocks: relative bias in self-attention, none across.

Hidden states and the encoder's answer in, hidden states out: embeddings and the language model's head stay outside,
the last norm is inside where a whole decoder is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from export.adapters.equality import prove_equal
from export.adapters.parts import packing
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.t5 import packed_relative_bias, packed_t5_attention, packed_t5_ffn
from export.adapters.transformers_parts import (
    causal_mask,
    eager,
    embedding_sampler,
    in_float64,
    last_norm,
    rms_norm,
    side_by_side,
)
from export.blocks import FFN, CrossAttention, DecoderBlock, DecoderStack, MixtureOfExperts, RelativeBias
from export.errors import ExportError
from export.packed import Packed, pack_decoder

_MODULE: Final = "transformers.models.t5.modeling_t5"


def decoder_of(kind: str) -> Callable[[nn.Module], bool]:
    """Whether a module is of the class `kind`, whose encoders and decoders are one class, and a decoder."""

    def matches(module: nn.Module) -> bool:
        classes = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
        return kind in classes and bool(getattr(module, "is_decoder", False))

    return matches


# Above the encoder's adapter, which has the same classes.
@register_adapter(decoder_of(f"{_MODULE}.T5Stack"), priority=1, accepts_causal=True)
def pack_t5_decoder(decoder: Any, options: PackOptions) -> Packed:
    """Put the layers and the last norm of a T5 decoder into a stack and prove that they compute the same.

    It is causal whether or not that is asked for; its memory is the encoder's last hidden state.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    layers = list(decoder.block)
    stack = packed_decoder_stack(decoder, layers, last_norm(decoder.final_layer_norm), _ffn)

    def forward(rows: Tensor, memory: Tensor) -> Tensor:
        hidden: Tensor = decoder(inputs_embeds=rows, encoder_hidden_states=memory, use_cache=False).last_hidden_state
        return hidden

    packed = _proved(decoder, stack, forward, [*layers, decoder.final_layer_norm], options)
    return replace(packed, sample=embedding_sampler(decoder.embed_tokens.weight))


@register_adapter(decoder_of(f"{_MODULE}.T5Block"), priority=1, accepts_causal=True)
def pack_t5_decoder_block(block: Any, options: PackOptions) -> Packed:
    """One decoder layer that holds the position bias, as the first of a stack does; see `pack_t5_decoder`."""
    config = block.layer[0].SelfAttention.config

    def forward(rows: Tensor, memory: Tensor) -> Tensor:
        hidden: Tensor = block(rows, causal_mask(config, rows), None, memory)[0]
        return hidden

    return _proved(block, packed_decoder_stack(block, [block], None, _ffn), forward, [block], options)


def packed_t5_cross_attention(attention: Any) -> CrossAttention:
    """A T5Attention to the encoder's answer as ours, which multiplies by k and v at once.

    Raises:
        ExportError: it has a position bias, which T5 does not give its cross-attention.
    """
    if attention.has_relative_attention_bias:
        raise ExportError("its cross-attention has a position bias, which has no packed form")
    with torch.device("meta"):  # every weight is replaced below
        packed = CrossAttention(
            attention.d_model, attention.n_heads, head_size=attention.key_value_proj_dim, scale=attention.scaling
        )
    packed.q, packed.kv, packed.out = attention.q, side_by_side([attention.k, attention.v]), attention.o
    return packed


def packed_decoder_stack(
    original: nn.Module,
    layers: list[Any],
    norm: nn.Module | None,
    ffn_of: Callable[[Any], tuple[nn.Module, FFN | MixtureOfExperts]],
) -> DecoderStack:
    """Decoder layers of T5's kind as ours, which share their weights.

    Args:
        original: that has them; its attention becomes plain torch, in place.
        layers: the first holds the position bias of all.
        norm: after the last.
        ffn_of: the norm and the FFN of a layer.

    Raises:
        ExportError: there is no layer, or a part has no packed form; names the layer.
    """
    eager(original)
    if not layers:
        raise ExportError(f"{type(original).__name__} has no layers")
    blocks = []
    bias: RelativeBias | None = None
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            bias = packed_relative_bias(layer.layer[0].SelfAttention) if bias is None else bias
            blocks.append(_block(layer, bias, *ffn_of(layer)))
    return DecoderStack(blocks, norm).eval()


def _block(layer: Any, bias: RelativeBias, norm: nn.Module, ffn: FFN | MixtureOfExperts) -> DecoderBlock:
    own, cross, _ = layer.layer
    return DecoderBlock.of(
        packed_t5_attention(own.SelfAttention, bias),
        packed_t5_cross_attention(cross.EncDecAttention),
        ffn,
        (rms_norm(own.layer_norm), rms_norm(cross.layer_norm), norm),
        place="pre",
    )


def _ffn(layer: Any) -> tuple[nn.Module, FFN]:
    last, activation = layer.layer[-1], layer.layer[0].SelfAttention.config.dense_act_fn
    return rms_norm(last.layer_norm), packed_t5_ffn(last.DenseReluDense, activation)


def _proved(
    original: Any,
    stack: DecoderStack,
    forward: Callable[[Tensor, Tensor], Tensor],
    layers: list[nn.Module],
    options: PackOptions,
) -> Packed:
    return prove_equal(
        original,
        pack_decoder(stack, type(original).__name__),
        one_sequence=in_float64(forward),
        layers=layers,
        seed=options.seed,
    )
