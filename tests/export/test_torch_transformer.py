"""torch's own encoders become packed blocks that are proved equal to them, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from export.adapters.registry import pack
from export.errors import ExportError, ProofError

D = 16
PROOF = "equals the original module, per sequence"


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    made = nn.TransformerEncoderLayer(D, 4, 24, **{"batch_first": True, **options})
    for name, parameter in made.named_parameters():  # norms that do nothing prove nothing
        if "norm" in name:
            nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_layer_equals_its_packed_block(norm_first: bool, bias: bool, batch_first: bool, causal: bool) -> None:
    module = layer(norm_first=norm_first, bias=bias, batch_first=batch_first, layer_norm_eps=1e-3)
    packed = pack(module, causal=causal)
    assert packed.kind == "sequence"
    assert packed.proofs[PROOF] < 1e-14
    assert packed.architecture["norm_place"] == ("pre" if norm_first else "post")
    assert packed.architecture["causal"] is causal
    assert packed.architecture["eps"] == 1e-3


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("relu", "relu"),
        ("gelu", "gelu"),
        (F.silu, "silu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (torch.tanh, "tanh"),
        (nn.PReLU(), "PReLU"),
    ],
)
def test_activations_by_name_by_function_and_by_module(activation: Any, name: str) -> None:
    packed = pack(layer(activation=activation))
    assert packed.architecture["activation"] == name
    assert packed.proofs[PROOF] < 1e-14


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(D), nn.RMSNorm(D, eps=1e-6)])
def test_encoder_with_and_without_a_final_norm(norm: nn.Module | None) -> None:
    packed = pack(nn.TransformerEncoder(layer(), 3, norm=norm).train())
    assert packed.depth == 3
    assert packed.architecture["final_norm"] is (norm is not None)
    assert packed.proofs[PROOF] < 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_any_dtype_is_exported_as_float32(dtype: torch.dtype) -> None:
    packed = pack(layer(dtype=dtype))
    assert {parameter.dtype for parameter in packed.module.parameters()} == {torch.float32}
    assert packed.source["weights_dtype"].endswith("to float32")
    assert "weights_dtype" not in pack(layer()).source


class Twice(nn.TransformerEncoderLayer):
    """Says that it is a layer and computes a little more."""

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(src, *args, **kwargs) * (1 + 1e-9)


class Renamed(nn.TransformerEncoderLayer):
    """A subclass that changes nothing."""


def test_a_subclass_is_judged_by_what_it_computes() -> None:
    assert pack(Renamed(D, 4, 24, batch_first=True)).proofs[PROOF] < 1e-14
    with pytest.raises(ProofError, match="Twice does not compute what its weights say"):
        pack(Twice(D, 4, 24, batch_first=True))


def test_an_activation_that_mixes_tokens_is_refused() -> None:
    with pytest.raises(ProofError, match="does not compute what its weights say"):
        pack(layer(activation=lambda x: torch.softmax(x, dim=-2)))


def test_attention_with_an_extra_key_is_refused() -> None:
    module = layer()
    module.self_attn = nn.MultiheadAttention(D, 4, batch_first=True, add_bias_kv=True)
    with pytest.raises(ExportError, match=r"layer 0 .* add_bias_kv"):
        pack(module)


def test_the_fast_path_is_left_as_it_was_found() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    pack(layer())
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_causal_is_refused_for_modules_without_attention() -> None:
    with pytest.raises(ExportError, match="causal: Linear has no attention"):
        pack(nn.Linear(4, 4), causal=True)


def parametrized() -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    nn.utils.parametrizations.weight_norm(layer.self_attn, "in_proj_weight")
    return layer


def replaced() -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    layer.linear1 = nn.Sequential(nn.Linear(8, 8))  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (parametrized(), "in_proj_weight is computed from other tensors"),
        (replaced(), r"layer 0 \(TransformerEncoderLayer\) has no packed form: AttributeError"),
    ],
)
def test_a_part_without_a_packed_form_is_refused_by_layer(layer: nn.Module, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        pack(layer)


def test_a_width_of_one_where_every_norm_gives_zero_is_no_contradiction() -> None:
    packed = pack(nn.TransformerEncoderLayer(1, 1, 1, batch_first=True))
    assert packed.proofs[PROOF] == 0


def test_an_epsilon_that_a_norm_does_not_have_is_not_stated() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    assert pack(layer).architecture["eps"] == 1e-5
    layer.norm1, layer.norm2 = nn.RMSNorm(8), nn.RMSNorm(8)  # type: ignore[assignment]
    assert "eps" not in pack(layer).architecture
