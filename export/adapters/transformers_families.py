"""Where the parts of a family are: in transformers' modules, and under which names in its files.

Knows names and shapes, reads nothing and imports nothing of transformers: `transformers_files` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from export.adapters.config_keys import ConfigKeys

Shape = tuple[int, ...]
Place = tuple[slice | int, ...]
Pieces = Callable[[str, Shape], Iterator[tuple[str, Place]]]


def as_named(name: str, _shape: Shape) -> Iterator[tuple[str, Place]]:
    """A module's tensor is one of the file, of the same name."""
    yield name, ()


def mixtral_pieces(name: str, shape: Shape) -> Iterator[tuple[str, Place]]:
    """Mixtral as it is released: a tensor for each expert, w1 the gate, w3 up and w2 down, which the module stacks.

    Args:
        name: of the module's tensor.
        shape: of the module's tensor; (experts, 2 d_ff, d) for `gate_up_proj`, (experts, d, d_ff) for `down_proj`.
    """
    name = name.replace(".mlp.", f".{_RELEASED_MIXTRAL}.")
    stem, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        for expert in range(shape[0]):
            yield f"{stem}.{expert}.w1.weight", (expert, slice(shape[1] // 2))
            yield f"{stem}.{expert}.w3.weight", (expert, slice(shape[1] // 2, None))
    elif leaf == "down_proj":
        for expert in range(shape[0]):
            yield f"{stem}.{expert}.w2.weight", (expert,)
    else:
        yield name, ()


@dataclass(frozen=True)
class Family:
    """Where the parts of a family are, in its modules and in its files.

    model, config: transformers' classes; prefixes: what its tensors' names may begin with in a file; layers, norm,
    words, positions: names of its parts; keys: of its config; part: the submodule that is exported, which shares the
    embedding `words`, or the whole model; ignored: tensors of a layer that hold no weights; released: how files name
    tensors that have this part in their names, where that is not how the module does; beside: names in the model's
    other stack, which is not exported.
    """

    model: str
    config: str
    prefixes: tuple[str, ...]
    layers: str
    norm: str
    words: str
    keys: ConfigKeys
    positions: str | None = None
    part: str = ""
    ignored: str = r"(?!)"
    released: tuple[str, Pieces] | None = None
    beside: str = r"(?!)"

    def pieces(self, keys: list[str], prefix: str) -> Pieces:
        """How a file with these tensors names those of the module."""
        if self.released is not None:
            mark, pieces = self.released
            stem = re.escape(f"{prefix}{self.layers}.")
            if any(re.match(rf"{stem}\d+\.{mark}\.", key) for key in keys):
                return pieces
        return as_named


_RELEASED_MIXTRAL: Final = "block_sparse_moe"
_MODELS: Final = "transformers.models"
_LLAMA_KEYS: Final = ConfigKeys(
    sizes=("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    optional=("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window"),
    layers="num_hidden_layers",
    activation="hidden_act",
    eps="rms_norm_eps",
    divides=(("num_key_value_heads", "num_attention_heads"),),
    heads=("num_attention_heads", "hidden_size"),
)
_T5_KEYS: Final = ConfigKeys(
    sizes=("d_model", "d_kv", "d_ff", "num_heads", "num_layers"),
    optional=("num_decoder_layers", "relative_attention_num_buckets", "relative_attention_max_distance"),
    layers="num_layers",
    activation="dense_act_fn",
    eps="layer_norm_epsilon",
)
_LLAMA: Final = Family(
    f"{_MODELS}.llama.modeling_llama.LlamaModel",
    f"{_MODELS}.llama.configuration_llama.LlamaConfig",
    ("model.", ""),
    "layers",
    "norm",
    "embed_tokens",
    _LLAMA_KEYS,
    ignored=r"self_attn\.rotary_emb\.inv_freq",
)
_T5: Final = Family(
    f"{_MODELS}.t5.modeling_t5.T5EncoderModel",
    f"{_MODELS}.t5.configuration_t5.T5Config",
    ("",),
    "encoder.block",
    "encoder.final_layer_norm",
    "shared",
    _T5_KEYS,
    part="encoder",
    beside=r"decoder\.block\.",
)
# command -> config.json's `model_type` -> family
FAMILIES: Final[Mapping[str, Mapping[str, Family]]] = {
    "llama": {
        "llama": _LLAMA,
        "mistral": replace(
            _LLAMA,
            model=f"{_MODELS}.mistral.modeling_mistral.MistralModel",
            config=f"{_MODELS}.mistral.configuration_mistral.MistralConfig",
        ),
    },
    "mixtral": {
        "mixtral": replace(
            _LLAMA,
            model=f"{_MODELS}.mixtral.modeling_mixtral.MixtralModel",
            config=f"{_MODELS}.mixtral.configuration_mixtral.MixtralConfig",
            keys=replace(_LLAMA_KEYS, experts="num_local_experts", top_k="num_experts_per_tok"),
            released=(_RELEASED_MIXTRAL, mixtral_pieces),
        )
    },
    "gpt2": {
        "gpt2": Family(
            f"{_MODELS}.gpt2.modeling_gpt2.GPT2Model",
            f"{_MODELS}.gpt2.configuration_gpt2.GPT2Config",
            ("transformer.", ""),
            "h",
            "ln_f",
            "wte",
            ConfigKeys(
                sizes=("n_embd", "n_head", "n_layer"),
                optional=("n_inner", "n_positions"),
                layers="n_layer",
                activation="activation_function",
                eps="layer_norm_epsilon",
                divides=(("n_head", "n_embd"),),
            ),
            positions="wpe",
            ignored=r"attn\.(masked_)?bias",
        )
    },
    "t5": {"t5": _T5},
    "t5-decoder": {
        "t5": replace(
            _T5,
            model=f"{_MODELS}.t5.modeling_t5.T5Model",
            layers="decoder.block",
            norm="decoder.final_layer_norm",
            keys=replace(_T5_KEYS, layers="num_decoder_layers"),
            part="decoder",
            beside=r"encoder\.block\.",
            ignored=r"layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # transformers never used it
        )
    },
    "switch": {
        "switch_transformers": replace(
            _T5,
            model=f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersEncoderModel",
            config=f"{_MODELS}.switch_transformers.configuration_switch_transformers.SwitchTransformersConfig",
            keys=replace(_T5_KEYS, experts="num_experts"),
        )
    },
    "switch-decoder": {
        "switch_transformers": replace(
            _T5,
            model=f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersModel",
            config=f"{_MODELS}.switch_transformers.configuration_switch_transformers.SwitchTransformersConfig",
            layers="decoder.block",
            norm="decoder.final_layer_norm",
            keys=replace(_T5_KEYS, layers="num_decoder_layers", experts="num_experts"),
            part="decoder",
            beside=r"encoder\.block\.",
            ignored=r"layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        )
    },
}
