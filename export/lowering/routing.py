"""Bodies of the choice of experts. ONNX's TopK gives the lower index first where values are equal, as `route` does.

Every operator works on one row: the experts of a token do not depend on the window, in number or in order.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from export.lowering.registry import PROVIDERS, Body, register_body
from export.routing import ROUTE, ROUTE_NORMALISED

# logits and weights are float32 (N, experts) and (N, top_k), chosen is int64 (N, top_k), best first. The choice is made
# on logits: small probabilities underflow to the same zero. A row with NaN or Inf gets weights that are NaN.
_SHARES_OF_THE_CHOSEN: Final = """
<top_k> (logits) => (chosen, weights)
{
  count = Constant <value_int: int = @top_k> ()
  axis = Constant <value_ints = [0]> ()
  counts = Unsqueeze (count, axis)
  highest, chosen = TopK <axis = -1, largest = 1, sorted = 1> (logits, counts)
  weights = Softmax <axis = -1> (highest)
}
"""
_SHARES_OF_ALL: Final = """
<top_k> (logits) => (chosen, weights)
{
  count = Constant <value_int: int = @top_k> ()
  axis = Constant <value_ints = [0]> ()
  counts = Unsqueeze (count, axis)
  highest, chosen = TopK <axis = -1, largest = 1, sorted = 1> (logits, counts)
  probabilities = Softmax <axis = -1> (logits)
  weights = GatherElements <axis = 1> (probabilities, chosen)
}
"""


def _body(node: ir.Node) -> Body:
    if node.attributes.get_int("normalise", 0):
        return Body(ROUTE_NORMALISED, _SHARES_OF_THE_CHOSEN)
    return Body(ROUTE, _SHARES_OF_ALL)


def register() -> None:
    """Make the bodies known."""
    for provider in PROVIDERS:
        register_body(ROUTE, provider, _body)
