"""The families whose checkpoints are read, and what each calls the parts that tests of malformed ones change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    BertConfig,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from tests.export.adapters.families import D, gpt2, llama, mixtral, switch, t5, with_weights

SIZES = {"hidden_size": D, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


def bert() -> Any:
    return with_weights(BertModel(BertConfig(**SIZES, vocab_size=50), add_pooling_layer=False))


def vit() -> Any:
    return with_weights(ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4), add_pooling_layer=False))


@dataclass(frozen=True)
class Case:
    """A family: a weight of its second layer, its embedding, and what its config calls things."""

    make: Callable[[], Any]
    weight: str
    embedding: str
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    hidden: str = "intermediate_size"
    activation: str = "hidden_act"
    eps: str = "layer_norm_eps"
    depth: int = 2
    odd_heads: str = "does not divide"  # what 5 heads are told
    more: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # of the config: value, message


T5_NAMES: Any = {
    "width": "d_model",
    "heads": "num_heads",
    "layers": "num_layers",
    "hidden": "d_ff",
    "activation": "dense_act_fn",
    "eps": "layer_norm_epsilon",
    "depth": 3,
    "odd_heads": "the config says",  # d_kv is a size of its own, and weights are heads x d_kv wide
}
KV: Mapping[str, tuple[Any, str]] = {
    "num_key_value_heads": (3, r"num_key_value_heads 3 does not divide num_attention_heads 4"),
    "head_dim": (4, r"weight has shape \(32, 32\), the config says \(16, 32\)"),
    "max_position_embeddings": (10**12, r"max_position_embeddings is 10+, expected a positive integer up to 16777216"),
    "rope_parameters": ({"rope_type": "foo"}, r"rope_parameters\.rope_type is 'foo', expected one of default"),
    "rope_scaling": (
        {"rope_type": "linear", "factor": "x"},
        r"rope_scaling\.factor is 'x', expected a positive number",
    ),
}
CASES: dict[str, Case] = {
    "bert": Case(
        bert,
        "encoder.layer.1.intermediate.dense.weight",
        "embeddings.word_embeddings.weight",
        more={
            "position_embedding_type": ("relative_key", "position_embedding_type is 'relative_key'"),
            "is_decoder": (True, "is_decoder is true"),
        },
    ),
    "vit": Case(vit, "encoder.layer.1.intermediate.dense.weight", "embeddings.position_embeddings"),
    "gpt2": Case(
        lambda: gpt2(GPT2LMHeadModel, n_inner=48),
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.wte.weight",
        width="n_embd",
        heads="n_head",
        layers="n_layer",
        hidden="n_inner",
        activation="activation_function",
        eps="layer_norm_epsilon",
    ),
    "llama": Case(
        lambda: llama(LlamaForCausalLM),
        "model.layers.1.mlp.up_proj.weight",
        "model.embed_tokens.weight",
        eps="rms_norm_eps",
        more=KV,
    ),
    "mixtral": Case(
        lambda: mixtral(MixtralForCausalLM),
        "model.layers.1.block_sparse_moe.experts.1.w3.weight",
        "model.embed_tokens.weight",
        eps="rms_norm_eps",
        more={
            **KV,
            "num_local_experts": (4, r"num_local_experts is 4, .* has 3 experts in model\.layers\.0\.block_sparse_moe"),
            "num_experts_per_tok": (4, "num_experts_per_tok is 4, expected at most num_local_experts, 3"),
            "sliding_window": (0, "sliding_window is 0, expected a positive integer"),
        },
    ),
    "t5": Case(
        lambda: t5(T5ForConditionalGeneration),
        "encoder.block.1.layer.0.SelfAttention.q.weight",
        "shared.weight",
        **T5_NAMES,
        more={
            "d_kv": (5, r"q\.weight has shape \(24, 32\), the config says \(20, 32\)"),
            "relative_attention_num_buckets": (9, r"has shape \(8, 4\), the config says \(9, 4\)"),
        },
    ),
    "t5-decoder": Case(
        lambda: t5(T5ForConditionalGeneration),
        "decoder.block.1.layer.1.EncDecAttention.q.weight",
        "shared.weight",
        **{**T5_NAMES, "layers": "num_decoder_layers"},
    ),
    "switch": Case(
        switch,
        "encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight",
        "shared.weight",
        **{**T5_NAMES, "depth": 4},
        more={
            "num_experts": (10**5, r"num_experts is 100000, .* has 3 experts in encoder\.block\.1\.layer\.1\.mlp\.exp"),
            "encoder_sparse_step": (3, r"mlp\.\S+ has no place in the model that the config describes"),
        },
    ),
}
