"""What a model is made of: which parameters and FLOPs are attention's, which the FFN's, and what grows with the length.

From the torch module, whose parts say what they are, and the exported graph, which says what runs. For the arithmetic
on what was found, which needs neither, see `export.arithmetic`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import onnx_ir as ir
from torch import nn

from export.blocks import CrossAttention, SelfAttention
from export.blocks.moe import Router
from export.experts import expert_shares
from export.graph import weight_flops
from service.manifest import AttentionLayers, Composition

_Part = Literal["attention", "ffn", "other"]


def composition(module: nn.Module, graph: ir.Model) -> Composition:
    """Count `module`'s parameters, each once, and the weight matmuls of `graph`, which was exported from it.

    In a module without parts of this package (an nn.Sequential, say) everything position-wise is FFN.
    """
    owners = _owners(module)
    named = dict(module.named_parameters(remove_duplicate=False))
    sizes = Counter[_Part]()
    for parameter in module.parameters():
        sizes[owners[id(parameter)]] += parameter.numel()
    shares = expert_shares(module)

    def flops(part: _Part) -> int:
        return weight_flops(graph, shares, only={n for n, parameter in named.items() if owners[id(parameter)] == part})

    hidden = (p.shape[0] for p in named.values() if owners[id(p)] == "ffn" and p.dim() == 2)
    return Composition(
        attention_parameters=sizes["attention"],
        ffn_parameters=sizes["ffn"],
        other_parameters=sizes["other"],
        attention_flops_per_token=flops("attention"),
        ffn_flops_per_token=flops("ffn"),
        hidden_units=max(hidden, default=0),
        attention=_attention(module),
    )


def _owners(module: nn.Module) -> dict[int, _Part]:
    """The part of every parameter; one that is shared belongs to the first that has it."""
    owners: dict[int, _Part] = {}
    for part in module.modules():
        if isinstance(part, SelfAttention | CrossAttention):
            owners |= {id(parameter): "attention" for parameter in part.parameters()}
        elif isinstance(part, Router):
            owners |= {id(parameter): "other" for parameter in part.parameters()}
        else:
            own = list(part.parameters(recurse=False))
            kind: _Part = "ffn" if any(parameter.dim() >= 2 for parameter in own) else "other"
            owners |= {id(parameter): kind for parameter in own if id(parameter) not in owners}
    return owners


def _attention(module: nn.Module) -> list[AttentionLayers]:
    """Every attention of the module, alike ones counted together, in their order."""
    found: Counter[AttentionLayers] = Counter()
    for part in module.modules():
        if isinstance(part, SelfAttention):
            shape = AttentionLayers(
                layers=1, heads=part.num_heads, head_size=part.head_size, causal=part.causal, window=part.window
            )
        elif isinstance(part, CrossAttention):
            shape = AttentionLayers(layers=1, heads=part.num_heads, head_size=part.head_size, of_memory=True)
        else:
            continue
        found[shape] += 1
    return [shape.model_copy(update={"layers": layers}) for shape, layers in found.items()]
