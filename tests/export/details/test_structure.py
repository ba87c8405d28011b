"""Files for CUDA hold that provider's operators at every place that needs one; a place without is named and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from export.adapters.random_weights import random_stack
from export.details.structure import check_structure, structure
from export.errors import ProofError
from export.pipeline import Options, export_module
from service.manifest import REPORT, Precision, Variant, WeightMatmul, read_manifest
from tests.export.adapters.families import llama


def export(module: nn.Module, models: Path, *precisions: Precision) -> Path:
    return export_module(module, Options("x", models, precisions=precisions, providers=("cuda",)))


def of(bundle: Path, precision: Precision) -> Variant:
    (found,) = (variant for variant in read_manifest(bundle).variants if variant.precision == precision)
    return found


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(random_stack(64, 4, 128, layers=2), tmp_path_factory.mktemp("block"), "fp16", "w8")


def test_a_file_s_operators_are_counted_by_place_and_the_report_says_that_none_was_run(block: Path) -> None:
    found = {
        row.pattern: (row.kernels, row.found, row.expected)
        for row in structure(block / "w8-cuda.onnx", of(block, "w8").matmuls)
    }
    assert found == {
        "attention, packed": (["PackedMultiHeadAttention"], 2, 2),
        "weights in blocks": (["MatMulNBits"], 8, 8),
    }
    text = (block / REPORT).read_text()
    assert (
        "Structural: the operators of that provider are in the file wherever they should be; none has been run" in text
    )
    assert "| fp16 | attention, packed | PackedMultiHeadAttention | 2 of 2 |" in text


def test_causal_grouped_attention_is_padded_and_positions_are_rotary(tmp_path: Path) -> None:
    folder = export(llama(), tmp_path, "fp32")
    found = {row.pattern: (row.kernels, row.found, row.expected) for row in structure(folder / "fp32-cuda.onnx", [])}
    assert found == {
        "attention, padded": (["MultiHeadAttention"], 2, 2),
        "rotary positions": (["RotaryEmbedding"], 2, 2),
    }


@pytest.mark.parametrize("layer", [0, 1])
def test_the_one_place_whose_operator_is_gone_is_named(block: Path, tmp_path: Path, layer: int) -> None:
    model = ir.load(block / "fp16-cuda.onnx")
    call = [node for node in model.graph if node.op_type.startswith("Packed")][layer]
    call.op_type = "PackedVarlenAttention_other"  # a call of another function, which is not there
    ir.save(model, tmp_path / "fp16-cuda.onnx")
    with pytest.raises(
        ProofError,
        match=rf"fp16-cuda\.onnx: attention, packed: 1 of 2 have no Packed.*: blocks\.{layer}\.attention\.qkv",
    ):
        check_structure(tmp_path, [of(block, "fp16")])


def float_again(model: ir.Model, call: ir.Node) -> None:
    """The matmul by the float weight, which is there too: as many MatMulNBits as before, but for this one."""
    name = "blocks.1.ffn.up.weight.T"
    weight = ir.val(name, const_value=ir.tensor(np.zeros((64, 128), np.float32), name=name))
    model.graph.register_initializer(weight)
    call.op_type, call.domain = "MatMul", ""
    call.attributes.clear()
    call.resize_inputs(2)
    call.replace_input_with(1, weight)


def other_bits(model: ir.Model, call: ir.Node) -> None:
    """Integers of 8 bits read as 4."""
    body = model.functions[call.op_identifier()].clone()
    (kernel,) = (node for node in body if node.op_type == "MatMulNBits")
    kernel.attributes["bits"] = ir.AttrInt64("bits", 4)
    body.name = call.op_type = "WeightOnlyMatMul4Bit"
    model.functions[body.identifier()] = body


def integers_as_scales(model: ir.Model, call: ir.Node) -> None:
    """The kernel is there, and what is packed is not where it takes it."""
    packed, scales = call.inputs[1:3]
    call.replace_input_with(1, scales)
    call.replace_input_with(2, packed)


def no_function(model: ir.Model, call: ir.Node) -> None:
    """A call of what the file does not hold; a call too many elsewhere made up for it, where they were counted."""
    call.op_type = "WeightOnlyMatMul_other"
    other = next(node for node in model.graph if node.op_type == "WeightOnlyMatMul8Bit")
    sizes = {name: other.attributes.get_int(name) for name in ("inner", "width")}
    extra = ir.node(other.op_type, other.inputs, sizes, domain=other.domain, name="extra")
    model.graph.append(extra)


@pytest.mark.parametrize("damage", [float_again, other_bits, integers_as_scales, no_function])
def test_the_one_weight_that_is_not_in_blocks_is_named(
    block: Path, tmp_path: Path, damage: Callable[[ir.Model, ir.Node], None]
) -> None:
    model = ir.load(block / "w8-cuda.onnx")
    packed = model.graph.initializers["blocks.1.ffn.up.weight.T.packed"]
    (call,) = packed.uses()
    damage(model, call.node)
    ir.save(model, tmp_path / "w8-cuda.onnx")
    refusal = r"w8-cuda\.onnx: weights in blocks: 1 of 8 have no MatMulNBits: blocks\.1\.ffn\.up\.weight\.T$"
    with pytest.raises(ProofError, match=refusal):
        check_structure(tmp_path, [of(block, "w8")])


def test_a_weight_that_is_not_in_the_file_is_named(block: Path) -> None:
    asked = [*of(block, "w8").matmuls, WeightMatmul(weight="gone", form="8-bit weights")]
    (row,) = (row for row in structure(block / "w8-cuda.onnx", asked) if row.pattern == "weights in blocks")
    assert (row.holds, row.found, row.expected, row.missed) == (False, 8, 9, ["gone"])
