"""The static form of a weight matmul: one scale and zero point for an activation, from calibration, in QDQ operators.

ONNX Runtime fuses QuantizeLinear, DequantizeLinear and MatMul to an integer kernel. Weights are uint8 per output
channel with a zero point of 128: uint8 x uint8 kernels widen before they multiply, where uint8 x int8 saturates without
VNNI. Rounding to a fixed scale depends on no neighbour. It swallows NaN and Inf: `guard`,
1 or NaN, brings them back; it multiplies because an Add would become part of a float Gemm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import onnx.parser
import onnx_ir as ir

from export.quantization.forms import DOMAIN

LEVELS: Final = 127  # weights are integers in [-127, 127]
WEIGHT_ZERO: Final = 128
OPERATOR: Final = "StaticQuantizedMatMul"

_FUNCTION: Final = f"""
<opset_import: ["": OPSET, "com.microsoft": 1], domain: "{DOMAIN}">
{OPERATOR} (x, x_scale, x_zero, weight, scales, zeros) => (y)
{{
  q = QuantizeLinear (x, x_scale, x_zero)
  rounded = DequantizeLinear (q, x_scale, x_zero)
  rounded_weight = DequantizeLinear <axis = 1> (weight, scales, zeros)
  product = MatMul (rounded, rounded_weight)
  last = Constant <value_ints = [-1]> ()
  zero = Constant <value = float {{0}}> ()
  mean = ReduceMean <keepdims = 1> (x, last)
  one = Constant <value = float {{1}}> ()
  nothing = Mul (mean, zero)
  guard = Add (nothing, one)
  y = Mul (product, guard)
}}
"""


@dataclass(frozen=True, slots=True)
class StaticForm:
    """uint8 x uint8 with the activation's range fixed by calibration."""

    name: Literal["static uint8 x uint8"] = "static uint8 x uint8"
    operator: str = OPERATOR

    def attributes(self, inner: int, width: int) -> dict[str, int]:
        """A call has none."""
        return {}

    def function(self, opset: int) -> ir.Function:
        """(x (..., K), x_scale (), x_zero (), weight (K, N), scales (N,), zeros (N,)) -> y (..., N)."""
        return ir.serde.deserialize_function(onnx.parser.parse_function(_FUNCTION.replace("OPSET", str(opset))))


STATIC: Final = StaticForm()
