"""The weight-only forms of a weight matmul: 8 or 4 bits for each weight, a scale and a zero point for each block of 32.

The kernel is com.microsoft.MatMulNBits. At accuracy level 4 it rounds the activations of each row to 8 bits too, in
blocks, and adds integers: with 8-bit weights no neighbour changes a row's bits, which the float kernel of level 0 does
not hold. 4-bit weights are bit-equal at neither level. The rounding swallows NaN and Inf: `guard`, 1 or NaN, brings
them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import onnx.parser
import onnx_ir as ir

from export.quantization.forms import DOMAIN

BLOCK: Final = 32  # weights of one column that share a scale: the least that CPU and CUDA kernels have in common

Bits = Literal[4, 8]
WeightMethod = Literal["rtn", "hqq", "gptq"]

_FUNCTION: Final = f"""
<opset_import: ["": OPSET, "com.microsoft": 1], domain: "{DOMAIN}">
OPERATOR <inner, width> (x, packed, scales, zero_points) => (y)
{{
  product = com.microsoft.MatMulNBits <K: int = @inner, N: int = @width, bits = BITS, block_size = {BLOCK},
    accuracy_level = LEVEL> (x, packed, scales, zero_points)
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
class BlockForm:
    """Weights in blocks of `BLOCK`.

    bits: of one weight.
    level: the kernel's accuracy level: 4 multiplies 8-bit integers, 0 what the weights are worth in float.
    """

    bits: Bits
    level: Literal[0, 4]

    @property
    def name(self) -> Literal["4-bit weights", "8-bit weights"]:
        """In manifests and reports."""
        return "4-bit weights" if self.bits == 4 else "8-bit weights"

    @property
    def operator(self) -> str:
        """Name of the model-local function in `DOMAIN`."""
        return f"WeightOnlyMatMul{self.bits}Bit"

    def attributes(self, inner: int, width: int) -> dict[str, int]:
        """Of a call for a weight (inner, width)."""
        return {"inner": inner, "width": width}

    def function(self, opset: int) -> ir.Function:
        """<inner, width> (x (..., K), packed, scales, zero_points) -> y (..., N)."""
        text = _FUNCTION.replace("OPSET", str(opset)).replace("OPERATOR", self.operator)
        text = text.replace("BITS", str(self.bits)).replace("LEVEL", str(self.level))
        return ir.serde.deserialize_function(onnx.parser.parse_function(text))


OPERATORS: Final = frozenset(BlockForm(bits, 0).operator for bits in (4, 8))
