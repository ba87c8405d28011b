"""What ONNX Runtime makes of a file before it runs it: functions inlined, operators fused, for one provider.

Reads one file and writes none that stays. The optimized graph is evidence (what fused, which kernels are left), never
something to serve: it may hold kernels of this processor alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnxruntime as ort

from service.errors import BundleError, ProviderError
from service.session import PROVIDERS, Provider, session_options

# Kernels that multiply by a constant matrix, and where that matrix is among their inputs.
WEIGHT_INPUT: Final = {
    "MatMul": 1,
    "Gemm": 1,
    "FusedMatMul": 1,
    "FusedGemm": 1,
    "MatMulInteger": 1,
    "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1,
    "MatMulNBits": 1,
    "QLinearMatMul": 3,
    "QGemm": 3,
}


def optimized(path: Path, provider: Provider) -> ir.Model:
    """The graph that ONNX Runtime runs for the file, at the optimization level that the service uses.

    Raises:
        ProviderError: this ONNX Runtime does not have `provider`.
        BundleError: ONNX Runtime cannot load the file.
    """
    wanted = PROVIDERS[provider]
    if wanted not in ort.get_available_providers():
        raise ProviderError(f"provider {provider!r} needs {wanted}, which this ONNX Runtime does not have")
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(1)
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        try:
            ort.InferenceSession(str(path.resolve()), options, providers=[wanted])
        except Exception as cause:
            raise BundleError(f"{path}: ONNX Runtime cannot load it: {cause}") from cause
        model = ir.load(options.optimized_model_filepath)
        ir.external_data.load_to_model(model)  # the folder goes
    return model


def weight_kernels(model: ir.Model) -> Iterator[ir.Node]:
    """The kernels of an optimized main graph that multiply activations by a constant matrix, in its order."""
    for node in model.graph:
        at = WEIGHT_INPUT.get(node.op_type)
        if at is None or len(node.inputs) <= at:
            continue
        weight = node.inputs[at]
        if weight is not None and weight.is_initializer() and weight.const_value is not None:
            yield node
