"""The CPU bodies of attention: equal to torch, bit for bit the same alone and beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
FARTHEST = 6  # of the distances in a bias


def attention_model(
    num_heads: int,
    size: int,
    *,
    num_kv_heads: int | None = None,
    causal: bool = False,
    window: int | None = None,
    bias: bool = False,
    scale: float = 0.5,
) -> tuple[ir.Model, dict[str, Any]]:
    """A lowered model of one attention, and the options of its reference."""
    options: dict[str, Any] = {"num_heads": num_heads, "causal": causal, "scale": scale, "window": window}
    options["num_kv_heads"] = num_kv_heads or num_heads
    widths = {"q": num_heads * size, "k": options["num_kv_heads"] * size, "v": options["num_kv_heads"] * size}
    inputs = [ir.val(name, ir.DataType.FLOAT, ["tokens", width]) for name, width in widths.items()]
    inputs.append(ir.val("seq_lens", ir.DataType.INT64, ["sequences"]))
    if bias:
        inputs.append(ir.val("bias", ir.DataType.FLOAT, [num_heads, 2 * FARTHEST + 1]))
    attributes = {**options, "causal": int(causal), "window": window or 0, "head_size": size}
    node = ir.node("VarlenAttention", inputs, attributes, domain=DOMAIN)
    node.outputs[0].name = "out"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(["tokens", widths["q"]])
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, DOMAIN: 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    lower(model, "cpu")
    return model, options


def open_model(folder: Path, model: ir.Model, threads: int = 1) -> ort.InferenceSession:
    path = folder / "attention.onnx"
    ir.save(model, path)
    onnx.checker.check_model(str(path))
    return open_session(path, "cpu", threads)


def random_feeds(session: ort.InferenceSession, rows: int, rng: np.random.Generator) -> dict[str, Float32]:
    shapes = {value.name: value.shape for value in session.get_inputs() if value.name != "seq_lens"}
    return {
        name: rng.standard_normal((first if isinstance(first, int) else rows, width), dtype=np.float32)
        for name, (first, width) in shapes.items()
    }


def run(session: ort.InferenceSession, feeds: dict[str, Float32], seq_lens: list[int]) -> Float32:
    out: Float32 = session.run(["out"], {**feeds, "seq_lens": np.array(seq_lens, np.int64)})[0]
    return out


def rows_of(feeds: dict[str, Float32], start: int, end: int) -> dict[str, Float32]:
    return {name: array if name == "bias" else array[start:end].copy() for name, array in feeds.items()}


FORMS: dict[str, dict[str, Any]] = {
    "both ways": {},
    "causal": {"causal": True},
    "causal, grouped": {"causal": True, "num_kv_heads": 2},
    "grouped": {"num_kv_heads": 1},
    "window": {"causal": True, "window": 4},
    "window, grouped": {"causal": True, "window": 1, "num_kv_heads": 2},
    "bias": {"bias": True, "scale": 1.0},
    "bias, causal": {"bias": True, "causal": True},
    "bias, window, grouped": {"bias": True, "causal": True, "window": 3, "num_kv_heads": 2},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_heads", "size"), [(2, 5), (4, 8), (12, 32)])
def test_attention_equals_torch_and_depends_on_no_neighbour(
    tmp_path: Path, form: str, num_heads: int, size: int
) -> None:
    model, options = attention_model(num_heads, size, **FORMS[form])
    session, other = open_model(tmp_path, model), open_model(tmp_path, model, threads=2)
    rng = np.random.default_rng()
    for seq_lens in ([1], [1, 1], [5, 1, 9, 2], [70, 1, 33]):
        feeds = random_feeds(session, sum(seq_lens), rng)
        out = run(session, feeds, seq_lens)
        exact = {name: torch.from_numpy(array).double() for name, array in feeds.items()}
        reference = varlen_attention(
            exact["q"], exact["k"], exact["v"], torch.tensor(seq_lens), bias=exact.get("bias"), **options
        ).numpy()
        assert np.linalg.norm(out - reference) <= 1e-6 * np.linalg.norm(reference)
        assert run(other, feeds, seq_lens).tobytes() == out.tobytes()
        ends = np.cumsum(seq_lens)
        for start, end in zip(ends - seq_lens, ends, strict=True):
            alone = run(session, rows_of(feeds, start, end), [int(end - start)])
            assert alone.tobytes() == out[start:end].tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [5, 8])
def test_nan_stays_in_its_own_sequence_and_reaches_earlier_tokens_as_in_torch(
    tmp_path: Path, form: str, size: int
) -> None:
    model, options = attention_model(2, size, **FORMS[form])
    session = open_model(tmp_path, model)
    feeds = random_feeds(session, 9, np.random.default_rng())
    for name in "qkv":
        feeds[name][3] = np.nan
    out = run(session, feeds, [5, 4])
    torch_feeds = {name: torch.from_numpy(array) for name, array in feeds.items()}
    expected = varlen_attention(
        torch_feeds["q"],
        torch_feeds["k"],
        torch_feeds["v"],
        torch.tensor([5, 4]),
        bias=torch_feeds.get("bias"),
        **options,
    ).numpy()
    assert np.array_equal(np.isnan(out).any(1), np.isnan(expected).any(1))
    assert np.isfinite(out[5:]).all()
    assert run(session, rows_of(feeds, 5, 9), [4]).tobytes() == out[5:].tobytes()


def test_layers_of_one_model_may_differ(tmp_path: Path) -> None:
    """Full and sliding attention in turn, as some families have it: each node keeps its own window."""
    q, k, v = (ir.val(name, ir.DataType.FLOAT, ["tokens", 16]) for name in "qkv")
    seq_lens = ir.val("seq_lens", ir.DataType.INT64, ["sequences"])
    nodes = []
    value = q
    for window in (0, 2):
        shape = {"num_heads": 2, "num_kv_heads": 2, "head_size": 8, "causal": 1, "scale": 1.0, "window": window}
        nodes.append(ir.node("VarlenAttention", [value, k, v, seq_lens], shape, domain=DOMAIN))
        value = nodes[-1].outputs[0]
    value.name, value.type, value.shape = "out", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["tokens", 16])
    graph = ir.Graph([q, k, v, seq_lens], [value], nodes=nodes, opset_imports={"": 21, DOMAIN: 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    lower(model, "cpu")
    session = open_model(tmp_path, model)
    feeds = random_feeds(session, 12, np.random.default_rng())
    out = run(session, feeds, [7, 5])
    exact = {name: torch.from_numpy(array).double() for name, array in feeds.items()}
    lengths = torch.tensor([7, 5])
    found = exact["q"]
    for last in (None, 2):
        found = varlen_attention(
            found, exact["k"], exact["v"], lengths, num_heads=2, causal=True, scale=1.0, window=last
        )
    assert np.linalg.norm(out - found.numpy()) <= 1e-6 * np.linalg.norm(found.numpy())
