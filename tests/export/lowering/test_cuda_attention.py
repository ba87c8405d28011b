"""The CUDA bodies of attention, as far as a CPU shows: padded ones run and equal torch, packed ones are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from export.blocks import varlen_attention
from export.lowering import lower
from export.lowering.cuda_attention import PACKED_LAYOUT, layout, padded_attention
from export.lowering.registry import PROVIDERS, Body
from export.quantize import DOMAIN
from service.session import open_session

FARTHEST = 4
LENGTHS = (3, 1, 7, 2)


def attention(options: dict[str, Any], *, bias: bool) -> ir.Model:
    size, heads, kv = 8, options["num_heads"], options["num_kv_heads"]
    inputs = [ir.val(n, ir.DataType.FLOAT, ["tokens", h * size]) for n, h in zip("qkv", (heads, kv, kv), strict=True)]
    inputs.append(ir.val("seq_lens", ir.DataType.INT64, ["sequences"]))
    if bias:
        inputs.append(ir.val("bias", ir.DataType.FLOAT, [heads, 2 * FARTHEST + 1]))
    attributes = {**options, "causal": int(options["causal"]), "window": options["window"] or 0, "head_size": size}
    node = ir.node("VarlenAttention", inputs, attributes, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "out", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["tokens", heads * size])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, DOMAIN: 1}, name="g")
    return ir.Model(graph, ir_version=10)


def with_body(model: ir.Model, body: Body) -> ir.Model:
    source = f'<opset_import: ["": 21, "com.microsoft": 1], domain: "{DOMAIN}">\n{body.name} {body.text}'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(source))
    model.functions[function.identifier()] = function
    model.opset_imports["com.microsoft"] = 1
    model.graph[0].op_type = body.name
    return model


@pytest.mark.parametrize(
    ("causal", "window", "kv_heads", "bias"),
    [(False, None, 4, False), (True, None, 4, False), (True, 2, 2, False), (False, None, 4, True), (True, 3, 4, True)],
    ids=["plain", "causal", "window-grouped", "bias", "window-bias"],
)
def test_padded_attention_equals_torch_and_nan_stays_in_its_sequence(
    causal: bool, window: int | None, kv_heads: int, bias: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_heads": 4, "num_kv_heads": kv_heads, "causal": causal, "window": window}
    options["scale"] = 0.4
    model = attention(options, bias=bias)
    ir.save(with_body(model, padded_attention(model.graph[0])), tmp_path / "a.onnx")
    onnx.checker.check_model(tmp_path / "a.onnx", full_check=True)
    session = open_session(tmp_path / "a.onnx", "cpu", 1)
    rng = np.random.default_rng()
    feeds = {
        value.name: rng.standard_normal((sum(LENGTHS), value.shape[1]), dtype=np.float32)
        for value in session.get_inputs()[:3]
    }
    feeds["seq_lens"] = np.array(LENGTHS)
    if bias:
        feeds["bias"] = rng.standard_normal((4, 2 * FARTHEST + 1), dtype=np.float32)
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    expected = varlen_attention(
        *(tensors[name] for name in ("q", "k", "v", "seq_lens")), bias=tensors.get("bias"), **options
    )
    (out,) = session.run(["out"], feeds)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    feeds["v"][3] = np.nan  # the sequence of one token
    (poisoned,) = session.run(["out"], feeds)
    assert np.isnan(poisoned[3]).all()
    assert np.isfinite(np.delete(poisoned, 3, axis=0)).all()


def test_only_plain_bidirectional_attention_is_packed() -> None:
    plain: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "causal": False, "window": None, "scale": 0.4}
    found = []
    for change, bias in (({}, False), ({"causal": True}, False), ({"num_kv_heads": 2}, False), ({}, True)):
        model = attention(plain | change, bias=bias)
        lower(model, "cuda")
        (function,) = model.functions.values()
        found.append([node.op_type for node in function if node.domain == "com.microsoft"])
        onnx.checker.check_model(ir.to_proto(model))
    assert found == [["PackedMultiHeadAttention"], *[["MultiHeadAttention"]] * 3]


@pytest.mark.parametrize("lengths", [(1,), (2, 4), (5, 1, 3), (1, 1, 1)])
def test_the_packed_layout_is_what_the_kernel_documents(lengths: tuple[int, ...], tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (int64[s] seq_lens) => (int32[s, l] token_offset, int32[n] cumulative) {{{layout("seq_lens")}{PACKED_LAYOUT}}}"""
    session = ort.InferenceSession(onnx.parser.parse_model(text).SerializeToString())
    offset, cumulative = session.run(["token_offset", "cumulative"], {"seq_lens": np.array(lengths)})
    longest = max(lengths)
    tokens = [s * longest + i for s, n in enumerate(lengths) for i in range(n)]
    padding = [s * longest + i for s, n in enumerate(lengths) for i in range(n, longest)]
    assert offset.reshape(-1).tolist() == tokens + padding
    assert offset.shape == (len(lengths), longest)
    assert cumulative.tolist() == [0, *np.cumsum(lengths).tolist()]


def test_padded_cross_attention_equals_the_cpu_form(tmp_path: Path) -> None:
    inputs = [ir.val(n, ir.DataType.FLOAT, [rows, 16]) for n, rows in zip("qkv", ("tokens", "m", "m"), strict=True)]
    inputs += [ir.val(n, ir.DataType.INT64, ["sequences"]) for n in ("seq_lens", "memory_seq_lens")]
    node = ir.node("VarlenCrossAttention", inputs, {"num_heads": 2, "scale": 0.3}, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "out", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["tokens", 16])
    model = ir.Model(ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, DOMAIN: 1}), ir_version=10)
    rng, memory_lens = np.random.default_rng(), (5, 2, 1, 6)
    feeds = {"q": rng.standard_normal((sum(LENGTHS), 16), dtype=np.float32)}
    feeds |= {name: rng.standard_normal((sum(memory_lens), 16), dtype=np.float32) for name in "kv"}
    feeds |= {"seq_lens": np.array(LENGTHS), "memory_seq_lens": np.array(memory_lens)}
    found = []
    for provider in PROVIDERS:
        lowered = model.clone()
        lower(lowered, provider)
        ir.save(lowered, tmp_path / "cross.onnx")
        found.append(open_session(tmp_path / "cross.onnx", "cpu", 1).run(["out"], feeds)[0])
    np.testing.assert_allclose(found[1], found[0], atol=2e-6)
