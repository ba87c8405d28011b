"""ViT layers from files, under the names of released checkpoints and of today's, and in memory, equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import ViTConfig, ViTModel

from export.adapters.equality import EQUALS
from export.adapters.registry import pack
from export.adapters.vit import pack_vit
from export.errors import SourceError
from export.precision import float64_layer_by_layer

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "image_size": 16,
    "patch_size": 4,
    "layer_norm_eps": 1e-7,
}


def small_model(**changes: Any) -> ViTModel:
    config = ViTConfig(**{**SMALL, **changes}, attn_implementation="sdpa")
    model = ViTModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name and "weight" in name else 0.0, std=0.3)
    return model


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[Path, Path]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors", folder / "config.json"


def released(model: ViTModel) -> dict[str, Tensor]:
    names = {
        "layers.": "vit.encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        for new, old in names.items():
            name = name.replace(new, old)
        tensors[name if name.startswith("vit.") else f"vit.{name}"] = tensor
    return tensors


@pytest.mark.parametrize("as_released", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("layers", "chosen"), [(None, range(3)), ("1:3", range(1, 3)), ("0:2", range(2))])
def test_layers_equal_transformers(tmp_path: Path, as_released: bool, bias: bool, layers: str, chosen: range) -> None:
    model = small_model(qkv_bias=bias)
    tensors = released(model) if as_released else dict(model.state_dict())
    packed = pack_vit(*write(tmp_path, tensors, {**SMALL, "qkv_bias": bias}), layers=layers)
    assert packed.architecture["final_norm"] is (chosen.stop == 3)
    assert packed.architecture["norm_place"] == "pre"
    seq_lens = [17, 1, 5]
    tokens = torch.randn(sum(seq_lens), 24, dtype=torch.float64)
    with float64_layer_by_layer(packed.layers):
        found = packed.module(tokens, torch.tensor(seq_lens))
    model.double()
    expected = []
    for rows in tokens.split(seq_lens):  # type: ignore[no-untyped-call]
        hidden = rows[None]
        for index in chosen:
            hidden = model.layers[index](hidden)
        expected.append((model.layernorm(hidden) if chosen.stop == 3 else hidden)[0])
    reference = torch.cat(expected)
    assert float((found - reference).norm() / reference.norm()) < 1e-12


def test_a_file_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path)
    assert pack_vit(tmp_path, tmp_path / "config.json").depth == 3


@pytest.mark.parametrize("attention", ["eager", "sdpa", None])
def test_a_layer_in_memory_is_proved_equal(attention: str | None) -> None:
    layer = small_model().layers[1]
    layer.attention.config._attn_implementation = attention
    packed = pack(layer)
    assert packed.proofs[EQUALS] < 1e-13
    assert (packed.architecture["norm_place"], packed.architecture["activation"]) == ("pre", "gelu")
    assert layer.attention.config._attn_implementation == attention


def test_parity_tokens_begin_each_sequence_with_the_class_token(tmp_path: Path) -> None:
    model = small_model()
    packed = pack_vit(*write(tmp_path, released(model), SMALL))
    assert packed.sample is not None
    rows = packed.sample((3, 1, 20), np.random.default_rng())
    assert rows.shape == (24, 24)
    first = (model.embeddings.cls_token + model.embeddings.position_embeddings[:, :1]).flatten().numpy()
    for at in (0, 3, 4):
        np.testing.assert_allclose(rows[at], first, rtol=1e-6)
    assert not np.allclose(rows[1], first)


def test_another_family_is_refused(tmp_path: Path) -> None:
    tensors = released(small_model())
    lambdas = {"vit.encoder.layer.0.lambda_1": torch.zeros(24)}  # as BEiT has them
    with pytest.raises(SourceError, match="lambda_1 is not part of a ViT layer"):
        pack_vit(*write(tmp_path, {**tensors, **lambdas}, SMALL))
    del tensors["vit.layernorm.weight"]
    with pytest.raises(SourceError, match=r"it has no tensor vit\.layernorm\.weight"):
        pack_vit(*write(tmp_path, tensors, SMALL))
