"""transformers' Switch and Mixtral FFNs: proved equal to the originals, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralModel, MixtralSparseMoeBlock
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersEncoderModel,
    SwitchTransformersLayerCrossAttention,
    SwitchTransformersLayerFF,
    SwitchTransformersModel,
    SwitchTransformersSparseMLP,
)

from export import parity
from export.adapters.equality import EQUALS
from export.adapters.registry import pack
from export.blocks import MixtureOfExperts, ResidualFFN
from export.errors import ExportError, ProofError
from export.pipeline import Options, export_module
from service.manifest import read_manifest

D = 24


def random_weights(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():  # norms that do nothing prove nothing
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return module


def mixtral(**options: Any) -> nn.Module:
    config = MixtralConfig(hidden_size=D, intermediate_size=40, num_local_experts=6, num_attention_heads=2, **options)
    return random_weights(MixtralSparseMoeBlock(config))


def switch(kind: type[nn.Module] = SwitchTransformersSparseMLP, **options: Any) -> nn.Module:
    sparse = {"is_sparse": options.pop("is_sparse")} if "is_sparse" in options else {}
    config = SwitchTransformersConfig(d_model=D, d_ff=40, **{"num_experts": 6, "expert_capacity": 1, **options})
    return random_weights(kind(config, **sparse))


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_mixtrals_sparse_block_equals_its_packed_form(top_k: int, act: str) -> None:
    packed = pack(mixtral(num_experts_per_tok=top_k, hidden_act=act).train())
    assert packed.kind == "position-wise"
    assert packed.proofs[EQUALS] < 1e-14
    assert packed.architecture["experts_per_token"] == top_k
    assert packed.architecture["activation"] == {"silu": "swiglu", "gelu": "geglu"}[act]


@pytest.mark.parametrize("router_bias", [False, True])
def test_switchs_sparse_mlp_equals_its_packed_form_once_it_drops_no_token(router_bias: bool) -> None:
    original = switch(router_bias=router_bias)
    packed = pack(original)
    assert packed.proofs[EQUALS] < 1e-14
    assert packed.architecture["experts"] == 6
    assert original.router.expert_capacity == 1  # type: ignore[union-attr]
    rows = torch.randn(64, D)
    with torch.no_grad():
        kept = original.eval()(rows.unsqueeze(0)).squeeze(0).abs().sum(1) > 0
        assert int(kept.sum()) <= 6  # a capacity of one for each expert
        assert bool((packed.module(rows).abs().sum(1) > 0).all())


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("act", ["relu", "gelu_new"])
def test_switchs_ffn_layer_with_norm_and_residual_equals_its_packed_form(is_sparse: bool, act: str) -> None:
    packed = pack(switch(SwitchTransformersLayerFF, is_sparse=is_sparse, dense_act_fn=act))
    assert packed.proofs[EQUALS] < 1e-14
    assert isinstance(packed.module, ResidualFFN)
    assert isinstance(packed.module.ffn, MixtureOfExperts) is is_sparse
    assert packed.architecture["norm"] == "RMSNorm"


@pytest.mark.parametrize("kind", [MixtralModel, MixtralDecoderLayer])
@pytest.mark.parametrize("window", [None, 7])
def test_mixtrals_layers_equal_their_packed_form(kind: type[nn.Module], window: int | None) -> None:
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=D,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        sliding_window=window,
    )
    layer = {"layer_idx": 0} if kind is MixtralDecoderLayer else {}
    packed = pack(random_weights(kind(config, **layer)))
    assert packed.proofs[EQUALS] < 1e-13
    assert packed.kind == "sequence"
    assert packed.architecture["experts"] == 5
    assert packed.architecture.get("sliding_window") == window
    assert packed.architecture["experts_met_by_the_proof"] == 5 * len(packed.layers[:2] if not layer else [0])


def test_matmuls_get_more_bits_until_tokens_have_a_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MixtralConfig(
        **{"hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 1, "num_local_experts": 4, "vocab_size": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 600},
    )
    monkeypatch.setattr(parity, "LEAST_WITH_MARGIN", 0.85)  # with 4 bits in the attention before it, 0.6 have one
    options = Options("moe", tmp_path, precisions=("w4",), allow_inexact=True, details=False)
    (variant,) = read_manifest(export_module(random_weights(MixtralModel(config).eval()), options)).variants
    forms = {matmul.weight: matmul.form for matmul in variant.matmuls}
    assert forms["blocks.0.attention.qkv.weight.T"] == "8-bit weights"
    assert variant.routing[0].without_margin <= 0.15 * variant.routing[0].tokens


def test_switchs_encoder_of_dense_and_sparse_layers_equals_its_packed_form() -> None:
    config = SwitchTransformersConfig(
        vocab_size=50,
        d_model=D,
        d_ff=40,
        d_kv=8,
        num_heads=3,
        num_layers=4,
        num_sparse_encoder_layers=2,
        num_experts=5,
        expert_capacity=1,
    )
    torch.manual_seed(0)  # other random routers may hardly ever choose one of their five
    packed = pack(random_weights(SwitchTransformersEncoderModel(config)))
    assert packed.proofs[EQUALS] < 1e-13
    assert (packed.architecture["layers"], packed.architecture["expert_layers"]) == (4, 2)
    assert packed.architecture["experts_met_by_the_proof"] == 10
    assert packed.sample is not None


def test_switchs_decoder_of_dense_and_sparse_layers_equals_its_packed_form() -> None:
    model = SwitchTransformersModel(
        SwitchTransformersConfig(
            vocab_size=50,
            d_model=D,
            d_ff=40,
            d_kv=8,
            num_heads=3,
            num_layers=1,
            num_decoder_layers=4,
            num_sparse_encoder_layers=0,
            num_sparse_decoder_layers=2,
            num_experts=5,
            expert_capacity=1,
        )
    )
    torch.manual_seed(0)
    random_weights(model)
    packed = pack(model.decoder)
    assert packed.proofs[EQUALS] < 1e-13
    assert (packed.d_memory, packed.architecture["causal"]) == (D, True)
    assert (packed.architecture["layers"], packed.architecture["expert_layers"]) == (4, 2)
    assert packed.architecture["experts_met_by_the_proof"] == 10


def test_a_decoder_of_switch_that_computes_something_else_is_refused() -> None:
    config = SwitchTransformersConfig(vocab_size=50, d_model=D, d_ff=40, d_kv=8, num_heads=3, num_experts=2)
    config.num_layers, config.num_decoder_layers, config.num_sparse_decoder_layers = 1, 2, 1

    class Louder(SwitchTransformersLayerCrossAttention):  # type: ignore[misc] # transformers has no types here
        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, *rest = super().forward(hidden, *args, **kwargs)
            return (out * (1 + 1e-9), *rest)

    decoder: Any = SwitchTransformersModel(config).decoder
    random_weights(decoder)
    decoder.block[1].layer[1].__class__ = Louder
    with pytest.raises(ProofError, match="does not compute what its weights say"):
        pack(decoder)


def test_the_proof_has_tokens_for_each_of_many_experts() -> None:
    assert pack(switch(num_experts=20)).architecture["experts_met_by_the_proof"] == 20


def test_an_activation_without_a_gated_form_is_refused() -> None:
    with pytest.raises(ExportError, match="a gate with the activation 'tanh' has no packed form"):
        pack(mixtral(hidden_act="tanh"))


class Doubled(MixtralSparseMoeBlock):  # type: ignore[misc]
    """Says that it is Mixtral's and computes a little more."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden_states) * (1 + 1e-9)
        return out


def test_a_subclass_is_judged_by_what_it_computes() -> None:
    config = MixtralConfig(hidden_size=D, intermediate_size=40, num_local_experts=4, num_attention_heads=2)
    with pytest.raises(ProofError, match="Doubled does not compute what its weights say"):
        pack(random_weights(Doubled(config)))
