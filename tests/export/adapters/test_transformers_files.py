"""Checkpoints on disk become the stacks that their models in memory become; what contradicts its config is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    SwitchTransformersForConditionalGeneration,
    T5ForConditionalGeneration,
)
from typer import Typer
from typer.testing import CliRunner

from export import ExportError, cli, pack
from export.adapters.equality import BAR, EQUALS
from export.adapters.transformers_families import FAMILIES
from export.adapters.transformers_files import pack_files
from export.errors import SourceError
from export.packed import Packed
from service.manifest import read_manifest
from tests.export.adapters.families import LLAMA3_ROPE, D, gpt2, llama, mistral, mixtral, switch, t5


def write(folder: Path, model: Any, change: Any = None, *, shard_size: str = "1GB", **values: Any) -> tuple[Path, Path]:
    """What transformers itself writes, its tensors and config changed."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    config = folder / "config.json"
    if change is not None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    return folder, config


@dataclass(frozen=True)
class Form:
    """A model, the command that reads its file, and the part of it that the command exports."""

    command: str
    make: Any
    part: str = ""


MODELS = {
    "llama": Form("llama", lambda: llama(LlamaForCausalLM, rope_parameters=LLAMA3_ROPE), "model"),
    "llama, bare": Form("llama", lambda: llama(head_dim=16, attention_bias=True)),
    "mistral": Form("llama", lambda: mistral(MistralForCausalLM), "model"),
    "mixtral": Form("mixtral", lambda: mixtral(MixtralForCausalLM, num_experts_per_tok=2), "model"),
    "mixtral, bare": Form("mixtral", lambda: mixtral(num_experts_per_tok=1, sliding_window=5)),
    "gpt2": Form("gpt2", lambda: gpt2(GPT2LMHeadModel), "transformer"),
    "t5": Form("t5", lambda: t5(T5ForConditionalGeneration, feed_forward_proj="gated-gelu"), "encoder"),
    "t5, its decoder": Form(
        "t5-decoder", lambda: t5(T5ForConditionalGeneration, num_decoder_layers=2, tie_word_embeddings=False), "decoder"
    ),
    "switch": Form("switch", switch, "encoder"),
    "switch, its decoder": Form(
        "switch-decoder", lambda: switch(SwitchTransformersForConditionalGeneration, num_decoder_layers=3), "decoder"
    ),
    "switch, of a whole model": Form("switch", lambda: switch(SwitchTransformersForConditionalGeneration), "encoder"),
}


def read(form: str, files: tuple[Path, Path], **options: Any) -> Packed:
    return pack_files(*files, FAMILIES[MODELS[form].command], **options)


def answers(part: Any, rows: Tensor, memory: Tensor | None) -> Tensor:
    """transformers' own, of one sequence: float32, as it is run."""
    given = rows[None]
    if "wpe" in dict(part.named_children()):
        given = given - part.wpe.weight[: len(rows)]
    more = {} if memory is None else {"encoder_hidden_states": memory[None], "use_cache": False}
    for module in part.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 1 << 62
    out: Tensor = part(inputs_embeds=given, **more).last_hidden_state[0]
    return out


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("form", MODELS)
def test_a_folder_that_transformers_wrote_becomes_what_its_model_becomes(
    tmp_path: Path, form: str, sharded: bool
) -> None:
    model = MODELS[form].make()
    part = model.get_submodule(MODELS[form].part)
    files = write(tmp_path, model, shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() is sharded
    packed = read(form, files)
    wanted = pack(part)
    assert packed.proofs[EQUALS] <= BAR
    assert packed.architecture == wanted.architecture
    ours, theirs = packed.module.state_dict(), wanted.module.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert packed.sample is not None
    assert "weights_sha256" in packed.source


@pytest.mark.parametrize("form", MODELS)
def test_its_answers_are_transformers_own_at_ragged_lengths(tmp_path: Path, form: str) -> None:
    model = MODELS[form].make()
    packed = read(form, write(tmp_path, model))
    lengths, memory_lengths = [4, 1, 9, 3], [2, 7, 1, 5]
    tokens, memory = torch.randn(sum(lengths), D), torch.randn(sum(memory_lengths), D)
    more: tuple[Tensor, ...] = ()
    memories: list[Any] = [None] * len(lengths)
    if packed.d_memory is not None:
        more, memories = (memory, torch.tensor(memory_lengths)), list(memory.split(memory_lengths))  # type: ignore[no-untyped-call]
    sequences = tokens.split(lengths)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        found = packed.module(tokens, torch.tensor(lengths), *more)
        part = model.get_submodule(MODELS[form].part)
        expected = torch.cat([answers(part, *pair) for pair in zip(sequences, memories, strict=True)])
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    "form", ["mistral", "mixtral", "gpt2", "t5", "t5, its decoder", "switch", "switch, its decoder"]
)
def test_the_first_layers_come_without_the_last_norm(tmp_path: Path, form: str) -> None:
    packed = read(form, write(tmp_path, MODELS[form].make()), layers="0:1")
    assert (packed.depth, packed.architecture["final_norm"]) == (1, False)


