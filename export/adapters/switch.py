"""Switch Transformers' FFN layers (transformers) -> a top-1 mixture of experts, alone or with norm and residual.

The original drops a token when its expert has had `expert_capacity` others of the sequence: that would make an answer
depend on its neighbours. Here no token is dropped, and the proof compares with the original at unlimited capacity.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from export.adapters.experts import empty_ffn, prove_equal_to_experts
from export.adapters.registry import PackOptions, register_adapter
from export.blocks import FFN, MixtureOfExperts, ResidualFFN, Router, make_norm
from export.packed import Packed, pack_moe, pack_residual

_MODULE: Final = "transformers.models.switch_transformers.modeling_switch_transformers"
_FAMILY: Final = "switch"
_NO_CAPACITY: Final = 1 << 62


@register_adapter(f"{_MODULE}.SwitchTransformersSparseMLP")
def pack_sparse_mlp(mlp: Any, options: PackOptions) -> Packed:
    """Put the weights of a SwitchTransformersSparseMLP into a mixture of experts, proved to compute the same."""
    moe = switch_experts(mlp).eval()
    return prove_equal_to_experts(mlp, pack_moe(moe, _FAMILY), options)


@register_adapter(f"{_MODULE}.SwitchTransformersLayerFF")
def pack_layer_ff(layer: Any, options: PackOptions) -> Packed:
    """Put a SwitchTransformersLayerFF, sparse or dense, into an FFN with its pre-norm and residual; see above."""
    return prove_equal_to_experts(layer, pack_residual(switch_layer_ff(layer).eval(), _FAMILY), options)


def switch_layer_ff(layer: Any) -> ResidualFFN:
    """A pre-norm FFN with a residual that shares the weights of a SwitchTransformersLayerFF."""
    ffn = switch_experts(layer.mlp) if layer.is_sparse else switch_ffn(layer.mlp)
    return ResidualFFN(switch_norm(layer.layer_norm), ffn)


def switch_experts(mlp: Any) -> MixtureOfExperts:
    """A mixture that shares the weights of a SwitchTransformersSparseMLP, which is set to drop no token."""
    mlp.router.expert_capacity = _NO_CAPACITY
    classifier = mlp.router.classifier
    num_experts, d = classifier.weight.shape
    with torch.device("meta"):
        router = Router(d, num_experts, 1, normalise=False, bias=classifier.bias is not None)
    router.projection = classifier
    return MixtureOfExperts(router, [switch_ffn(expert) for expert in mlp.experts.values()])


def switch_ffn(dense: Any) -> FFN:
    """An FFN that shares the weights of a SwitchTransformersDenseActDense."""
    ffn = empty_ffn(dense.wi.in_features, dense.wi.out_features, dense.act)
    ffn.up, ffn.down = dense.wi, dense.wo
    return ffn


def switch_norm(norm: Any) -> nn.Module:
    """An RMSNorm that shares the weight of a SwitchTransformersLayerNorm."""
    made = make_norm("rmsnorm", len(norm.weight), norm.variance_epsilon)
    made.weight = norm.weight
    return made
