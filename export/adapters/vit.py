"""ViT encoder layers (ViT, DeiT) -> a packed stack of pre-norm blocks on image tokens.

From a checkpoint and its config.json, under the names of released checkpoints or those of transformers 5, or from
transformers' modules in memory. The model's last norm belongs to the stack where its last layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from export.adapters.encoder_files import EncoderConfig, Layout, read_encoder
from export.adapters.encoder_modules import pack_encoder_modules
from export.adapters.registry import PackOptions, register_adapter
from export.checkpoint import Checkpoint
from export.errors import SourceError
from export.lora import Lora
from export.packed import Packed, Sampler, pack_stack
from service.packing import Float32

LAYOUT: Final = Layout(
    family="ViT",
    stem="layers",
    place="pre",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    attention_out="attention.o_proj",
    up="mlp.fc1",
    down="mlp.fc2",
    norm1="layernorm_before",
    norm2="layernorm_after",
    final_norm="layernorm",
)
RELEASED: Final = replace(
    LAYOUT,
    stem="encoder.layer",
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    attention_out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)
_POOL: Final = 512  # image patches that parity tokens are drawn from
_SEED: Final = 0


def pack_vit(
    weights: Path,
    config: Path,
    *,
    layers: str | None = None,
    lora: Path | None = None,
    trust_pickle: bool = False,
) -> Packed:
    """Read encoder layers as one stack of pre-norm blocks, float32; arguments and errors are those of `pack_bert`."""
    shape = EncoderConfig(config)
    adapter = None if lora is None else Lora(lora)
    with Checkpoint(weights, trust_pickle=trust_pickle) as checkpoint:
        encoder = read_encoder(checkpoint, shape, [LAYOUT, RELEASED], layers=layers, lora=adapter)
        source = {**checkpoint.provenance(), **({} if adapter is None else adapter.provenance)}
        sample = _patch_sampler(checkpoint, encoder.prefix, shape.d)
    packed = replace(pack_stack(encoder.stack, "vit"), source=source)
    return packed if sample is None else replace(packed, sample=sample, sampled="embedded random image patches")


@register_adapter(
    "transformers.models.vit.modeling_vit.ViTLayer",
    "transformers.models.deit.modeling_deit.DeiTLayer",
)
def pack_vit_layer(original: Any, options: PackOptions) -> Packed:
    """Pack one layer of transformers; see `pack_encoder_modules` for the errors."""
    return pack_encoder_modules(original, [original], LAYOUT, activation="mlp.activation_fn", options=options)


def _patch_sampler(checkpoint: Checkpoint, prefix: str, d: int) -> Sampler | None:
    """Draw from projection(patch of N(0, 1) pixels) + position, the class token first; None without embeddings."""
    stem = f"{prefix}embeddings."
    names = [f"{stem}{name}" for name in ("patch_embeddings.projection.weight", "position_embeddings", "cls_token")]
    keys = set(checkpoint.keys())
    if not all(name in keys for name in names):
        return None
    kernel, places = checkpoint.shape(names[0]), checkpoint.shape(names[1])
    if len(kernel) != 4 or kernel[0] != d:
        raise SourceError(f"{checkpoint.path}: {names[0]} has shape {kernel}, expected ({d}, channels, height, width)")
    if len(places) != 3 or places[0] != 1 or places[1] < 1 or places[2] != d:
        raise SourceError(f"{checkpoint.path}: {names[1]} has shape {places}, expected (1, one or more, {d})")
    projection = checkpoint.read(names[0]).flatten(1)
    positions = checkpoint.read(names[1])[0]
    class_token = checkpoint.read(names[2], (1, 1, d)).flatten()
    bias_key = f"{stem}patch_embeddings.projection.bias"
    bias = checkpoint.read(bias_key, (d,)) if bias_key in keys else torch.zeros(d)
    pixels = torch.randn(_POOL, projection.shape[1], generator=torch.Generator().manual_seed(_SEED))
    patches = pixels @ projection.T + bias

    def sample(seq_lens: Sequence[int], rng: np.random.Generator) -> Float32:
        rows: Tensor = patches[torch.from_numpy(rng.integers(len(patches), size=sum(seq_lens)))]
        where = torch.cat([torch.arange(length) for length in seq_lens])
        rows = torch.where((where == 0)[:, None], class_token, rows) + positions[where % len(positions)]
        array: Float32 = rows.numpy()
        return array

    return sample
