"""The floor of a file's cost: its weight matmuls alone, in the kernels and at the shapes that it runs them.

Whatever a file does beside them (quantizing, activations, norms, attention) is what its speed over the floor shows. The
kernels are taken from the optimized graph, with what ONNX Runtime fused into them, and are fed what they meet there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from export.cpu_time import least_cpu_seconds
from export.errors import ExportError
from export.optimized import optimized, weight_kernels
from service.manifest import Manifest, Precision, Speed
from service.session import open_session, session_options

Feeds = Mapping[str, npt.NDArray[np.generic]]

_SEQUENCE_TOKENS: Final = 32  # tokens of each sequence in a window that is timed
_SEED: Final = 0


def measure_speed(
    folder: Path, manifest: Manifest, windows: Sequence[int], seconds: float
) -> dict[Precision, list[Speed]]:
    """CPU time per token of each file for the CPU and of its floor, all in turns, on one thread.

    Args:
        folder: of the bundle.
        manifest: names the files and their inputs.
        windows: tokens of the windows, in sequences of 32 where the model takes sequences.
        seconds: of CPU time to spend on each window, about.

    Returns:
        Precision -> one figure for each of `windows`.

    Raises:
        ExportError: a file has no weight matmul that could be timed alone.
    """
    here = [variant for variant in manifest.variants if variant.provider == "cpu"]
    found: dict[Precision, list[Speed]] = {variant.precision: [] for variant in here}
    with tempfile.TemporaryDirectory() as scratch:
        graphs = {v.precision: optimized(folder / v.file, "cpu") for v in here}
        whole = {v.precision: open_session(folder / v.file, "cpu", 1) for v in here}
        floors: dict[str, ort.InferenceSession] = {}
        for tokens in windows:
            feeds = _window(manifest, tokens)
            calls: dict[str, Callable[[], object]] = {}
            for precision, graph in graphs.items():
                met = _met(graph, feeds, Path(scratch))
                if precision not in floors:
                    path = Path(scratch) / f"floor-{precision}.onnx"
                    ir.save(bare_matmuls(graph, met), path)
                    floors[precision] = open_session(path, "cpu", 1)
                bare = {name: met[name] for name in (value.name for value in floors[precision].get_inputs())}
                calls[precision] = _run(whole[precision], feeds)
                calls[f"floor of {precision}"] = _run(floors[precision], bare)
            least = least_cpu_seconds(calls, seconds)
            for precision, figures in found.items():
                us, floor_us = (least[name] / tokens * 1e6 for name in (precision, f"floor of {precision}"))
                figures.append(Speed(tokens=tokens, us_per_token=us, floor_us_per_token=floor_us))
    return found


def bare_matmuls(graph: ir.Model, met: Feeds) -> ir.Model:
    """A model of the weight kernels of an optimized `graph` alone.

    Args:
        graph: as `export.optimized` gives it; it stays as it is.
        met: what each value that is no constant held in a run; they become the inputs, their first dimension free.

    Raises:
        ExportError: there is no such kernel.
    """
    inputs: dict[str, ir.Value] = {}
    initializers: dict[str, ir.Value] = {}
    nodes = []
    for node in weight_kernels(graph):
        arguments: list[ir.Value | None] = []
        for value in node.inputs:
            if value is None:
                arguments.append(None)
                continue
            name = str(value.name)
            if value.const_value is not None:
                if name not in initializers:
                    initializers[name] = ir.val(name, const_value=value.const_value)
                arguments.append(initializers[name])
                continue
            if name not in inputs:
                array = met[name]
                shape = ir.Shape([None, *array.shape[1:]]) if array.ndim else ir.Shape([])
                dtype = ir.TensorType(ir.DataType.from_numpy(array.dtype))
                inputs[name] = ir.val(name, type=dtype, shape=shape)
            arguments.append(inputs[name])
        alone = ir.node(node.op_type, arguments, domain=node.domain, name=node.name)
        alone.attributes.update(node.attributes)
        alone.outputs[0].name = f"{node.outputs[0].name}.alone"
        alone.outputs[0].type = ir.TensorType(
            ir.DataType.FLOAT if node.outputs[0].dtype is None else node.outputs[0].dtype
        )
        nodes.append(alone)
    if not nodes:
        raise ExportError("the optimized graph has no weight matmul that could be timed alone")
    made = ir.Graph(
        list(inputs.values()),
        [node.outputs[0] for node in nodes],
        nodes=nodes,
        initializers=list(initializers.values()),
        opset_imports=dict(graph.opset_imports),
        name="floor",
    )
    return ir.Model(made, ir_version=graph.ir_version)


def _met(graph: ir.Model, feeds: Feeds, scratch: Path) -> dict[str, npt.NDArray[np.generic]]:
    """What the weight kernels' activations hold in a run of `feeds`."""
    probe = graph.clone()
    wanted: dict[str, ir.Value] = {}
    for node in weight_kernels(probe):
        for value in node.inputs:
            if value is not None and value.const_value is None:
                wanted[str(value.name)] = value
    given = {name: array for name, array in feeds.items() if name in wanted}
    if len(given) == len(wanted):
        return given  # and no names would ask ONNX Runtime for every output
    for name, value in wanted.items():
        if name not in given and not value.is_graph_output():
            probe.graph.outputs.append(value)
    path = scratch / "probe.onnx"
    ir.save(probe, path)
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized already
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [name for name in wanted if name not in given]
    return {**given, **dict(zip(names, session.run(names, dict(feeds)), strict=True))}


def _window(manifest: Manifest, tokens: int) -> dict[str, npt.NDArray[np.generic]]:
    rng = np.random.default_rng(_SEED)
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "tokens": rng.standard_normal((tokens, manifest.d_in), dtype=np.float32)
    }
    if manifest.kind == "sequence":
        whole, rest = divmod(tokens, _SEQUENCE_TOKENS)
        feeds["seq_lens"] = np.array([_SEQUENCE_TOKENS] * whole + [rest] * bool(rest), np.int64)
    if manifest.d_memory is not None:
        feeds["memory"] = rng.standard_normal((tokens, manifest.d_memory), dtype=np.float32)
        feeds["memory_seq_lens"] = feeds["seq_lens"]
    return feeds


def _run(session: ort.InferenceSession, feeds: Feeds) -> Callable[[], object]:
    names = [value.name for value in session.get_outputs()]
    taken = dict(feeds)
    return lambda: session.run(names, taken)
