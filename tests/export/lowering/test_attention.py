"""The CPU body of attention: equal to torch, bit for bit the same alone and beside others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from export.blocks import varlen_attention
from export.lowering import lower
from export.quantize import DOMAIN
from service.session import open_session

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def attention_session(folder: Path, d: int, *, num_heads: int, causal: bool, scale: float) -> ort.InferenceSession:
    inputs = [ir.val(name, ir.DataType.FLOAT, ["tokens", d]) for name in "qkv"]
    inputs.append(ir.val("seq_lens", ir.DataType.INT64, ["sequences"]))
    attributes = {"num_heads": num_heads, "causal": int(causal), "scale": scale}
    node = ir.node("VarlenAttention", inputs, attributes, domain=DOMAIN)
    node.outputs[0].name = "out"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["tokens", d])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, DOMAIN: 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    lower(model, "cpu")
    path = folder / "attention.onnx"
    ir.save(model, path)
    onnx.checker.check_model(str(path))
    return open_session(path, "cpu", 1)


def run(session: ort.InferenceSession, qkv: Float32, seq_lens: list[int]) -> Float32:
    feeds = dict(zip("qkv", qkv, strict=True)) | {"seq_lens": np.array(seq_lens, np.int64)}
    out: Float32 = session.run(["out"], feeds)[0]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "size"), [(1, 8), (3, 5), (12, 32), (2, 64)])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_attention_equals_torch_and_does_not_depend_on_the_batch(
    tmp_path: Path, causal: bool, num_heads: int, size: int, scale: float
) -> None:
    session = attention_session(tmp_path, num_heads * size, num_heads=num_heads, causal=causal, scale=scale)
    rng = np.random.default_rng(num_heads)
    for seq_lens in ([1], [1, 1], [5, 1, 9, 2], [70, 1, 33]):
        qkv = rng.standard_normal((3, sum(seq_lens), num_heads * size), dtype=np.float32)
        out = run(session, qkv, seq_lens)
        q, k, v = torch.from_numpy(qkv).double()
        reference = varlen_attention(
            q, k, v, torch.tensor(seq_lens), num_heads=num_heads, causal=causal, scale=scale
        ).numpy()
        assert np.linalg.norm(out - reference) <= 1e-6 * np.linalg.norm(reference)
        ends = np.cumsum(seq_lens)
        for start, end in zip(ends - seq_lens, ends, strict=True):
            alone = run(session, np.ascontiguousarray(qkv[:, start:end]), [int(end - start)])
            assert alone.tobytes() == out[start:end].tobytes()


def test_nan_stays_in_its_own_sequence_and_reaches_earlier_tokens_as_in_torch(tmp_path: Path) -> None:
    session = attention_session(tmp_path, 8, num_heads=2, causal=True, scale=0.5)
    qkv = np.random.default_rng(0).standard_normal((3, 9, 8), dtype=np.float32)
    qkv[:, 3] = np.nan
    out = run(session, qkv, [5, 4])
    q, k, v = torch.from_numpy(qkv)
    torch_out = varlen_attention(q, k, v, torch.tensor([5, 4]), num_heads=2, causal=True, scale=0.5).numpy()
    assert np.array_equal(np.isnan(out).any(1), np.isnan(torch_out).any(1))
    assert not np.isnan(out[5:]).any()
