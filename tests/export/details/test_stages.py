"""Stages found in graphs of several families, and their figures against figures computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn
from transformers import LlamaConfig, LlamaModel

from export.adapters.random_weights import random_stack
from export.adapters.registry import pack
from export.details.document import StageFigures
from export.details.points import points
from export.details.stages import ACTIVE, channel_sqnr_db, measure_stages
from export.graph import to_graph
from export.lowering import lower
from export.packed import Packed

BERT_LAYER = ["QKV", "attention", "attention out", "norm", "FFN1", "activation", "FFN2", "norm"]
D, ROWS = 8, 96


def graph_of(packed: Packed) -> ir.Model:
    return to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)


def stack_ffn(tmp_path: Path) -> tuple[Path, ir.Model]:
    packed = pack(random_stack(D, 2, 4 * D, layers=1), d=D)
    graph = graph_of(packed)
    lower(graph, "cpu")
    path = tmp_path / "fp32.onnx"
    ir.save(graph, path)
    return path, graph


def test_a_stack_has_its_stages_in_order_layer_by_layer() -> None:
    found = points(graph_of(pack(random_stack(D, 2, 16, layers=2), d=D)))
    assert [point.stage for point in found] == BERT_LAYER * 2
    assert [point.layer for point in found] == [0] * 8 + [1] * 8, "norms too, though those alike share their weights"
    assert len({point.value for point in found}) == len(found)


def test_rms_norms_and_gated_units_are_found_too() -> None:
    sizes = {"hidden_size": D, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    found = points(graph_of(pack(LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8)).eval())))
    stages = [point.stage for point in found]
    assert stages == ["norm", "QKV", "attention", "attention out", "norm", "FFN1", "activation", "FFN2", "norm"]
    assert [point.layer for point in found] == [0] * 8 + [None], "norms go first in a layer, the last is in none"
    widths = {point.stage: point.width for point in found}
    assert (widths["FFN1"], widths["activation"]) == (32, 16)


def test_matmuls_of_a_module_with_names_of_its_own_are_there_under_their_weights() -> None:
    found = points(graph_of(pack(nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D)).eval())))
    assert [(point.stage, point.weight, point.width) for point in found] == [
        ("matmul", "inner.0.weight.T", 32),
        ("matmul", "inner.2.weight.T", D),
    ]


def test_figures_are_those_of_the_values_themselves(tmp_path: Path) -> None:
    path, graph = stack_ffn(tmp_path)
    tokens = np.random.default_rng().standard_normal((ROWS, D), dtype=np.float32)
    tokens[:, 3] *= 40  # an outlier channel, which the first residual keeps
    feeds = {"tokens": tokens, "seq_lens": np.array([ROWS])}
    found = measure_stages({"fp32": path}, feeds, tmp_path)
    by_stage: dict[str, StageFigures] = {figures.stage: figures for figures in found}
    qkv = by_stage["QKV"]
    weight, bias = (array(graph, f"blocks.0.attention.qkv.{kind}") for kind in ("weight.T", "bias"))
    wanted = tokens.astype(np.float64) @ weight + bias
    assert (qkv.rows, qkv.width) == wanted.shape
    assert qkv.least == pytest.approx(wanted.min(), rel=1e-4)
    assert qkv.greatest == pytest.approx(wanted.max(), rel=1e-4)
    assert qkv.rms == pytest.approx(float(np.sqrt(np.mean(wanted**2))), rel=1e-4)
    assert all(figures.sqnr_db == {} for figures in found)
    assert not list(tmp_path.glob("stages.*"))


def array(graph: ir.Model, name: str) -> np.ndarray:
    value = graph.graph.initializers[name].const_value
    assert value is not None
    return value.numpy().astype(np.float64)


def test_the_active_share_counts_units_and_the_outliers_their_channels(tmp_path: Path) -> None:
    path, graph = stack_ffn(tmp_path)
    weights = array(graph, "blocks.0.ffn.up.weight.T").astype(np.float32)
    bias = np.full(4 * D, -1000.0, np.float32)
    bias[:5] = [1000.0, 1.0, 2.0, 500.0, 20000.0]  # of 32 units the first five pass; two of them stay below 1 %
    model = ir.load(path)
    model.graph.initializers["blocks.0.ffn.up.weight.T"].const_value = ir.tensor(weights * 0)
    model.graph.initializers["blocks.0.ffn.up.bias"].const_value = ir.tensor(bias)
    ir.save(model, path)
    feeds = {"tokens": np.ones((4, D), np.float32), "seq_lens": np.array([4])}
    (activation,) = [f for f in measure_stages({"fp32": path}, feeds, tmp_path) if f.stage == "activation"]
    assert activation.active_share == pytest.approx(sum(b > ACTIVE * bias.max() for b in bias) / (4 * D))
    assert activation.active_share == pytest.approx(3 / 32)


def test_a_file_with_other_weights_is_measured_against_the_float_one(tmp_path: Path) -> None:
    path, _ = stack_ffn(tmp_path)
    other = ir.load(path)
    down = other.graph.initializers["blocks.0.ffn.down.weight.T"]
    assert down.const_value is not None
    noise = np.random.default_rng().standard_normal(down.const_value.shape.numpy(), dtype=np.float32)
    down.const_value = ir.tensor(down.const_value.numpy() * (1 + 0.01 * noise))
    ir.save(other, tmp_path / "other.onnx")
    feeds = {"tokens": np.random.default_rng().standard_normal((ROWS, D), dtype=np.float32)}
    feeds["seq_lens"] = np.array([ROWS])
    found = measure_stages({"fp32": path, "int8": tmp_path / "other.onnx"}, feeds, tmp_path)
    sqnr = {figures.stage: figures.sqnr_db["int8"] for figures in found}
    assert sqnr["activation"] == 300.0, "nothing before the changed weight differs"
    assert 30 < sqnr["FFN2"] < 60


def test_scales_of_channels_are_no_error_and_noise_is() -> None:
    rng = np.random.default_rng()
    x = rng.standard_normal((400, 16), dtype=np.float32)
    scales = rng.uniform(0.1, 10, 16).astype(np.float32)
    assert channel_sqnr_db(x, x * scales) > 120
    noisy = x + 0.01 * rng.standard_normal(x.shape, dtype=np.float32)
    assert channel_sqnr_db(x, noisy * scales) == pytest.approx(40, abs=1.5)
    assert channel_sqnr_db(x, np.zeros_like(x)) == pytest.approx(0)
    assert np.isnan(channel_sqnr_db(x, np.full_like(x, np.nan)))