@pytest.mark.parametrize("form", ["t5", "t5, its decoder", "switch", "switch, its decoder"])
def test_later_layers_of_t5_have_no_position_bias(tmp_path: Path, form: str) -> None:
    with pytest.raises(ExportError, match="takes its position bias from the first of its stack"):
        read(form, write(tmp_path, MODELS[form].make()), layers="1:2")


def test_experts_are_read_under_the_module_s_own_names_too(tmp_path: Path) -> None:
    model = mixtral()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    packed = read("mixtral", write(tmp_path, model, lambda _: tensors))
    assert all(
        torch.equal(a, b) for a, b in zip(packed.module.parameters(), pack(model).module.parameters(), strict=True)
    )


def test_a_bias_that_released_t5_decoders_hold_and_never_use_is_ignored(tmp_path: Path) -> None:
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    files = write(tmp_path, MODELS["t5, its decoder"].make(), with_tensor(name, torch.zeros(8, 4)))
    assert read("t5, its decoder", files).proofs[EQUALS] <= BAR


def with_tensor(name: str, tensor: Tensor) -> Any:
    return lambda tensors: {**tensors, name: tensor}


def test_a_file_without_its_last_norm_is_refused_where_the_last_layer_is_wanted(tmp_path: Path) -> None:
    name = "model.norm.weight"
    files = write(tmp_path, MODELS["mistral"].make(), lambda all_: {n: t for n, t in all_.items() if n != name})
    with pytest.raises(SourceError, match=f"it has no tensor {name}"):
        read("mistral", files)


def test_frequencies_that_old_files_store_are_ignored(tmp_path: Path) -> None:
    stored = with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
    assert read("mistral", write(tmp_path, MODELS["mistral"].make(), stored)).proofs[EQUALS] <= BAR


@pytest.mark.parametrize("form", ["mixtral", "t5, its decoder", "switch"])
def test_the_command_line_exports_a_folder_of_shards(tmp_path: Path, form: str) -> None:
    weights, config = write(tmp_path, MODELS[form].make(), shard_size="20KB")
    command = ["export", MODELS[form].command, str(weights), str(config), "--name", "tiny"]
    app = Typer()
    cli.register(app)
    command += [
        "--models",
        str(tmp_path / "models"),
        "--precision",
        "fp32",
        "--layers",
        "0:2" if form == "switch" else "0:1",
        "--no-details",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "models" / "tiny" / "1")
    assert manifest.variants[0].certificate.kind == "exact"
    assert manifest.source["weights"].startswith("model-00001-of-")
    assert (manifest.d_memory, manifest.architecture.get("experts")) == {
        "mixtral": (None, 3),
        "t5, its decoder": (D, None),
        "switch": (None, 3),
    }[form]
