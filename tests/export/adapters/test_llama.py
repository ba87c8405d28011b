"""Llama's and Mistral's layers, in every form their configs have, equal transformers' own, or are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from export import ExportError, ProofError, pack
from export.adapters.equality import BAR, EQUALS
from export.blocks import Rotary, SelfAttention
from tests.export.adapters.families import LLAMA3_ROPE, D, llama, mistral

MODELS: dict[str, Any] = {
    "grouped heads": lambda: llama(),
    "one key head": lambda: llama(num_key_value_heads=1),
    "equal heads": lambda: llama(num_key_value_heads=4),
    "wide heads": lambda: llama(head_dim=16),
    "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "gelu gate": lambda: llama(hidden_act="gelu"),
    "theta": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 3.0}),
    "linear rope": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}),
    "llama3 rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "yarn rope": lambda: llama(rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}),
    "language model": lambda: llama(LlamaForCausalLM),
    "mistral": lambda: mistral(),
    "mistral without a window": lambda: mistral(sliding_window=None),
    "mistral with a long window": lambda: mistral(sliding_window=4096),
    "mistral language model": lambda: mistral(MistralForCausalLM, head_dim=6),
}


@pytest.mark.parametrize("form", MODELS)
def test_models_and_their_layers_equal_transformers(form: str) -> None:
    model = MODELS[form]()
    packed = pack(model)
    assert packed.kind == "sequence"
    assert packed.proofs[EQUALS] <= BAR
    base = getattr(model, "model", model)
    window = getattr(model.config, "sliding_window", None)
    assert packed.architecture.get("sliding_window") == window
    attentions = [part for part in packed.module.modules() if isinstance(part, SelfAttention)]
    assert [attention.window for attention in attentions] == [window] * 2
    assert (packed.depth, packed.architecture["final_norm"]) == (2, True)
    layer = pack(base.layers[1])
    assert layer.proofs[EQUALS] <= BAR
    assert (layer.depth, layer.architecture["final_norm"]) == (1, False)


def test_the_model_is_left_as_it_was() -> None:
    model = mistral(sliding_window=4096).double().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = model.config._attn_implementation
    pack(model)
    assert model.training
    assert (model.config.sliding_window, model.config._attn_implementation) == (4096, attention)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_positions_whose_frequencies_change_with_the_length_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match=f"rope_type is '{rope['rope_type']}'"):
        pack(llama(rope_parameters=rope))


class Doubled(LlamaDecoderLayer):  # type: ignore[misc]
    """Says that it is a layer and computes a little more."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs) * (1 + 1e-9)
        return out


def test_a_subclass_is_judged_by_what_it_computes() -> None:
    model = llama()
    model.layers[0].__class__ = Doubled
    with pytest.raises(ProofError, match="LlamaModel does not compute what its weights say"):
        pack(model)
    with pytest.raises(ProofError, match="Doubled does not compute what its weights say"):
        pack(model.layers[0])


def test_a_replaced_part_is_refused_by_layer() -> None:
    model = llama()
    model.layers[1].mlp = nn.Linear(D, D)
    with pytest.raises(ExportError, match=r"layer 1 \(LlamaDecoderLayer\) has no packed form: AttributeError"):
        pack(model)


def test_a_gate_without_a_packed_form_is_refused() -> None:
    with pytest.raises(ExportError, match="a gate with the activation 'tanh' has no packed form"):
        pack(llama(hidden_act="tanh"))


def test_a_model_whose_config_asks_for_fewer_layers_is_as_deep_as_it_runs() -> None:
    model = llama()
    model.config.num_hidden_layers = 1
    assert pack(model).depth == 1


def test_parity_tokens_are_rows_of_the_embeddings() -> None:
    model = llama()
    sample = pack(model).sample
    assert sample is not None
    rows = torch.from_numpy(sample((3, 5), np.random.default_rng()))
    assert rows.shape == (8, D)
    assert all(bool((model.embed_tokens.weight == row).all(1).any()) for row in rows)


def test_other_modules_are_packed_without_transformers() -> None:
    code = (
        "import sys; from torch import nn; from export import pack; pack(nn.Linear(4, 4)); "
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_table_of_an_exported_file_is_rounded_once() -> None:
    rotary = next(part for part in pack(llama()).module.modules() if isinstance(part, Rotary))
    angles = torch.arange(2048).double().unsqueeze(1) * rotary.inverse_frequencies.double()
    torch.testing.assert_close(rotary.cos_table, angles.cos().float(), rtol=0, atol=0)
