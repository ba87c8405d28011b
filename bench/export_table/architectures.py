"""The architectures of the table: for each adapter at least one small model with random weights, and two real sizes.

A family that lands without a row here is missed by the table, which says so and fails (`uncovered`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    MixtralConfig,
    MixtralModel,
    RobertaConfig,
    RobertaModel,
    SwitchTransformersConfig,
    SwitchTransformersEncoderModel,
    SwitchTransformersModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    ViTConfig,
    ViTModel,
)

from demo.minilm import files as minilm_files
from export.adapters.bert import pack_bert
from export.adapters.random_weights import random_ffn, random_stack
from export.adapters.registry import BUILT_IN, pack
from export.adapters.vit import pack_vit
from export.blocks import BottleneckAdapter, TransformerBlock
from export.lora import CONFIG as LORA_CONFIG
from export.lora import WEIGHTS as LORA_WEIGHTS
from export.packed import Packed

D: Final = 128
D_FF: Final = 512
HEADS: Final = 4
LAYERS: Final = 2
_SEED: Final = 0
_VOCABULARY: Final = 64
_RANK: Final = 4


@dataclass(frozen=True)
class Architecture:
    """One row for each precision.

    name: in the page.
    slug: of its bundles, and on the command line.
    adapter: the module under `export.adapters` that packs it.
    make: the packed model, given an empty folder to write files to.
    windows: tokens of the windows that are timed.
    held_to_floor: whether its speed has a bar: only where nearly all the work is in weight matmuls.
    sentences: whether its quality is the cosine of sentence embeddings (`bench.export_table.sentences`).
    """

    name: str
    slug: str
    adapter: str
    make: Callable[[Path], Packed]
    windows: Sequence[int] = (64, 256)
    held_to_floor: bool = False
    sentences: bool = False


def uncovered(architectures: Sequence[Architecture]) -> list[str]:
    """Adapters of this package that none of `architectures` goes through."""
    return sorted(set(BUILT_IN) - {f"export.adapters.{architecture.adapter}" for architecture in architectures})


def _of(make: Callable[[], nn.Module], *, causal: bool = False) -> Callable[[Path], Packed]:
    def packed(_folder: Path) -> Packed:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return pack(make(), causal=causal)

    return packed


def _with_weights(model: nn.Module, std: float) -> nn.Module:
    """`model` with weights that matter: its own initialisation makes scores all but uniform and norms do nothing."""
    for name, parameter in model.named_parameters():
        norm = "norm" in name.lower() or "ln_" in name
        nn.init.normal_(parameter.requires_grad_(False), 1.0 if norm and name.endswith("weight") else 0.0, std)
    return model.eval()


_ENCODER: Final[dict[str, Any]] = {
    "hidden_size": D,
    "intermediate_size": D_FF,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
}
_LLAMA: Final[dict[str, Any]] = {**_ENCODER, "num_key_value_heads": 2, "vocab_size": _VOCABULARY}
_T5: Final[dict[str, Any]] = {
    "vocab_size": _VOCABULARY,
    "d_model": D,
    "d_kv": D // HEADS,
    "d_ff": D_FF,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "feed_forward_proj": "gated-gelu",
}


def _bert() -> nn.Module:
    return _with_weights(BertModel(BertConfig(**_ENCODER, vocab_size=_VOCABULARY), add_pooling_layer=False), 0.1)


def _roberta() -> nn.Module:
    return _with_weights(RobertaModel(RobertaConfig(**_ENCODER, vocab_size=_VOCABULARY), add_pooling_layer=False), 0.1)


def _encoder_of(make: Callable[[], nn.Module]) -> nn.Module:
    encoder = make().encoder
    assert isinstance(encoder, nn.Module)
    return encoder


def _vit(folder: Path) -> Packed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        config = ViTConfig(**_ENCODER, image_size=32, patch_size=8)
        model: Any = _with_weights(ViTModel(config, add_pooling_layer=False), 0.1)
    model.save_pretrained(folder)
    return pack_vit(folder / "model.safetensors", folder / "config.json")


def _gpt2() -> nn.Module:
    sizes = {"n_embd": D, "n_inner": D_FF, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2048}
    return _with_weights(GPT2Model(GPT2Config(**sizes, vocab_size=_VOCABULARY, bos_token_id=1, eos_token_id=2)), 0.1)


def _llama() -> nn.Module:
    return _with_weights(LlamaModel(LlamaConfig(**_LLAMA)), 0.1)


def _mistral() -> nn.Module:
    return _with_weights(MistralModel(MistralConfig(**_LLAMA, sliding_window=16)), 0.1)


def _mixtral() -> nn.Module:
    sizes = {**_LLAMA, "num_hidden_layers": 1, "intermediate_size": 256}
    return _with_weights(MixtralModel(MixtralConfig(**sizes, num_local_experts=4)), 0.1)


def _t5_encoder() -> nn.Module:
    return _with_weights(T5EncoderModel(T5Config(**_T5)), 0.06)  # its scores have no scale


def _t5_decoder() -> nn.Module:
    model: Any = _with_weights(T5Model(T5Config(**_T5, num_decoder_layers=LAYERS, use_cache=False)), 0.06)
    decoder: nn.Module = model.decoder
    return decoder


def _switch() -> nn.Module:
    sizes = {key: value for key, value in _T5.items() if key != "feed_forward_proj"}
    config = SwitchTransformersConfig(
        **{**sizes, "d_ff": 256}, num_sparse_encoder_layers=1, num_experts=4, expert_capacity=1
    )
    return _with_weights(SwitchTransformersEncoderModel(config), 0.06)


def _switch_decoder() -> nn.Module:
    sizes = {key: value for key, value in _T5.items() if key != "feed_forward_proj"}
    config = SwitchTransformersConfig(
        **{**sizes, "d_ff": 256}, num_decoder_layers=LAYERS, num_sparse_decoder_layers=1, num_experts=4
    )
    decoder: nn.Module = SwitchTransformersModel(config).decoder
    return _with_weights(decoder, 0.06)


def _torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, HEADS, D_FF, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(D), enable_nested_tensor=False).eval()


def _torch_decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, HEADS, D_FF, batch_first=True), LAYERS).eval()


def _bottleneck() -> nn.Module:
    stack = random_stack(D, HEADS, D_FF, layers=LAYERS)
    for block in stack.blocks:
        assert isinstance(block, TransformerBlock)
        block.adapter1, block.adapter2 = BottleneckAdapter(D, D // 4), BottleneckAdapter(D, D // 4)
    return stack.eval()


def _lora(folder: Path) -> Packed:
    """A small BERT in files, and an adapter as PEFT stores one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: Any = _bert()
        model.save_pretrained(folder)
        adapter = folder / "lora"
        adapter.mkdir()
        tensors = {}
        for layer in range(LAYERS):
            for part in ("query", "value"):
                name = f"base_model.model.encoder.layer.{layer}.attention.self.{part}"
                tensors[f"{name}.lora_A.weight"] = 0.1 * torch.randn(_RANK, D)
                tensors[f"{name}.lora_B.weight"] = 0.1 * torch.randn(D, _RANK)
    save_file(tensors, adapter / LORA_WEIGHTS)
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": ["query", "value"]}
    (adapter / LORA_CONFIG).write_text(json.dumps(config))
    return pack_bert(folder / "model.safetensors", folder / "config.json", lora=adapter)


