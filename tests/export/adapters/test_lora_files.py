"""A LoRA adapter merged while a checkpoint is read equals the model merged by hand; what fits nowhere is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    SwitchTransformersForConditionalGeneration,
    T5ForConditionalGeneration,
)
from typer import Typer
from typer.testing import CliRunner

from export import cli, pack
from export.adapters.transformers_families import FAMILIES
from export.adapters.transformers_files import pack_files
from export.errors import SourceError
from export.lora import CONFIG, WEIGHTS
from export.packed import Packed
from service.manifest import file_sha256, read_manifest
from tests.export.adapters.families import D, gpt2, llama, mixtral, switch, t5

R, ALPHA = 3, 6
GATED = {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Case:
    """A command, a model that it reads, the part that it exports, and modules of it as PEFT names them.

    targets: path of a module -> the view of the model's weight, (out, in), that it is.
    """

    command: str
    make: Callable[[], Any]
    part: str
    targets: Mapping[str, Callable[[Any], Tensor]]


def own(*paths: str) -> Mapping[str, Callable[[Any], Tensor]]:
    return {path: lambda model, path=path: model.get_submodule(path).weight for path in paths}  # type: ignore[misc]


def expert(layer: int, no: int, leaf: str) -> Callable[[Any], Tensor]:
    """Mixtral's w1 (gate), w3 (up) or w2 (down) in the tensor that holds all experts'."""

    def view(model: Any) -> Tensor:
        experts = model.model.layers[layer].mlp.experts
        if leaf == "w2":
            return experts.down_proj[no]  # type: ignore[no-any-return]
        gate, up = experts.gate_up_proj[no].chunk(2)
        return gate if leaf == "w1" else up  # type: ignore[no-any-return]

    return view


MIXTRAL_EXPERTS = {
    f"model.layers.{layer}.block_sparse_moe.experts.{no}.{leaf}": expert(layer, no, leaf)
    for layer, no, leaf in [(0, 0, "w1"), (0, 2, "w2"), (1, 1, "w3"), (1, 1, "w1")]
}
CASES = {
    "mixtral": Case(
        "mixtral",
        lambda: mixtral(MixtralForCausalLM, num_experts_per_tok=2),
        "model",
        {**own(*(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo")), **MIXTRAL_EXPERTS},
    ),
    "t5": Case(
        "t5",
        lambda: t5(T5ForConditionalGeneration, **GATED),
        "encoder",
        own(
            *(f"encoder.block.1.layer.0.SelfAttention.{p}" for p in "qkvo"),
            *(f"encoder.block.0.layer.1.DenseReluDense.{p}" for p in ("wi_0", "wi_1", "wo")),
        ),
    ),
    "t5-decoder": Case(
        "t5-decoder",
        lambda: t5(T5ForConditionalGeneration, **GATED),
        "decoder",
        own(
            *(f"decoder.block.0.layer.0.SelfAttention.{p}" for p in "qkvo"),
            *(f"decoder.block.1.layer.1.EncDecAttention.{p}" for p in "qkvo"),
            *(f"decoder.block.1.layer.2.DenseReluDense.{p}" for p in ("wi_0", "wi_1", "wo")),
        ),
    ),
    "switch": Case(
        "switch",
        lambda: switch(SwitchTransformersForConditionalGeneration),
        "encoder",
        own(
            "encoder.block.0.layer.0.SelfAttention.q",
            "encoder.block.1.layer.1.mlp.router.classifier",
            "encoder.block.1.layer.1.mlp.experts.expert_2.wi",
            "encoder.block.1.layer.1.mlp.experts.expert_0.wo",
        ),
    ),
    "switch-decoder": Case(
        "switch-decoder",
        lambda: switch(SwitchTransformersForConditionalGeneration),
        "decoder",
        own(
            "decoder.block.0.layer.1.EncDecAttention.v",
            "decoder.block.0.layer.2.mlp.wi",
            "decoder.block.1.layer.2.mlp.experts.expert_1.wo",
        ),
    ),
    "llama": Case(
        "llama",
        lambda: llama(LlamaForCausalLM),
        "model",
        own("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"),
    ),
    "gpt2": Case(
        "gpt2",
        lambda: gpt2(GPT2LMHeadModel),
        "transformer",
        {
            f"transformer.h.{i}.{path}": lambda model, i=i, path=path: (
                model.transformer.h[i].get_submodule(path).weight.T
            )  # type: ignore[misc]
            for i, path in [(0, "attn.c_attn"), (1, "mlp.c_fc"), (1, "mlp.c_proj")]
        },
    ),
}


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], std: float = 0.2, **values: Any
) -> dict[str, tuple[Tensor, Tensor]]:
    """An adapter in PEFT's format with a random change of each weight (out, in); its factors A and B."""
    folder.mkdir(exist_ok=True)
    factors = {path: (torch.randn(R, width), std * torch.randn(out, R)) for path, (out, width) in shapes.items()}
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, **values}))
    stored = {
        f"base_model.model.{path}.lora_{half}.weight": tensor
        for path, pair in factors.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / WEIGHTS)
    return factors


