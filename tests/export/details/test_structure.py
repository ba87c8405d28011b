"""Files for CUDA hold that provider's operators at every place that needs one; a place without is named and refused."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from torch import nn

from export.adapters.random_weights import random_stack
from export.details.structure import check_structure, structure
from export.errors import ProofError
from export.pipeline import Options, export_module
from service.manifest import REPORT, Precision, read_manifest
from tests.export.adapters.families import llama


def export(module: nn.Module, models: Path, *precisions: Precision) -> Path:
    return export_module(module, Options("x", models, precisions=precisions, providers=("cuda",)))


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(random_stack(64, 4, 128, layers=2), tmp_path_factory.mktemp("block"), "fp16", "w8")


def test_a_file_s_operators_are_counted_by_place_and_the_report_says_that_none_was_run(block: Path) -> None:
    found = {row.pattern: (row.kernels, row.found, row.expected) for row in structure(block / "w8-cuda.onnx", 8)}
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
    found = {row.pattern: (row.kernels, row.found, row.expected) for row in structure(folder / "fp32-cuda.onnx", 0)}
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
    variants = [variant for variant in read_manifest(block).variants if variant.precision == "fp16"]
    with pytest.raises(
        ProofError,
        match=rf"fp16-cuda\.onnx: attention, packed: 1 of 2 have no Packed.*: blocks\.{layer}\.attention\.qkv",
    ):
        check_structure(tmp_path, variants)


def test_weights_that_are_not_in_blocks_are_missed(block: Path) -> None:
    (row,) = (row for row in structure(block / "w8-cuda.onnx", 9) if row.pattern == "weights in blocks")
    assert (row.holds, row.found, row.expected, row.missed) == (False, 8, 9, ["1 of them"])
