"""GPT-2's layers equal transformers' own, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from export import ExportError, ProofError, pack
from export.adapters.equality import BAR, EQUALS
from tests.export.adapters.families import D, gpt2

FORMS: dict[str, dict[str, Any]] = {
    "as released": {},
    "narrow": {"n_inner": 40},
    "relu": {"activation_function": "relu"},
    "an activation of its own": {"activation_function": "tanh"},
    "scores without scale": {"scale_attn_weights": False},
    "scores by depth": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_models_and_their_layers_equal_transformers(form: str) -> None:
    model = gpt2(**FORMS[form])
    packed = pack(model)
    assert packed.proofs[EQUALS] <= BAR
    assert (packed.depth, packed.architecture["causal"], packed.architecture["final_norm"]) == (2, True, True)
    layer = pack(model.h[1])
    assert layer.proofs[EQUALS] <= BAR
    assert layer.architecture["final_norm"] is False


def test_a_language_model_is_its_layers_and_last_norm() -> None:
    assert pack(gpt2(GPT2LMHeadModel)).proofs[EQUALS] <= BAR


def test_layers_with_cross_attention_are_refused() -> None:
    with pytest.raises(ExportError, match="add_cross_attention"):
        pack(gpt2(add_cross_attention=True))


def test_a_layer_whose_weights_are_not_what_it_runs_is_refused() -> None:
    model = gpt2()
    model.h[0].mlp.register_forward_hook(lambda _module, _inputs, out: out * (1 + 1e-9))
    with pytest.raises(ProofError, match="GPT2Model does not compute what its weights say"):
        pack(model)


def test_parity_tokens_are_words_at_their_positions() -> None:
    model = gpt2()
    sample = pack(model).sample
    assert sample is not None
    rows = torch.from_numpy(sample((3, 5), np.random.default_rng()))
    assert rows.shape == (8, D)
    for row, position in zip(rows, [0, 1, 2, 0, 1, 2, 3, 4], strict=True):
        assert float((model.wte.weight + model.wpe.weight[position] - row).abs().amax(1).min()) == 0
