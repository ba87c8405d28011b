"""Small ONNX graphs and bundles written by hand, so that these tests need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper

from export.certify import certify
from export.quantize import count_quantized_matmuls, count_weight_matmuls
from service.manifest import MANIFEST, REFERENCE, Manifest, Parity, Precision, Variant, file_sha256
from service.packing import Float32
from service.session import open_session, session_facts

Arrays = Mapping[str, npt.NDArray[np.generic]]


def graph(body: str, arrays: Arrays, *, inputs: str = "float[tokens, d] tokens", opset: int = 21) -> ir.Model:
    """A model with `inputs` and the output `out`, from statements in the ONNX text syntax and its initializers."""
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    parsed = onnx.parser.parse_model(f"{header} g ({inputs}) => (float[tokens, n] out) {{ {body} }}")
    parsed.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(parsed))


def linear(weight: Float32, bias: Float32) -> ir.Model:
    """out = tokens @ weight (K, N) + bias (N,)."""
    return graph("h = MatMul(tokens, w)\n out = Add(h, b)", {"w": weight, "b": bias})


def ffn(w1: Float32, b1: Float32, w2: Float32, b2: Float32) -> ir.Model:
    """out = gelu(tokens @ w1 + b1) @ w2 + b2."""
    body = "h = MatMul(tokens, w1)\n i = Add(h, b1)\n a = Gelu(i)\n o = MatMul(a, w2)\n out = Add(o, b2)"
    return graph(body, {"w1": w1, "b1": b1, "w2": w2, "b2": b2})


def random_ffn(d: int, d_ff: int, seed: int) -> ir.Model:
    """The FFN above with N(0, 1/fan_in) weights and small biases."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> Float32:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    return ffn(normal(d, d_ff, std=d**-0.5), normal(d_ff, std=0.1), normal(d_ff, d, std=d_ff**-0.5), normal(d, std=0.1))


def saved(model: ir.Model, path: Path) -> Path:
    ir.save(model, path)
    return path


def opened(model: ir.Model, path: Path, threads: int = 1) -> ort.InferenceSession:
    """The model, written to `path` and opened as the service would open it."""
    return open_session(saved(model, path), "cpu", threads)


def run(session: ort.InferenceSession, tokens: Float32) -> Float32:
    out: Float32 = session.run(["out"], {"tokens": tokens})[0]
    return out


def write_bundle(root: Path, models: Mapping[Precision, ir.Model], *, d: int, version: int = 1) -> Path:
    """Write `models`, precisions of one position-wise function, as the bundle `root/demo/version`, measured.

    The reference is the fp32 file's own output.
    """
    folder = root / "demo" / str(version)
    folder.mkdir(parents=True)
    sessions = {precision: opened(model, folder / f"{precision}.onnx") for precision, model in models.items()}
    rng = np.random.default_rng(version)
    inputs = [rng.standard_normal((rows, d), dtype=np.float32) for rows in (1, 7, 64)]
    outputs = [run(sessions["fp32"], tokens) for tokens in inputs]
    arrays = {f"tokens_{i}": tokens for i, tokens in enumerate(inputs)}
    np.savez(folder / REFERENCE, allow_pickle=False, **arrays, **{f"out_{i}": out for i, out in enumerate(outputs)})
    variants = []
    for precision, session in sessions.items():
        path = folder / f"{precision}.onnx"
        errors = [
            float(np.linalg.norm(run(session, tokens) - out) / np.linalg.norm(out))
            for tokens, out in zip(inputs, outputs, strict=True)
        ]
        variants.append(
            Variant(
                precision=precision,
                provider="cpu",
                file=path.name,
                sha256=file_sha256(path),
                bytes=path.stat().st_size,
                quantized_matmuls=count_quantized_matmuls(models[precision]),
                float_matmuls=count_weight_matmuls(models[precision]),
                parity=[
                    Parity(seq_lens=[len(tokens)], relative_error=error, sqnr_db=-20 * float(np.log10(error + 1e-15)))
                    for tokens, error in zip(inputs, errors, strict=True)
                ],
                certificate=certify(
                    session,
                    "position-wise",
                    d,
                    seed=0,
                    facts=session_facts(1),
                    quantized=precision != "fp32",
                    fp32=None if precision == "fp32" else sessions["fp32"],
                ),
            )
        )
    manifest = Manifest(
        name="demo",
        version=version,
        kind="position-wise",
        d_in=d,
        d_out=outputs[0].shape[1],
        default_precision="fp32",
        parameters=sum(int(np.prod(v.shape.numpy())) for v in models["fp32"].graph.initializers.values() if v.shape),
        flops_per_token=4 * d * d,
        architecture={"family": "ffn [by hand]", "d": d},
        source={"seed": str(version)},
        tools={"onnxruntime": ort.__version__},
        created="2026-01-01T00:00:00+00:00",
        reference_sha256=file_sha256(folder / REFERENCE),
        variants=variants,
    )
    return write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2))
    return folder
