"""A merged LoRA adapter equals PEFT's own; an adapter that would be merged in part is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel
from transformers.pytorch_utils import Conv1D

from export.adapters.bert import pack_bert
from export.adapters.registry import pack
from export.adapters.vit import pack_vit
from export.errors import SourceError
from export.lora import CONFIG, WEIGHTS, Lora
from export.precision import float64_layer_by_layer
from service.manifest import file_sha256

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}
TARGETS = ["query", "attention.output.dense", "intermediate.dense"]


class Net(nn.Module):
    """An own module with both kinds of weight that LoRA can change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), Conv1D(6, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(tokens)))
        return out


# PEFT still asks for a name that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def trained(model: nn.Module, folder: Path, **options: Any) -> Any:
    """`model` with a LoRA of PEFT's whose every factor is random, saved to `folder`."""
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 12, **options}))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return adapted


def run(packed: Any, tokens: torch.Tensor) -> torch.Tensor:
    with float64_layer_by_layer(packed.layers):
        found: torch.Tensor = packed.module(tokens, *([torch.tensor([len(tokens)])] * (packed.kind == "sequence")))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"query": 2}, "alpha_pattern": {"layer.1.intermediate.dense": 3}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_merged_into_a_checkpoint_it_equals_peft(tmp_path: Path, options: dict[str, Any]) -> None:
    model = BertModel(BertConfig(**SMALL), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    adapted = trained(model, tmp_path / "lora", target_modules=TARGETS, **options)
    packed = pack_bert(tmp_path, tmp_path / "config.json", lora=tmp_path / "lora")
    merged = adapted.merge_and_unload()
    tokens = torch.randn(7, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = merged.double().encoder(tokens[None])[0][0]
    assert float((run(packed, tokens) - expected).norm() / expected.norm()) < 1e-6
    unmerged = run(pack_bert(tmp_path, tmp_path / "config.json"), tokens)
    assert float((unmerged - expected).norm() / expected.norm()) > 1e-2
    assert packed.source["lora_sha256"] == file_sha256(tmp_path / "lora" / WEIGHTS)
    assert packed.source["lora_targets"] == "dense, query"
    assert packed.source["lora_weights"] == "6"
    assert packed.source["lora_r"] == ("2, 4" if "rank_pattern" in options else "4")


def test_a_vit_s_adapter_fits_both_namings_of_its_layers(tmp_path: Path) -> None:
    small = {key: SMALL[key] for key in list(SMALL)[:4]}
    model = ViTModel(ViTConfig(**small, image_size=8, patch_size=4), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)  # under the names of released checkpoints
    adapted = trained(model, tmp_path / "lora", target_modules=["q_proj", "fc2"])
    packed = pack_vit(tmp_path, tmp_path / "config.json", lora=tmp_path / "lora", layers="1")
    merged = adapted.merge_and_unload().double()
    tokens = torch.randn(5, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = merged.layernorm(merged.layers[1](tokens[None]))[0]
    assert float((run(packed, tokens) - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")  # PEFT corrects what it was told
def test_merged_into_a_module_it_equals_peft_for_linear_and_conv1d(tmp_path: Path) -> None:
    net = Net()
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    adapted = trained(net, tmp_path, target_modules=["up", "down"], fan_in_fan_out=True)
    again = Net()
    again.load_state_dict(weights)
    Lora(tmp_path).merge_into(again)
    tokens = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), adapted.merge_and_unload()(tokens))
    assert pack(again).kind == "position-wise"


def edited(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, **config}))
    stored = {**load_file(folder / WEIGHTS), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, folder / WEIGHTS)


A = "base_model.model.up.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"use_dora": True}, {}, "use_dora is True: only plain LoRA"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"modules_to_save": ["head"]}, {}, r"modules_to_save is \['head'\]"),
        ({"something_new": {"x": 1}}, {}, "something_new is"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"init_lora_weights": "pissa"}, {}, "changed the base weights"),
        ({"r": 3}, {}, "says rank 3"),
        ({"r": 0}, {}, "r is 0, expected a positive number"),
        ({"lora_alpha": "12"}, {}, "lora_alpha is '12'"),
        ({"rank_pattern": {"(": 4}}, {}, "is no pattern"),
        ({"rank_pattern": 3}, {}, "expected an object"),
        ({}, {A: None}, r"up has no lora_A\.weight"),
        ({}, {A: torch.zeros(4, 7)}, r"its change of up is \(10, 7\), the weight \(10, 6\)"),
        ({}, {A: torch.full((4, 6), float("inf"))}, "holds NaN or infinite"),
        ({}, {"base_model.model.up.lora_magnitude_vector": torch.ones(10)}, "is not part of plain LoRA"),
        (
            {},
            {f"base_model.model.other.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"},
            "it changes other, which is not in the module",
        ),
    ],
)
def test_what_is_no_plain_lora_of_this_module_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    trained(Net(), tmp_path, target_modules=["up"])
    edited(tmp_path, config, tensors)
    with pytest.raises(SourceError, match=message):
        Lora(tmp_path).merge_into(Net())


def test_a_weight_that_is_shared_and_a_path_that_fits_twice_are_refused(tmp_path: Path) -> None:
    trained(Net(), tmp_path, target_modules=["up"])
    net = Net()
    net.gate = nn.Linear(6, 10)
    net.gate.weight = net.up.weight
    with pytest.raises(SourceError, match="changes up, whose weight another module shares"):
        Lora(tmp_path).merge_into(net)
    with pytest.raises(SourceError, match=r"it changes up, which fits 0\.up and 1\.up"):
        Lora(tmp_path).merge_into(nn.Sequential(Net(), Net()))


def test_an_adapter_that_changes_other_parts_of_the_model_is_refused(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**SMALL))
    model.save_pretrained(tmp_path)
    trained(model, tmp_path / "lora", target_modules=["query", "pooler.dense"])
    with pytest.raises(SourceError, match=r"it changes pooler\.dense, which is no matmul of a BERT layer"):
        pack_bert(tmp_path, tmp_path / "config.json", lora=tmp_path / "lora")


def test_an_absent_or_pickled_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"adapter_config\.json: No such file"):
        Lora(tmp_path)
    trained(Net(), tmp_path, target_modules=["up"])
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(SourceError, match="the adapter is a pickle"):
        Lora(tmp_path)
