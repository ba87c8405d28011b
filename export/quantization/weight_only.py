"""Weights to 8 or 4 bits in blocks, activations float: onnxruntime's quantizers, one weight matmul at a time.

RTN rounds to nearest; HQQ (Badri and Shaji 2023) moves the zero points for a robust norm; GPTQ (Frantar et al. 2022)
feeds the error back over calibration rows. The first two are onnxruntime's own. Its GPTQ (1.32, `neural_compressor`)
multiplies the error by a column of an upper triangular factor, where the row is meant, and so feeds nothing back: its
weights are RTN's. Here the integers come from `rounding`, for the scales and zero points of RTN.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper, numpy_helper

from export.errors import ExportError
from export.quantization.block_forms import BLOCK, BlockForm, WeightMethod
from export.quantization.calibration import Activations, spread
from export.quantization.calls import Encoded, MatmulQuantizer
from export.quantization.forms import MIN_OPSET
from export.quantization.library import quiet
from export.quantization.rounding import feedback_rounded, second_moment
from export.relative_error import relative_error, sqnr_db
from service.packing import Float32
from service.session import session_options

_MEASURED_ROWS: Final = 256
_GPTQ_ROWS: Final = 2048


class WeightOnly(MatmulQuantizer[BlockForm]):
    """Weight matmuls with `com.microsoft.MatMulNBits`."""

    def __init__(
        self,
        model: ir.Model,
        form: BlockForm,
        precision: str,
        method: WeightMethod = "rtn",
        activations: Activations | None = None,
    ) -> None:
        """See `MatmulQuantizer`.

        Args:
            model: the float graph.
            form: of every weight matmul, unless `build` is told otherwise.
            precision: its name, for messages.
            method: that rounds the weights.
            activations: of `model`, which GPTQ needs; the SQNR of a matmul is measured on them, on N(0, 1) without.

        Raises:
            ExportError: as `MatmulQuantizer`, or the method does not go with the form.
        """
        if method == "hqq" and form.bits == 8:
            raise ExportError(f"{precision}: HQQ's zero points are floats, which 8-bit kernels do not take")
        if method == "gptq" and activations is None:
            raise ExportError(f"{precision}: GPTQ chooses by the tokens that the model meets: pass --calibrate")
        super().__init__(model.clone(), form, precision)
        self._method = method
        self._activations = activations

    def encode(self, name: str, weight: Float32, x: str, form: BlockForm) -> Encoded:
        """Parts: `packed` uint8 (N, blocks, bytes), `scales` float32 (N, blocks) and `zero_points`.

        Raises:
            ExportError: onnxruntime quantized nothing, or GPTQ has no rows for this matmul.
        """
        rows = np.random.default_rng(0).standard_normal((_MEASURED_ROWS, len(weight)), dtype=np.float32)
        if self._activations is not None and len(found := self._activations.rows(x)):
            rows = found
        elif self._method == "gptq":
            raise ExportError(f"{self._precision}: no calibration token reaches {name!r}, which GPTQ needs")
        # A matmul that falls back from HQQ's 4 bits to 8 is rounded to nearest: no kernel takes such zero points.
        quantized = _quantized(weight, form, "hqq" if self._method == "hqq" and form.bits == 4 else "rtn")
        node = quantized.graph.node[0]
        if [made.op_type for made in quantized.graph.node] != ["MatMulNBits"]:
            raise ExportError(f"{self._precision}: onnxruntime left {name!r} as it is")
        by_name = {made.name: made for made in quantized.graph.initializer}
        packed, scales, zero_points = (by_name[i] for i in node.input[1:])
        if self._method == "gptq":
            packed.CopyFrom(_with_feedback(weight, form, spread(rows, _GPTQ_ROWS), packed, scales, zero_points))
        arrays = (numpy_helper.to_array(part) for part in (packed, scales, zero_points))
        parts = dict(zip(("packed", "scales", "zero_points"), arrays, strict=True))
        return Encoded(parts, _measured(quantized, weight, spread(rows, _MEASURED_ROWS)))


def _with_feedback(
    weight: Float32,
    form: BlockForm,
    rows: Float32,
    packed: onnx.TensorProto,
    scales: onnx.TensorProto,
    zero_points: onnx.TensorProto,
) -> onnx.TensorProto:
    """`packed` (N, blocks, bytes) rounded anew, with error feedback over `rows`, to the same scales and zero points."""
    inner = len(weight)
    step = _of_each_weight(numpy_helper.to_array(scales), inner)
    zeros = numpy_helper.to_array(zero_points)
    if form.bits == 4:
        zeros = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(len(zeros), -1)
    zero = _of_each_weight(zeros[:, : scales.dims[1]], inner).astype(np.int32)
    usable = np.where(step == 0, np.float32(1), step)  # a block of zeros: its scale is never multiplied
    integers = feedback_rounded(weight, second_moment(rows), usable, -zero, 2**form.bits - 1 - zero) + zero
    padded = np.zeros((packed.dims[0], packed.dims[1] * BLOCK), np.uint8)
    padded[:, :inner] = integers.T
    if form.bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return numpy_helper.from_array(padded.reshape(packed.dims), packed.name)


def _of_each_weight(blocks: np.ndarray[tuple[int, ...], np.dtype[Any]], inner: int) -> Any:
    """(N, blocks) -> (K, N)."""
    return np.repeat(blocks, BLOCK, axis=1)[:, :inner].T


def _quantized(weight: Float32, form: BlockForm, method: Literal["rtn", "hqq"]) -> onnx.ModelProto:
    with quiet():
        from onnxruntime.quantization import matmul_nbits_quantizer as nbits

        if method == "hqq":
            config = nbits.HQQWeightOnlyQuantConfig(block_size=BLOCK, bits=form.bits)
        else:
            config = nbits.DefaultWeightOnlyQuantConfig(block_size=BLOCK, bits=form.bits)
        quantizer = nbits.MatMulNBitsQuantizer(
            _one_matmul(weight), bits=form.bits, block_size=BLOCK, accuracy_level=form.level, algo_config=config
        )
        quantizer.process()
    made: onnx.ModelProto = quantizer.model.model
    for node in made.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "accuracy_level"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("accuracy_level", form.level)])
    return made


def _one_matmul(weight: Float32) -> onnx.ModelProto:
    inner, width = weight.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="matmul")],
        "one_matmul",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", inner])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", width])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", MIN_OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _measured(model: onnx.ModelProto, weight: Float32, rows: Float32) -> float:
    """SQNR of the matmul in `model` against float64, over all rows together."""
    session: Any = ort.InferenceSession(
        model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"]
    )
    (out,) = session.run(["y"], {"x": rows})
    return sqnr_db(relative_error(out, rows.astype(np.float64) @ weight))
