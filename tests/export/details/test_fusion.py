"""What should fuse is found in real files, counted in what ONNX Runtime makes of them, and missed where it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn
from transformers import LlamaConfig, LlamaModel

from export.adapters.registry import pack
from export.details.document import Fused
from export.details.fusion import broken, fusions
from export.graph import to_graph
from export.lowering import lower
from service.errors import ProviderError

ROOT = Path(__file__).parents[3]
FEEDS = {"tokens": np.ones((8, 64), np.float32), "seq_lens": np.array([5, 3])}


def rows(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, Fused]:
    return {row.pattern: row for row in fusions(path, "cpu", feeds)}


def test_the_shipped_block_fuses_all_that_it_should_in_both_precisions() -> None:
    folder = ROOT / "models" / "demo-block" / "1"
    fp32, int8 = (rows(folder / f"{precision}-cpu.onnx", FEEDS) for precision in ("fp32", "int8"))
    assert {name: row.expected for name, row in fp32.items()} == {"weight matmul and bias": 8, "layer norm": 4}
    assert {name: row.expected for name, row in int8.items()} == {
        "integer matmul and scales": 8,
        "bias and GELU": 2,
        "layer norm": 4,
    }
    for row in (*fp32.values(), *int8.values()):
        assert row.holds
        assert row.share_of_time is None
    assert broken(fp32.values()) == []


def test_what_does_not_fuse_is_named_with_its_share_of_a_run(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8)).eval()
    for parameter in model.parameters():  # norms that are alike would be stored once, under one name
        nn.init.normal_(parameter.requires_grad_(False), 1.0, 0.1)
    packed = pack(model)
    path = tmp_path / "llama.onnx"
    graph = to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)
    lower(graph, "cpu")
    ir.save(graph, path)
    found = rows(path, {"tokens": np.ones((8, 16), np.float32), "seq_lens": np.array([5, 3])})
    norm = found["RMS norm"]
    assert (norm.expected, norm.found, norm.holds) == (3, 0, False)
    assert norm.share_of_time is not None
    assert 0 < norm.share_of_time < 1
    (warning,) = broken(found.values())
    assert warning.startswith("RMS norm: 3 of 3 did not become SimplifiedLayerNormalization")
    assert [place.partition(" (")[0] for place in norm.missed] == ["blocks.0.norm1", "blocks.0.norm2", "norm"]
    assert found["SiLU"].holds


BROKEN = {
    "fp32": ("weight matmul and bias", "MatMul", ["attention.qkv", "attention.out", "ffn.up", "ffn.down"]),
    "int8": ("bias and GELU", "Add", ["ffn.up"]),
}


@pytest.mark.parametrize("surplus", [False, True], ids=["alone", "beside a kernel too many"])
@pytest.mark.parametrize("precision", BROKEN)
def test_one_place_that_does_not_fuse_is_named_though_there_are_kernels_enough(
    tmp_path: Path, precision: str, surplus: bool
) -> None:
    pattern, operator, stages = BROKEN[precision]
    layer, stage = int(np.random.default_rng().integers(2)), str(np.random.default_rng().choice(stages))
    model = ir.load(ROOT / "models" / "demo-block" / "1" / f"{precision}-cpu.onnx")
    parameter = f"blocks.{layer}.{stage}.{'weight.T' if operator == 'MatMul' else 'bias'}"
    (node,) = (n for n in model.graph if n.op_type == operator and parameter in [v.name for v in n.inputs if v])
    extra = ir.node("Identity", [node.outputs[0]])  # another who wants the value between
    extra.outputs[0].name = "between"
    model.graph.append(extra)
    model.graph.outputs.append(extra.outputs[0])
    if surplus:
        add_kernel(model, precision)
    ir.save(model, tmp_path / "m.onnx")
    found = rows(tmp_path / "m.onnx", FEEDS)
    row = found[pattern]
    assert row.expected - row.found == 1
    (place,) = row.missed
    assert place.startswith(f"blocks.{layer}.{stage} (")
    assert all(other.holds and not other.missed for name, other in found.items() if name != pattern)
    (warning,) = broken(found.values())
    assert f"{pattern}: 1 of {row.expected} did not become " in warning
    assert warning.endswith(f"% of a run's time: {place}")


def add_kernel(model: ir.Model, precision: str) -> None:
    """A kernel of the broken pattern's kind where none is expected."""
    tokens = model.graph.inputs[0]
    if precision == "fp32":
        weight = ir.node("ConstantOfShape", [constant(model, "shape", [64, 64])])
        made = ir.node("Gemm", [tokens, weight.outputs[0], constant(model, "zeros", [0.0] * 64)])
        model.graph.append(weight)
    else:
        made = ir.node("BiasGelu", [tokens, constant(model, "zeros", [0.0] * 64)], domain="com.microsoft")
    made.outputs[0].name = "surplus"
    model.graph.append(made)
    model.graph.outputs.append(made.outputs[0])


def constant(model: ir.Model, name: str, values: list[float] | list[int]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(values, name=name))
    model.graph.register_initializer(value)
    return value


def test_what_the_file_has_as_one_kernel_is_said_to_be_as_written() -> None:
    found = rows(ROOT / "models" / "demo-block" / "1" / "fp32-cpu.onnx", FEEDS)
    assert {name: row.written for name, row in found.items()} == {"weight matmul and bias": False, "layer norm": True}


def test_a_provider_that_is_not_there_is_said() -> None:
    with pytest.raises(ProviderError, match="CUDA"):
        fusions(ROOT / "models" / "demo-ffn" / "1" / "fp32-cpu.onnx", "cuda", FEEDS)
