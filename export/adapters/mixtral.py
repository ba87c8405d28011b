"""Mixtral's sparse FFN (transformers) -> a top-k mixture of SwiGLU experts whose weights sum to 1.

Its decoder layers around it are Llama's, in `llama`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from export.adapters.experts import empty_ffn, prove_equal_to_experts
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.transformers_parts import gated_activation
from export.blocks import FFN, MixtureOfExperts, Router
from export.packed import Packed, pack_moe

_MODULE: Final = "transformers.models.mixtral.modeling_mixtral"
_FAMILY: Final = "mixtral"


@register_adapter(f"{_MODULE}.MixtralSparseMoeBlock")
def pack_sparse_moe(block: Any, options: PackOptions) -> Packed:
    """Put the weights of a MixtralSparseMoeBlock into a mixture of experts and prove that it computes the same."""
    return prove_equal_to_experts(block, pack_moe(mixtral_experts(block).eval(), _FAMILY), options)


def mixtral_experts(block: Any) -> MixtureOfExperts:
    """A mixture that shares the weights of a MixtralSparseMoeBlock, which is set to its plain implementation.

    Raises:
        ExportError: the activation has no gated form here.
    """
    config = block.experts.config
    config._experts_implementation = "eager"  # the others are the same sum, grouped for GPUs
    activation = gated_activation(config.hidden_act)
    gate: Tensor = block.gate.weight
    num_experts, d = gate.shape
    with torch.device("meta"):
        router = Router(d, num_experts, block.gate.top_k, normalise=True)
    router.projection.weight = block.gate.weight
    pairs = zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
    return MixtureOfExperts(router, [_expert(gate_up, down, activation) for gate_up, down in pairs])


def _expert(gate_up: Tensor, down: Tensor, activation: str) -> FFN:
    """Views of the stacked weights: gate_up is (2 d_ff, d), gate first, and down (d, d_ff)."""
    ffn = empty_ffn(down.shape[0], down.shape[1], activation)
    ffn.up.weight, ffn.down.weight = (nn.Parameter(part, requires_grad=False) for part in (gate_up, down))
    return ffn
