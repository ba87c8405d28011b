"""The integer forms of a weight matmul: their ONNX functions, the integers they hold and the bounds these keep.

Activations are quantized per token at run time (uint8, from that row's minimum up), weights per output channel
(symmetric, [-levels, levels]). For one row x and one column w:

    s = (max(x) - min(x)) / 255    q = round((x - min(x)) / s)
    y = s * sw * sum(q * qw) + min(x) * sw * sum(qw)        s is NaN where x holds NaN or Inf

Only row-wise scalars, elementwise operators and an exact integer matmul: no row can see another. The bias Add stays
outside, where ONNX Runtime fuses it with a GELU that follows. `bench/int8_forms.py` measures these forms and others: a
correction as rank-1 Gemm onto the product is 1 to 2 % faster, but a Gemm picks its kernel by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import onnx.parser
import onnx_ir as ir

DOMAIN: Final = "tokenslab"  # of every model-local function and intent
MIN_OPSET: Final = 21  # QuantizeLinear with a scale for each row

STEPS: Final = 255  # an activation is one of 0 .. 255
_ACCUMULATOR: Final = 2**31 - 1
_PAIR_SUM: Final = 2**15 - 1

FormName = Literal["uint8 x uint8", "uint8 x int8"]


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of integer matmul.

    name: in manifests and reports, by the types that the kernel multiplies.
    operator: of the model-local function, in `DOMAIN`.
    levels: weights are rounded to integers in [-levels, levels].
    dtype: that the integers are stored in, after `zero` is added.
    """

    name: FormName
    operator: str
    levels: int
    dtype: Literal["uint8", "int8"]
    zero: int

    @property
    def max_inner(self) -> int:
        """The longest inner dimension whose products, as they are stored, surely fit the kernel's int32."""
        return _ACCUMULATOR // (STEPS * (self.zero + self.levels))

    def attributes(self, inner: int, width: int) -> dict[str, int]:
        """Of a call for a weight (inner, width)."""
        return {"inner": inner}

    def stored(self, integers: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8] | npt.NDArray[np.int8]:
        """`integers` in [-levels, levels] as the file holds them."""
        shifted = integers + self.zero
        return shifted.astype(np.uint8) if self.dtype == "uint8" else shifted.astype(np.int8)

    def text(self, opset: int) -> str:
        """The function in ONNX's text syntax: <inner = K> (x (N, K), weight, scales, column_sums) -> y (N, M)."""
        zero = f"{self.dtype} {{{self.zero}}}"
        return _FUNCTION.replace("OPSET", str(opset)).replace("OPERATOR", self.operator).replace("WEIGHT_ZERO", zero)

    def function(self, opset: int) -> ir.Function:
        """The function; ONNX Runtime wants one version of the standard operators in a file."""
        return ir.serde.deserialize_function(onnx.parser.parse_function(self.text(opset)))


# Few operators, for one row costs as many dispatches as a thousand. ReduceMin and ReduceMax swallow NaN, as the casts
# of QuantizeLinear do, and ReduceMean does not: `divisor` is 255, or NaN where a row holds NaN or Inf, which so reaches
# the row's scale. BatchNormalization computes it, 0 * mean + 255, in one operator. The mean overflows for rows beyond
# about 1e35, which then give NaN rather than a number. The scale of a constant row is 0, and whatever its integers are,
# they vanish in the product. Subtracting the row's minimum is a pass over the row, and saves a zero point (three
# operators more, and a range that must hold zero). QuantizeLinear in blocks of a whole row takes scales as they are.
_FUNCTION: Final = f"""
<opset_import: ["": OPSET, "com.microsoft": 1], domain: "{DOMAIN}">
OPERATOR <inner> (x, weight, scales, column_sums) => (y)
{{
  last = Constant <value_ints = [-1]> ()
  no = Constant <value = float[1] {{0}}> ()
  unit = Constant <value = float[1] {{1}}> ()
  one = Constant <value = float {{1}}> ()
  steps = Constant <value = float[1] {{{STEPS}}}> ()
  activation_zero = Constant <value = uint8 {{0}}> ()
  weight_zero = Constant <value = WEIGHT_ZERO> ()

  mean = ReduceMean <keepdims = 1> (x, last)
  divisor = BatchNormalization (mean, no, steps, no, unit)
  lowest = ReduceMin <keepdims = 1> (x, last)
  above = Sub (x, lowest)
  span = ReduceMax <keepdims = 1> (above, last)
  scale = Div (span, divisor)

  q = QuantizeLinear <axis = 1, block_size: int = @inner> (above, scale)
  product = com.microsoft.MatMulIntegerToFloat (q, weight, one, scales, activation_zero, weight_zero)

  scaled = Mul (product, scale)
  offset = Mul (lowest, column_sums)
  y = Add (scaled, offset)
}}
"""

# Full 8-bit weights, stored with a zero point: uint8 x uint8 kernels widen before they multiply, exact everywhere.
EIGHT_BIT: Final = Form("uint8 x uint8", "QuantizedMatMul", levels=127, dtype="uint8", zero=128)

# uint8 x int8 kernels of AVX2, and of AVX-512 without VNNI, add two products in 16 bits and saturate: 255 * 127 * 2 is
# 64,770. With weights of at most 64 any two products fit, 255 * 64 * 2 = 32,640, and the kernel is exact everywhere.
SEVEN_BIT: Final = Form("uint8 x int8", "QuantizedMatMul7Bit", levels=64, dtype="int8", zero=0)
assert 2 * STEPS * SEVEN_BIT.levels <= _PAIR_SUM

FORMS: Final[tuple[Form, ...]] = (EIGHT_BIT, SEVEN_BIT)
OPERATORS: Final = frozenset(form.operator for form in FORMS)
