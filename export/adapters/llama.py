"""Llama's, Mistral's and Mixtral's decoder layers (transformers) -> pre-norm rotary blocks with shared key heads.

Hidden states in, hidden states out: embeddings and the head of the vocabulary stay outside, the last norm is inside
where a whole model is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from export.adapters.experts import prove_equal_to_experts
from export.adapters.mixtral import mixtral_experts
from export.adapters.parts import packing
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.transformers_parts import (
    causal_mask,
    eager,
    embedding_sampler,
    gated_activation,
    last_norm,
    rms_norm,
    side_by_side,
)
from export.blocks import FFN, BlockStack, MixtureOfExperts, Rotary, SelfAttention, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_stack

_MODELS: Final = "transformers.models"
_FAMILIES: Final = {
    f"{_MODELS}.llama.modeling_llama": "Llama",
    f"{_MODELS}.mistral.modeling_mistral": "Mistral",
    f"{_MODELS}.mixtral.modeling_mixtral": "Mixtral",
}
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")  # the others change with the length of the sequence
_TABLE: Final = 2048  # positions that every file has: the service's default for its longest sequence
_SHORT_WINDOW: Final = 4  # a sliding window that the proof's short sequences cross


def _named(suffix: str) -> tuple[str, ...]:
    return tuple(f"{module}.{prefix}{suffix}" for module, prefix in _FAMILIES.items())


@register_adapter(*_named("ForCausalLM"))
def pack_causal_lm(model: Any, options: PackOptions) -> Packed:
    """The layers and the last norm of a language model; see `pack_model`."""
    return pack_model(model.model, options)


@register_adapter(*_named("Model"))
def pack_model(model: Any, options: PackOptions) -> Packed:
    """Put the layers and the last norm of `model` into a stack and prove that they compute the same.

    Raises:
        ExportError: a part has no packed form, such as positions whose frequencies change with the length.
        ProofError: the original computes something else.
    """
    eager(model)
    layers = list(model.layers[: model.config.num_hidden_layers])
    stack = _stack(layers, model.rotary_emb, last_norm(model.norm))

    def forward(rows: Tensor) -> Tensor:
        hidden: Tensor = model(inputs_embeds=rows, use_cache=False).last_hidden_state
        return hidden

    packed = _proved(model, stack, forward, [*layers, model.norm, model.rotary_emb], options)
    return replace(packed, sample=embedding_sampler(model.embed_tokens.weight))


@register_adapter(*_named("DecoderLayer"))
def pack_layer(layer: Any, options: PackOptions) -> Packed:
    """One decoder layer; see `pack_model`. Its positions are those that its config describes."""
    eager(layer)
    config = layer.self_attn.config
    rotary = _rotary_class(layer)(config)

    def forward(rows: Tensor) -> Tensor:
        positions = torch.arange(rows.shape[1]).unsqueeze(0)
        turns = rotary(rows, position_ids=positions)
        hidden: Tensor = layer(rows, attention_mask=causal_mask(config, rows), position_embeddings=turns)
        return hidden

    return _proved(layer, _stack([layer], rotary), forward, [layer, rotary], options)


def packed_rotary(rotary: Any) -> Rotary:
    """transformers' rotary embedding with frequencies that are fixed, as ours.

    Raises:
        ExportError: they change with the length of the sequence, or are of an unknown type.
    """
    if rotary.rope_type not in _ROPE_TYPES:
        raise ExportError(
            f"rope_type is {rotary.rope_type!r}, expected one of {', '.join(_ROPE_TYPES)}: the frequencies of the "
            "others change with the length of the sequence"
        )
    longest = max(int(rotary.config.max_position_embeddings), _TABLE)
    return Rotary(rotary.inv_freq, max_positions=longest, scaling=float(rotary.attention_scaling))


def packed_llama_attention(attention: Any, rotary: Rotary) -> SelfAttention:
    """A LlamaAttention or its equal (q_proj, k_proj, v_proj, o_proj) as ours: the first three become one matmul."""
    config = attention.config
    with torch.device("meta"):  # every weight is replaced below
        packed = SelfAttention(
            attention.q_proj.in_features,
            config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            causal=True,
            scale=attention.scaling,
            window=getattr(config, "sliding_window", None),
            rotary=rotary,
        )
    packed.qkv = side_by_side([attention.q_proj, attention.k_proj, attention.v_proj])
    packed.out = attention.o_proj
    return packed


def _stack(layers: list[Any], rotary: Any, norm: nn.Module | None = None) -> BlockStack:
    shared = packed_rotary(rotary)
    blocks = []
    for index, layer in enumerate(layers):
        with packing(f"layer {index}", layer):
            blocks.append(_block(layer, shared))
    if not blocks:
        raise ExportError("the model has no layers")
    return BlockStack(blocks, norm).eval()


def _block(layer: Any, rotary: Rotary) -> TransformerBlock:
    return TransformerBlock.of(
        packed_llama_attention(layer.self_attn, rotary),
        _ffn(layer.mlp, layer.self_attn.config.hidden_act),
        rms_norm(layer.input_layernorm),
        rms_norm(layer.post_attention_layernorm),
        place="pre",
    )


def _ffn(mlp: Any, activation: str) -> FFN | MixtureOfExperts:
    if hasattr(mlp, "experts"):
        return mixtral_experts(mlp)
    d_ff, d = mlp.up_proj.weight.shape
    with torch.device("meta"):  # every weight is replaced below
        ffn = FFN(d, d_ff, activation=gated_activation(activation))
    ffn.up = side_by_side([mlp.gate_proj, mlp.up_proj])
    ffn.down = mlp.down_proj
    return ffn


def _proved(original: Any, stack: BlockStack, forward: Any, layers: list[nn.Module], options: PackOptions) -> Packed:
    packed = pack_stack(stack, type(original).__name__)  # described with the windows that it has
    with _short_windows(original, stack):
        return prove_equal_to_experts(original, packed, options, forward=forward, layers=layers)


@contextmanager
def _short_windows(original: nn.Module, stack: BlockStack) -> Iterator[None]:
    """Inside, sliding windows of both are so short that the proof's sequences cross them."""
    attentions = [part for part in stack.modules() if isinstance(part, SelfAttention)]
    configs: list[Any] = [part.config for part in original.modules() if hasattr(part, "config")]
    places = [(part, "window") for part in attentions] + [(config, "sliding_window") for config in configs]
    before = [(part, name, size) for part, name in places if (size := getattr(part, name, None)) is not None]
    for part, name, size in before:
        setattr(part, name, min(size, _SHORT_WINDOW))
    try:
        yield
    finally:
        for part, name, size in before:
            setattr(part, name, size)


def _rotary_class(layer: nn.Module) -> Any:
    """The rotary embedding of the family whose layer, or subclass of one, this is."""
    for cls in type(layer).__mro__:
        if cls.__module__ in _FAMILIES:
            return getattr(importlib.import_module(cls.__module__), f"{_FAMILIES[cls.__module__]}RotaryEmbedding")
    raise AssertionError("an adapter is only given what it was registered for")
