"""Checkpoints on disk become the stacks that their models in memory become; what contradicts its config is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, T5ForConditionalGeneration
from typer import Typer
from typer.testing import CliRunner

from export import ExportError, cli, pack
from export.adapters.equality import BAR, EQUALS
from export.adapters.transformers_files import FAMILIES, pack_files
from export.errors import SourceError
from service.manifest import read_manifest
from tests.export.adapters.families import LLAMA3_ROPE, gpt2, llama, mistral, t5

TYPES = tuple(FAMILIES)


def write(folder: Path, model: Any, change: Any = lambda tensors: tensors, **values: Any) -> tuple[Path, Path]:
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(change(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), **values}))
    return folder / "model.safetensors", folder / "config.json"


def shard(folder: Path) -> Path:
    """Divide the file in two, as large models are, and give the index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    where = {name: f"model-{1 + index % 2}-of-2.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    whole.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return index


MODELS: dict[str, Any] = {
    "llama": lambda: llama(LlamaForCausalLM, rope_parameters=LLAMA3_ROPE),
    "llama, bare": lambda: llama(head_dim=16, attention_bias=True),
    "mistral": lambda: mistral(MistralForCausalLM),
    "gpt2": lambda: gpt2(GPT2LMHeadModel),
    "t5": lambda: t5(T5ForConditionalGeneration, feed_forward_proj="gated-gelu"),
}


def expected_stack(model: Any) -> Any:
    if isinstance(model, T5ForConditionalGeneration):
        return pack(model.encoder)
    return pack(model)


@pytest.mark.parametrize("form", MODELS)
def test_a_file_becomes_what_its_model_becomes(tmp_path: Path, form: str) -> None:
    model = MODELS[form]()
    weights, config = write(tmp_path, model)
    packed = pack_files(shard(tmp_path) if form == "llama" else weights, config, TYPES)
    wanted = expected_stack(model)
    assert packed.proofs[EQUALS] <= BAR
    assert {**packed.architecture, "family": ""} == {**wanted.architecture, "family": ""}
    ours, theirs = packed.module.state_dict(), wanted.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert packed.sample is not None
    assert "weights_sha256" in packed.source


@pytest.mark.parametrize("form", ["mistral", "gpt2", "t5"])
def test_the_first_layers_come_without_the_last_norm(tmp_path: Path, form: str) -> None:
    packed = pack_files(*write(tmp_path, MODELS[form]()), TYPES, layers="0:1")
    assert (packed.depth, packed.architecture["final_norm"]) == (1, False)


def test_later_layers_of_t5_have_no_position_bias(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="takes its position bias from the first of its stack"):
        pack_files(*write(tmp_path, MODELS["t5"]()), TYPES, layers="1:3")


NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def without(*names: str) -> Any:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_tensor(name: str, tensor: Tensor) -> Any:
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(GATE), f"it has no tensor {GATE}"),
        (without(NORM), f"it has no tensor {NORM}"),
        (with_tensor(GATE, torch.zeros(48, 31)), r"shape \(48, 31\), the config says \(48, 32\)"),
        (with_tensor(GATE, torch.full((48, 32), torch.nan)), "holds NaN"),
        (with_tensor("model.layers.2.mlp.up_proj.weight", torch.zeros(1)), r"layers\.2.* has no place in the model"),
        (with_tensor("model.layers.0.adapter.weight", torch.zeros(1)), r"adapter\.weight has no place in the model"),
        (lambda _: {"w": torch.zeros(1)}, "no stack of tensors is named 'model.layers.<i>"),
    ],
)
def test_files_that_contradict_their_config_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        pack_files(*write(tmp_path, MODELS["mistral"](), change), TYPES)


def test_frequencies_that_old_files_store_are_ignored(tmp_path: Path) -> None:
    stored = with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
    assert pack_files(*write(tmp_path, MODELS["mistral"](), stored), TYPES).proofs[EQUALS] <= BAR


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "falcon"}, "model_type is 'falcon', expected 'llama' or 'mistral'"),
        ({"hidden_size": 33}, "transformers refuses it"),
        ({"num_hidden_layers": 3}, r"it has no tensor model\.layers\.2"),
    ],
)
def test_configs_of_other_models_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        pack_files(*write(tmp_path, MODELS["llama"](), **values), ("llama", "mistral"))


def test_the_command_line_exports_a_checkpoint(tmp_path: Path) -> None:
    weights, config = write(tmp_path, MODELS["mistral"]())
    command = ["export", "llama", str(weights), str(config), "--name", "tiny", "--models", str(tmp_path / "models")]
    app = Typer()
    cli.register(app)
    result = CliRunner().invoke(app, [*command, "--precision", "fp32", "--layers", "0:1"])
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "models" / "tiny" / "1")
    assert manifest.variants[0].certificate.kind == "exact"
    assert manifest.source["weights"] == "model.safetensors"
