"""Files for CUDA, as far as a machine without it can tell: types, casts, what stays float32, and accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from export.adapters.random_weights import random_ffn, random_stack
from export.errors import ExportError
from export.pipeline import Options, export_module
from service.manifest import Manifest, Precision, Variant, read_manifest
from service.session import Provider

ALL: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "w8", "w4")


def _export(module: nn.Module, models: Path, precisions: tuple[Precision, ...], calibrate: Path | None = None) -> Path:
    options = Options("half", models, precisions=precisions, providers=("cuda",), calibrate=calibrate)
    return export_module(module, options)


@pytest.fixture(scope="module")
def ffn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(random_ffn(64, 256), tmp_path_factory.mktemp("ffn"), ALL)


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = random_stack(64, 4, 128, layers=1, place="pre", norm="rmsnorm")
    return _export(module, tmp_path_factory.mktemp("block"), ("fp16", "bf16"))


def _variant(folder: Path, precision: Precision) -> Variant:
    return next(variant for variant in read_manifest(folder).variants if variant.precision == precision)


def _worst(variant: Variant) -> float:
    return min(row.sqnr_db for row in variant.stand_in)


@pytest.mark.parametrize(("precision", "bar_db", "ceiling_db"), [("fp16", 50, 80), ("bf16", 30, 62)])
@pytest.mark.parametrize("bundle", ["ffn", "block"])
def test_half_rounds_to_its_type_and_holds_its_bar(
    bundle: str, precision: Precision, bar_db: float, ceiling_db: float, request: pytest.FixtureRequest
) -> None:
    # Above the ceiling nothing was rounded: ONNX Runtime would have removed the casts.
    assert bar_db <= _worst(_variant(request.getfixturevalue(bundle), precision)) < ceiling_db


def test_every_file_for_cuda_is_unmeasured_and_has_figures_of_its_stand_in(ffn: Path) -> None:
    manifest = read_manifest(ffn)
    assert [(v.precision, v.provider, v.certificate.kind) for v in manifest.variants] == [
        (precision, "cuda", "unmeasured") for precision in ALL
    ]
    assert all(not variant.parity and variant.stand_in for variant in manifest.variants)
    assert {path.name for path in ffn.glob("*.onnx*")} == {f"{precision}-cuda.onnx" for precision in ALL}
    assert "not run where it was exported" in (ffn / "report.md").read_text()


@pytest.mark.parametrize(("precision", "half"), [("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.BFLOAT16)])
def test_weight_matmuls_are_half_and_the_edges_float32(block: Path, precision: Precision, half: ir.DataType) -> None:
    graph = ir.load(block / f"{precision}-cuda.onnx").graph
    assert [value.dtype for value in (graph.inputs[0], graph.outputs[0])] == [ir.DataType.FLOAT] * 2
    assert graph.outputs[0].name == "out"
    weights = [node.inputs[1] for node in graph if node.op_type == "MatMul"]
    assert len(weights) == 4
    assert all(value is not None and value.dtype == half for value in weights)
    assert {matmul.form for matmul in _variant(block, precision).matmuls} == {half.name.lower()}


def test_norms_stay_float32(block: Path) -> None:
    graph = ir.load(block / "fp16-cuda.onnx").graph
    halves = [initializer for initializer in graph.initializers.values() if initializer.dtype == ir.DataType.FLOAT16]
    assert halves
    assert not [value.name for value in halves if "norm" in str(value.name)]
    roots = [node for node in graph if node.op_type in ("Pow", "ReduceMean", "Sqrt", "Reciprocal")]
    assert roots
    for node in roots:
        assert all(value.dtype == ir.DataType.FLOAT for value in node.outputs)


def _outliers(channel: float) -> nn.Module:
    module = random_ffn(16, 32, activation="relu")
    first = next(part for part in module.modules() if isinstance(part, nn.Linear))
    with torch.no_grad():
        first.weight[3] *= channel
    return module


def test_a_matmul_beyond_float16_stays_float32_by_name(tmp_path: Path) -> None:
    folder = _export(_outliers(3e5), tmp_path, ("fp16",))
    forms = {matmul.weight: matmul.form for matmul in _variant(folder, "fp16").matmuls}
    assert set(forms.values()) == {"float32"}  # the first gives such numbers, the second takes them
    report = (folder / "report.md").read_text()
    assert all(name in report for name in forms)
    assert "float16 could not hold" in report


def test_the_users_own_tokens_decide_what_is_beyond_float16(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).standard_normal((64, 16), dtype=np.float32) * np.float32(1e5)
    np.save(tmp_path / "tokens.npy", tokens)
    module = random_ffn(16, 32)
    here = _variant(_export(module, tmp_path / "own", ("fp16",), tmp_path / "tokens.npy"), "fp16")
    there = _variant(_export(module, tmp_path / "synthetic", ("fp16",)), "fp16")
    assert [matmul.form for matmul in there.matmuls] == ["float16", "float16"]
    assert here.matmuls[0].form == "float32"


@pytest.mark.parametrize(
    ("precision", "provider", "reason"),
    [("fp16", "cpu", "few float16 kernels"), ("bf16", "cpu", "no bfloat16"), ("int8", "cuda", "no fast kernel")],
)
def test_a_precision_that_does_not_suit_the_provider_is_refused_with_the_reason(
    precision: Precision, provider: Provider, reason: str, tmp_path: Path
) -> None:
    options = Options("half", tmp_path, precisions=(precision,), providers=(provider,))
    with pytest.raises(ExportError, match=reason):
        options.check()


def test_both_providers_get_what_goes_with_each(tmp_path: Path) -> None:
    options = Options("half", tmp_path, precisions=("fp32", "int8", "fp16"), providers=("cpu", "cuda"))
    options.check()
    assert options.variants() == [("fp32", "cpu"), ("fp32", "cuda"), ("fp16", "cuda"), ("int8", "cpu")]


def test_a_manifest_without_parity_must_be_unmeasured(ffn: Path) -> None:
    state = read_manifest(ffn).model_dump()
    state["variants"][0]["certificate"] |= {"kind": "exact", "rows": 1}
    with pytest.raises(ValueError, match="parity"):
        Manifest.model_validate(state)