def _minilm(_folder: Path) -> Packed:
    return pack_bert(minilm_files() / "model.safetensors", minilm_files() / "config.json")


ARCHITECTURES: Final[tuple[Architecture, ...]] = (
    Architecture(
        "FFN 768/3072, GELU",
        "ffn",
        "own_blocks",
        _of(lambda: random_ffn(768, 3072, init="normal")),
        windows=(1, 64, 256, 1024, 4096),
        held_to_floor=True,
    ),
    Architecture("MiniLM, six trained BERT layers", "minilm", "bert", _minilm, sentences=True),
    Architecture("BERT layers", "bert", "bert", _of(lambda: _encoder_of(_bert))),
    Architecture("RoBERTa layers", "roberta", "bert", _of(lambda: _encoder_of(_roberta))),
    Architecture("BERT layers, LoRA merged", "lora", "bert", _lora),
    Architecture("blocks with bottleneck adapters", "bottleneck", "own_blocks", _of(_bottleneck)),
    Architecture("ViT layers", "vit", "vit", _vit),
    Architecture("GPT-2 layers", "gpt2", "gpt2", _of(_gpt2)),
    Architecture("Llama layers", "llama", "llama", _of(_llama)),
    Architecture("Mistral layers, sliding window", "mistral", "llama", _of(_mistral)),
    Architecture("Mixtral layer, 4 experts, top 2", "mixtral", "mixtral", _of(_mixtral)),
    Architecture("Switch encoder, 4 experts, top 1", "switch", "switch", _of(_switch)),
    Architecture("Switch decoder, 4 experts, top 1", "switch-decoder", "switch_decoder", _of(_switch_decoder)),
    Architecture("T5 encoder", "t5", "t5", _of(_t5_encoder)),
    Architecture("T5 decoder", "t5-decoder", "t5_decoder", _of(_t5_decoder)),
    Architecture("nn.TransformerEncoder", "torch-encoder", "torch_transformer", _of(_torch_encoder)),
    Architecture("nn.TransformerDecoder", "torch-decoder", "torch_decoder", _of(_torch_decoder, causal=True)),
)