def merge_by_hand(model: Any, case: Case, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for path, (a, b) in factors.items():
        case.targets[path](model).data += ALPHA / R * (b @ a)


def weights(packed: Packed) -> dict[str, Tensor]:
    return packed.module.state_dict()


def equal(ours: Packed, theirs: Packed) -> bool:
    """Whether all weights are alike, to float32's last bits: the product of the factors is summed in another order."""
    a, b = weights(ours), weights(theirs)
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-6) for n in a)


@pytest.mark.parametrize("name", CASES)
def test_merged_while_it_is_read_it_equals_the_model_merged_by_hand(tmp_path: Path, name: str) -> None:
    case, model = CASES[name], CASES[name].make()
    model.save_pretrained(tmp_path)
    shapes = {path: tuple(view(model).shape) for path, view in case.targets.items()}
    factors = write_adapter(tmp_path / "lora", shapes, fan_in_fan_out=name == "gpt2")
    before = file_sha256(tmp_path / "model.safetensors")
    files = (tmp_path, tmp_path / "config.json", FAMILIES[case.command])
    packed, unmerged = pack_files(*files, lora=tmp_path / "lora"), pack_files(*files)
    merge_by_hand(model, case, factors)
    wanted = pack(model.get_submodule(case.part))
    assert equal(packed, wanted)
    assert not equal(unmerged, wanted)
    assert file_sha256(tmp_path / "model.safetensors") == before
    assert packed.source["lora_sha256"] == file_sha256(tmp_path / "lora" / WEIGHTS)
    assert packed.source["lora_merged"] == packed.source["lora_weights"] == str(len(factors))
    assert "lora_sha256" not in unmerged.source
    first = pack_files(*files, lora=tmp_path / "lora", layers="0:1")
    assert int(first.source["lora_merged"]) < len(factors)


def test_an_adapter_with_an_expert_to_a_module_fits_a_file_that_stacks_them(tmp_path: Path) -> None:
    case, model = CASES["mixtral"], CASES["mixtral"].make()
    model.save_pretrained(tmp_path)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    factors = write_adapter(tmp_path / "lora", {p: tuple(case.targets[p](model).shape) for p in MIXTRAL_EXPERTS})
    before = file_sha256(tmp_path / "model.safetensors")
    packed = pack_files(tmp_path, tmp_path / "config.json", FAMILIES["mixtral"], lora=tmp_path / "lora")
    merge_by_hand(model, case, factors)
    assert equal(packed, pack(model.model))
    assert file_sha256(tmp_path / "model.safetensors") == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_peft_s_own_adapter_of_a_whole_t5_is_merged_into_the_stack_that_is_exported(tmp_path: Path, part: str) -> None:
    model = CASES["t5"].make()
    model.save_pretrained(tmp_path)
    adapted = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, target_modules=["q", "v", "wi_1", "wo"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "lora")
    families = FAMILIES["t5" if part == "encoder" else "t5-decoder"]
    packed = pack_files(tmp_path, tmp_path / "config.json", families, lora=tmp_path / "lora")
    merged = adapted.merge_and_unload()
    assert equal(packed, pack(merged.get_submodule(part).requires_grad_(False).eval()))
    layers, each = (3, 4) if part == "encoder" else (2, 6)
    assert packed.source["lora_merged"] == str(layers * each)


