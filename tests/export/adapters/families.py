"""Small models of transformers with weights that matter: norms that scale, scores that are not uniform."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    MixtralConfig,
    MixtralModel,
    SwitchTransformersConfig,
    SwitchTransformersEncoderModel,
    T5Config,
    T5EncoderModel,
)

D = 32
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def with_weights(model: nn.Module, std: float = 0.25) -> Any:
    """`model` in eval mode, its weights drawn anew."""
    for name, parameter in model.named_parameters():
        norm = "norm" in name or "ln_" in name
        nn.init.normal_(parameter.requires_grad_(False), 1.0 if norm and name.endswith("weight") else 0.0, std)
    return model.eval()


def _decoder(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    return {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **changes}


def llama(model: Any = LlamaModel, **changes: Any) -> Any:
    return with_weights(model(LlamaConfig(**_decoder(**changes))))


def mistral(model: Any = MistralModel, **changes: Any) -> Any:
    return with_weights(model(MistralConfig(**_decoder(**{"sliding_window": 5, **changes}))))


def mixtral(model: Any = MixtralModel, **changes: Any) -> Any:
    return with_weights(model(MixtralConfig(**_decoder(**{"num_local_experts": 3, **changes}))))


def gpt2(model: Any = GPT2Model, **changes: Any) -> Any:
    sizes = {"n_embd": D, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 300}
    return with_weights(model(GPT2Config(bos_token_id=1, eos_token_id=2, **{**sizes, **changes})))


def t5(model: Any = T5EncoderModel, **changes: Any) -> Any:
    sizes = {"d_model": D, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_heads": 4, "vocab_size": 50}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    return with_weights(model(T5Config(**{**sizes, **buckets, **changes})), 0.15)  # its scores have no scale


def switch(model: Any = SwitchTransformersEncoderModel, **changes: Any) -> Any:
    sizes = {"d_model": D, "d_kv": 6, "d_ff": 40, "num_layers": 4, "num_heads": 4, "vocab_size": 50, "num_experts": 3}
    sparse = {"num_sparse_encoder_layers": 2, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1}
    return with_weights(model(SwitchTransformersConfig(**{**sizes, **sparse, **changes})), 0.15)
