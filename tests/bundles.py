"""Small bundles built by hand from ONNX operators, so that the service's tests need neither torch nor export/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.manifest import MANIFEST, REFERENCE, Certificate, Manifest, Parity, Variant, file_sha256

Array = NDArray[np.float32]


def ffn_weights(d: int, d_ff: int, seed: int) -> dict[str, Array]:
    """W1 (d, d_ff), b1, W2 (d_ff, d), b2."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (d, d_ff), "b1": (d_ff,), "w2": (d_ff, d), "b2": (d,)}
    return {name: (rng.standard_normal(shape) / np.sqrt(d)).astype(np.float32) for name, shape in shapes.items()}


def relu_ffn(d: int, d_ff: int, seed: int = 0) -> onnx.ModelProto:
    """Position-wise: relu(tokens W1 + b1) W2 + b2."""
    nodes = [
        helper.make_node("MatMul", ["tokens", "w1"], ["h0"]),
        helper.make_node("Add", ["h0", "b1"], ["h1"]),
        helper.make_node("Relu", ["h1"], ["h2"]),
        helper.make_node("MatMul", ["h2", "w2"], ["y"]),
        helper.make_node("Add", ["y", "b2"], ["out"]),
    ]
    return _model(nodes, ffn_weights(d, d_ff, seed), d, sequences=False)


def sequence_mean(d: int) -> onnx.ModelProto:
    """Each token plus the mean of its own sequence: the least that shows whether sequences are kept apart."""
    body = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["part", "axis"], ["mean"], keepdims=1),
            helper.make_node("Add", ["part", "mean"], ["sum"]),
        ],
        "body",
        [helper.make_tensor_value_info("part", TensorProto.FLOAT, ["l", d])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["l", d])],
    )
    nodes = [
        helper.make_node("SplitToSequence", ["tokens", "seq_lens"], ["parts"], axis=0),
        helper.make_node("SequenceMap", ["parts"], ["sums"], body=body),
        helper.make_node("ConcatFromSequence", ["sums"], ["out"], axis=0),
    ]
    return _model(nodes, {"axis": np.array([0], np.int64)}, d, sequences=True)


def memory_mean(d: int, d_memory: int, *, coupled: str = "", seed: int = 0) -> onnx.ModelProto:
    """Each token plus the mean of its own sequence and a projection of the mean of its own memory.

    With `coupled`, "tokens" or "memory", plus the largest number of that input in the whole window: a fault to find.
    """
    body = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["part", "axis"], ["mean"], keepdims=1),
            helper.make_node("Add", ["part", "mean"], ["sum"]),
            helper.make_node("ReduceMean", ["remembered", "axis"], ["recalled"], keepdims=1),
            helper.make_node("MatMul", ["recalled", "w"], ["projected"]),
            helper.make_node("Add", ["sum", "projected"], ["told"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("part", TensorProto.FLOAT, ["l", d]),
            helper.make_tensor_value_info("remembered", TensorProto.FLOAT, ["m", d_memory]),
        ],
        [helper.make_tensor_value_info("told", TensorProto.FLOAT, ["l", d])],
    )
    nodes = [
        helper.make_node("SplitToSequence", ["tokens", "seq_lens"], ["parts"], axis=0),
        helper.make_node("SplitToSequence", ["memory", "memory_seq_lens"], ["memories"], axis=0),
        helper.make_node("SequenceMap", ["parts", "memories"], ["outs"], body=body),
        helper.make_node("ConcatFromSequence", ["outs"], ["apart"], axis=0),
        helper.make_node("ReduceMax", [coupled or "tokens"], ["highest"], keepdims=0),
        helper.make_node("Add" if coupled else "Identity", ["apart", "highest"] if coupled else ["apart"], ["out"]),
    ]
    w = np.random.default_rng(seed).standard_normal((d_memory, d), dtype=np.float32)
    return _model(nodes, {"axis": np.array([0], np.int64), "w": w}, d, sequences=True, d_memory=d_memory)


def _model(
    nodes: list[Any], weights: dict[str, Any], d: int, *, sequences: bool, d_memory: int | None = None
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["tokens", d])]
    if sequences:
        inputs.append(helper.make_tensor_value_info("seq_lens", TensorProto.INT64, ["sequences"]))
    if d_memory is not None:
        inputs.append(helper.make_tensor_value_info("memory", TensorProto.FLOAT, ["m", d_memory]))
        inputs.append(helper.make_tensor_value_info("memory_seq_lens", TensorProto.INT64, ["sequences"]))
    graph = helper.make_graph(
        nodes,
        "graph",
        inputs,
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["tokens", d])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def write_bundle(
    root: Path,
    name: str,
    model: onnx.ModelProto,
    *,
    version: int = 1,
    certificate: str = "exact",
    precisions: tuple[str, ...] = ("fp32",),
) -> Path:
    """Write `model` as the bundle `root/name/version`, every precision the same file."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    (folder / REFERENCE).write_bytes(b"")
    d = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    memory = [i.type.tensor_type.shape.dim[1].dim_value for i in model.graph.input if i.name == "memory"]
    variants = []
    for precision in precisions:
        path = folder / f"{precision}.onnx"
        onnx.save(model, path)
        variants.append(
            Variant(
                precision=precision,
                provider="cpu",
                file=path.name,
                sha256=file_sha256(path),
                bytes=path.stat().st_size,
                quantized_matmuls=0,
                float_matmuls=2,
                parity=[Parity(seq_lens=[1], relative_error=0.0, sqnr_db=200.0)],
                certificate=Certificate(
                    kind=certificate,
                    max_drift=0.0 if certificate == "exact" else 1e-6,
                    rows=1,
                    checks={},
                    session={},
                    machine="none",
                ),
            )
        )
    manifest = Manifest(
        name=name,
        version=version,
        kind="sequence" if len(model.graph.input) > 1 else "position-wise",
        d_in=d,
        d_out=d,
        d_memory=memory[0] if memory else None,
        default_precision=precisions[0],
        parameters=1,
        flops_per_token=0,
        architecture={},
        source={},
        tools={},
        created="2026-01-01T00:00:00Z",
        reference_sha256=file_sha256(folder / REFERENCE),
        variants=variants,
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return folder


def leave_unmeasured(bundle: Path) -> None:
    """Change a bundle's manifest to that of files which were not run where they were exported."""
    state = json.loads((bundle / MANIFEST).read_text())
    for variant in state["variants"]:
        variant["certificate"] |= {"kind": "unmeasured", "rows": 0, "checks": {}, "session": {}, "machine": ""}
        variant["stand_in"], variant["parity"] = variant["parity"], []
    (bundle / MANIFEST).write_text(json.dumps(state))