LLAMA = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "shapes", "options", "message"),
    [
        (
            "llama",
            {f"{LLAMA}.query": (D, D)},
            {},
            rf"it changes {LLAMA}\.query, which is no matmul of layers\.<i> here",
        ),
        (
            "llama",
            {"model.layers.2.self_attn.q_proj": (D, D)},
            {},
            "those are down_proj, gate_proj, k_proj, o_proj, q_",
        ),
        ("llama", {"lm_head": (50, D)}, {}, "it changes lm_head, which is no matmul"),
        ("llama", {f"{LLAMA}.k_proj": (D, D)}, {}, r"k_proj is \(32, 32\), the weight \(16, 32\)"),
        ("llama", {f"{LLAMA}.q_proj": (D, D)}, {"layers": "1:2"}, "it changes nothing in layers 1:2"),
        ("llama", {f"{LLAMA}.q_proj": (D, D), f"{LLAMA[6:]}.q_proj": (D, D)}, {}, "which are one"),
        (
            "mixtral",
            {"model.layers.0.block_sparse_moe.experts.3.w1": (48, D)},
            {},
            r"experts\.3\.w1, which is no matmul",
        ),
        ("mixtral", {"model.layers.0.mlp.experts.gate_up_proj": (96, D)}, {}, "gate_up_proj, which is no matmul"),
        ("t5", {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias": (8, 4)}, {}, "which is no matmul"),
        ("t5", {"decoder.block.7.layer.0.SelfAttention.q": (24, D)}, {}, "which is no matmul of encoder.block"),
        ("t5", {"decoder.block.0.layer.0.SelfAttention.q": (24, D)}, {}, "it changes nothing in layers 0:3"),
        ("gpt2", {"transformer.h.0.attn.c_attn": (D, 3 * D)}, {}, r"is \(32, 96\), the weight \(32, 96\)"),
    ],
)
def test_what_fits_no_weight_is_named(
    tmp_path: Path, name: str, shapes: dict[str, tuple[int, ...]], options: dict[str, Any], message: str
) -> None:
    CASES[name].make().save_pretrained(tmp_path)
    write_adapter(tmp_path / "lora", shapes)
    with pytest.raises(SourceError, match=message):
        pack_files(tmp_path, tmp_path / "config.json", FAMILIES[name], lora=tmp_path / "lora", **options)


@pytest.mark.parametrize("name", ["mixtral", "t5-decoder"])
def test_the_command_merges_before_it_quantizes_and_the_manifest_says_what(tmp_path: Path, name: str) -> None:
    case, model = CASES[name], CASES[name].make()
    model.save_pretrained(tmp_path)
    shapes = {path: tuple(view(model).shape) for path, view in case.targets.items()}
    write_adapter(tmp_path / "lora", shapes, std=0.02)
    app = Typer()
    app.callback()(lambda: None)
    cli.register(app)
    files = [str(tmp_path), str(tmp_path / "config.json"), "--lora", str(tmp_path / "lora")]
    make = ["--name", "x", "--models", str(tmp_path / "models"), "--no-details"]
    result = CliRunner().invoke(app, ["export", name, *files, *make])
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "models" / "x" / "1")
    assert manifest.source["lora_sha256"] == file_sha256(tmp_path / "lora" / WEIGHTS)
    assert manifest.source["lora_merged"] == str(len(shapes))
    assert {variant.certificate.kind for variant in manifest.variants} == {"exact"}
