"""T5's encoder layers equal transformers' own, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Block, T5Stack

from export import ExportError, PackOptions, ProofError, pack
from export.adapters.equality import BAR, EQUALS
from export.adapters.t5 import pack_t5_block, pack_t5_stack
from tests.export.adapters.families import D, t5, with_weights

FORMS: dict[str, dict[str, Any]] = {
    "relu": {},
    "gated gelu": {"feed_forward_proj": "gated-gelu"},
    "gated silu": {"feed_forward_proj": "gated-silu"},
    "many buckets": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    "heads that make up the width": {"d_kv": 8},
}


@pytest.mark.parametrize("form", FORMS)
def test_encoders_and_their_first_layer_equal_transformers(form: str) -> None:
    model = t5(**FORMS[form])
    packed = pack(model)
    assert packed.proofs[EQUALS] <= BAR
    assert (packed.depth, packed.architecture["positions"]) == (3, "relative bias")
    assert pack(model.encoder).proofs[EQUALS] <= BAR
    layer = pack(model.encoder.block[0])
    assert layer.proofs[EQUALS] <= BAR
    assert layer.architecture["final_norm"] is False


def test_a_layer_without_its_own_position_bias_is_refused() -> None:
    with pytest.raises(ExportError, match="takes its position bias from the first of its stack"):
        pack(t5().encoder.block[1])


@pytest.mark.parametrize(("cls", "adapter"), [(T5Stack, pack_t5_stack), (T5Block, pack_t5_block)])
def test_decoders_are_not_encoders(cls: Any, adapter: Any) -> None:
    config = T5Config(d_model=D, d_kv=6, d_ff=40, num_layers=1, num_heads=4, vocab_size=50, is_decoder=True)
    decoder = with_weights(
        cls(config) if cls is T5Stack else cls(config, has_relative_attention_bias=True, layer_idx=0)
    )
    with pytest.raises(ExportError, match=f"this {cls.__name__} is a decoder"):
        adapter(decoder, PackOptions())


def test_an_encoder_whose_first_layer_was_cut_off_is_refused() -> None:
    model = t5()
    model.encoder.block = nn.ModuleList(list(model.encoder.block)[1:])
    with pytest.raises(ExportError, match="takes its position bias from the first of its stack"):
        pack(model)


def test_a_layer_whose_weights_are_not_what_it_runs_is_refused() -> None:
    model = t5()
    model.encoder.block[1].register_forward_hook(lambda _m, _i, out: (out[0] * (1 + 1e-9), *out[1:]))
    with pytest.raises(ProofError, match="T5Stack does not compute what its weights say"):
        pack(model)
