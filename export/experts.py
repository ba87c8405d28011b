"""The experts of a torch module against its exported graph: are all there, and what does one token use of them?

A tracer keeps what its sample of tokens used: an expert that none of them was sent to could be lost without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction

import onnx_ir as ir
from torch import Tensor, nn

from export.blocks.moe import MixtureOfExperts, Router
from export.errors import ExportError
from export.normalise import parameter_name
from export.routed import RoutedLayer
from export.routing import routes


def expert_layers(module: nn.Module) -> dict[str, MixtureOfExperts]:
    """Dotted name -> mixture, in the order they are in the module; a mixture that is used twice is there once."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MixtureOfExperts)}


def check_experts(graph: ir.Model, module: nn.Module) -> None:
    """Raise ExportError unless every router of `module` and every matmul of its experts is in `graph`.

    Counted, not looked up by name: the exporter gives experts with equal values one initializer.
    """
    layers = expert_layers(module)
    shares = expert_shares(module)
    found = sum(node.op_type == "MatMul" and share_of(node, shares) is not None for node in graph.graph)
    expected = sum(_matrices(expert) for layer in layers.values() for expert in layer.experts)
    if found < expected:
        raise ExportError(
            f"the exported graph has {found} matmuls of experts, the {len(layers)} mixture-of-experts layers of "
            f"{type(module).__name__} have {expected}: an expert was lost"
        )
    if len(routes(graph)) < len(layers):
        raise ExportError(f"the exported graph has {len(routes(graph))} routers, the module has {len(layers)}")


def expert_shares(module: nn.Module) -> dict[str, Fraction]:
    """Parameter name of each expert's matrices -> top_k / num_experts, the mean share of tokens that one expert gets.

    Whatever the load is, the FLOPs of all experts together are those of `top_k` experts for each token.
    """
    shares: dict[int, Fraction] = {}
    for layer in expert_layers(module).values():
        share = Fraction(layer.router.top_k, layer.router.num_experts)
        shares |= {id(parameter): share for parameter in layer.experts.parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {
        name: shares[id(parameter)] for name, parameter in named if parameter.dim() == 2 and id(parameter) in shares
    }


def share_of(matmul: ir.Node, shares: Mapping[str, Fraction]) -> Fraction | None:
    """The share of tokens that `matmul` gets if its weight is an expert's, else None."""
    weight = matmul.inputs[1]
    if weight is None or not weight.is_initializer():
        return None
    return shares.get(parameter_name(weight))


def active_parameters(module: nn.Module) -> int:
    """Numbers in the weights that one token meets: everything but the experts it is not sent to."""
    total = _size(module)
    layers = expert_layers(module).values()
    in_experts = _size(nn.ModuleList(layer.experts for layer in layers))  # each once, however often it is shared
    met = sum(layer.router.top_k * _size(layer.experts[0]) for layer in layers)
    return min(total, total - in_experts + met)


@contextmanager
def recorded_routing(module: nn.Module) -> Iterator[list[RoutedLayer]]:
    """Inside, every run of a router adds its logits to the list, in the order they run."""
    seen: list[RoutedLayer] = []

    def record(router: Router, logits: Tensor) -> None:
        seen.append(RoutedLayer(logits.detach().double().numpy(), router.top_k))

    hooks = [
        layer.router.projection.register_forward_hook(lambda _, _args, out, router=layer.router: record(router, out))
        for layer in expert_layers(module).values()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(expert: nn.Module) -> int:
    return sum(parameter.dim() == 2 for _, parameter in expert.named_parameters(remove_duplicate=False))
