"""Where a graph routes tokens to experts: the intent `tokenslab::Route`, and the matmul before it, by the graph alone.

A router stays float in every precision: noise in its logits would send tokens to other experts. Pure onnx_ir.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

ROUTE: Final = "Route"
ROUTE_NORMALISED: Final = "RouteNormalised"  # what the intent becomes where the weights of a token are to sum to 1
_DOMAIN: Final = "tokenslab"


def routes(model: ir.Model) -> list[ir.Node]:
    """The routing nodes of the main graph, lowered or not, in the order they run; inputs (logits), see `blocks.moe`."""
    return [node for node in model.graph if _is_route(node)]


def is_router(node: ir.Node) -> bool:
    """Whether `node` is the matmul that makes a router's logits; its bias, if any, is added in between."""
    if (node.domain, node.op_type) != ("", "MatMul"):
        return False
    users = [user for user, _ in node.outputs[0].uses()]
    users += [user for add in users if add.op_type == "Add" for user, _ in add.outputs[0].uses()]
    return any(map(_is_route, users))


def _is_route(node: ir.Node) -> bool:
    return node.domain == _DOMAIN and node.op_type in (ROUTE, ROUTE_NORMALISED)
