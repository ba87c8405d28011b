"""From a module to a proved bundle: what is in it, what it must hold, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from export import pipeline, variants
from export.adapters.random_weights import Init, random_ffn, random_stack
from export.adapters.registry import pack
from export.blocks import BlockStack
from export.errors import ExportError, ProofError
from export.graph import to_graph
from export.pipeline import Options, export_module, export_packed
from service.manifest import MANIFEST, REFERENCE, REPORT, Certificate, Manifest, read_manifest
from service.session import open_session

ROWS = "rows are independent"


def variant(manifest: Manifest, precision: str) -> Any:
    return next(v for v in manifest.variants if v.precision == precision)


def test_a_users_module_becomes_a_bundle_that_repeats_its_reference(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv1d(6, 24, 1), nn.GELU(), nn.Conv1d(24, 4, 1)).double().train()
    steps: list[str] = []
    folder = export_module(
        module, Options("conv", tmp_path, version=2), source={"factory": "x.py:make"}, progress=steps.append
    )
    assert folder == tmp_path / "conv" / "2"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [MANIFEST, REFERENCE, REPORT, "fp32-cpu.onnx", "int8-cpu.onnx"]
    )
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.d_in, manifest.d_out) == ("position-wise", 6, 4)
    assert manifest.parameters == 6 * 24 + 24 + 24 * 4 + 4
    assert manifest.flops_per_token == 2 * (6 * 24 + 24 * 4)
    assert manifest.default_precision == "int8"
    assert manifest.source["factory"] == "x.py:make"
    assert manifest.architecture["layout"] == "(1, d, N)"
    assert {v.certificate.kind for v in manifest.variants} == {"exact"}
    assert (variant(manifest, "int8").quantized_matmuls, variant(manifest, "int8").float_matmuls) == (2, 0)
    assert (variant(manifest, "fp32").quantized_matmuls, variant(manifest, "fp32").float_matmuls) == (0, 2)
    assert len(steps) == len(set(steps)) >= 5
    assert module.training
    assert next(module.parameters()).dtype == torch.float64

    session = open_session(folder / "fp32-cpu.onnx", "cpu", 1)
    with np.load(folder / REFERENCE, allow_pickle=False) as arrays:
        count = sum(key.startswith("out_") for key in arrays)
        assert count == 5
        for i in range(count):
            out = session.run(["out"], {"tokens": arrays[f"tokens_{i}"]})[0]
            np.testing.assert_allclose(out, arrays[f"out_{i}"], rtol=1e-4, atol=1e-5)
            expected = module.eval()(torch.from_numpy(arrays[f"tokens_{i}"]).double().T[None])[0].T.detach().numpy()
            np.testing.assert_allclose(arrays[f"out_{i}"], expected, rtol=1e-6, atol=1e-7)
    report = (folder / REPORT).read_text()
    assert "| **certificate** | **exact** | **exact** |" in report
    assert ROWS in report


def test_an_encoder_becomes_a_bundle_of_sequences(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, norm_first=True, batch_first=True, activation="gelu")
    module = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    folder = export_module(module, Options("encoder", tmp_path), causal=True)
    manifest = read_manifest(folder)
    assert manifest.kind == "sequence"
    assert manifest.architecture["causal"] is True
    assert {v.certificate.kind for v in manifest.variants} == {"exact"}
    assert any(len(row.seq_lens) > 1 for row in manifest.variants[0].parity)
    model = onnx.load(folder / "int8-cpu.onnx")
    assert {(f.domain, f.name) for f in model.functions} == {
        ("tokenslab", "VarlenAttention"),
        ("tokenslab", "QuantizedMatMul"),
    }
    session = open_session(folder / "fp32-cpu.onnx", "cpu", 1)
    tokens, seq_lens = torch.randn(9, 16), [4, 5]
    out = session.run(["out"], {"tokens": tokens.numpy(), "seq_lens": np.array(seq_lens)})[0]
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        last = module.eval()(tokens[4:][None], mask)[0].numpy()
    np.testing.assert_allclose(out[4:], last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("init", "seed"), [("linear", 0), ("normal", 1)])
def test_ffn_768_3072_holds_2e_6_in_fp32_and_35_db_in_int8(tmp_path: Path, init: Init, seed: int) -> None:
    packed = pack(random_ffn(768, 3072, init=init, seed=seed))
    manifest = read_manifest(export_packed(packed, Options("ffn", tmp_path, seed=seed), source={}))
    assert max(row.relative_error for row in variant(manifest, "fp32").parity) <= 2e-6
    assert min(row.sqnr_db for row in variant(manifest, "int8").parity) >= 35
    assert {v.certificate.kind for v in manifest.variants} == {"exact"}


@pytest.mark.parametrize(
    ("d", "heads", "d_ff", "place", "norm", "activation"),
    [
        (64, 4, 128, "post", "layernorm", "relu"),
        (64, 4, 128, "pre", "rmsnorm", "swiglu"),
        (768, 12, 3072, "post", "layernorm", "gelu"),
    ],
)
def test_one_block_holds_2e_6_in_fp32(
    tmp_path: Path, d: int, heads: int, d_ff: int, place: Any, norm: Any, activation: str
) -> None:
    stack = random_stack(d, heads, d_ff, place=place, norm=norm, activation=activation, bias=place == "post", seed=5)
    folder = export_module(stack, Options("block", tmp_path, precisions=("fp32",)))
    manifest = read_manifest(folder)
    assert max(row.relative_error for row in variant(manifest, "fp32").parity) <= 2e-6
    assert manifest.default_precision == "fp32"
    assert not (folder / "int8-cpu.onnx").exists()


def test_int8_alone_leaves_no_float_file(tmp_path: Path) -> None:
    options = Options("ffn", tmp_path, precisions=("int8",))
    folder = export_packed(pack(random_ffn(16, 32)), options, source={})
    assert [v.precision for v in read_manifest(folder).variants] == ["int8"]
    assert not (folder / "fp32-cpu.onnx").exists()


def test_the_same_export_twice_gives_the_same_files(tmp_path: Path) -> None:
    hashes = []
    for version in (1, 2):
        folder = export_module(random_ffn(8, 16, seed=4), Options("ffn", tmp_path, version=version, seed=4))
        manifest = json.loads((folder / MANIFEST).read_text())
        hashes.append([manifest["reference_sha256"], *(v["sha256"] for v in manifest["variants"])])
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a b"}, "name 'a b'"),
        ({"name": "x-int8"}, "ends in '-int8'"),
        ({"precisions": ()}, "expected one or more"),
        ({"precisions": ("int8", "int8")}, "each once"),
        ({"precisions": ("fp32",), "default_precision": "int8"}, "default precision int8 is not among fp32"),
        ({"version": 0}, "version 0"),
    ],
)
def test_impossible_options_are_refused_before_any_work(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(nn.Module(), Options(**{"name": "x", "models": tmp_path, **options}))
    assert list(tmp_path.iterdir()) == []


def test_a_module_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="has no weights"):
        export_module(nn.ReLU(), Options("relu", tmp_path), d=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv1d(8, 8, 1, groups=2), r"operator Conv \(node .*\) uses the weight '.*weight' of shape \(8, 4, 1\)"),
        (BlockStack([]), "expected one or more TransformerBlocks"),
        (nn.GRU(8, 8, batch_first=True), "not position-wise|no nn.Linear"),
    ],
)
def test_what_cannot_be_served_as_matmuls_leaves_nothing(tmp_path: Path, module: nn.Module, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(module, Options("x", tmp_path))
    assert list(tmp_path.iterdir()) == []


def inexact(*_: Any, **__: Any) -> Certificate:
    checks = {"beside sequences 30x larger": False, "among random neighbours": True}
    return Certificate(kind="tolerance", max_drift=1e-6, rows=1, checks=checks, session={}, machine="m")


def test_an_inexact_certificate_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "certify", inexact)
    packed = pack(random_ffn(8, 16))
    message = "fp32: the certificate is 'tolerance'.* in: beside sequences 30x larger; --allow-inexact"
    with pytest.raises(ProofError, match=message):
        export_packed(packed, Options("ffn", tmp_path), source={})
    assert list(tmp_path.iterdir()) == []
    folder = export_packed(packed, Options("ffn", tmp_path, allow_inexact=True), source={})
    assert {v.certificate.kind for v in read_manifest(folder).variants} == {"tolerance"}


def test_a_graph_that_differs_from_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*arguments: Any) -> Any:
        model = to_graph(*arguments)
        bias = next(value for value in model.graph.initializers.values() if value.name == "up.bias")
        assert bias.const_value is not None
        bias.const_value = ir.tensor(bias.const_value.numpy() + np.float32(1e-4), name=bias.name)
        return model

    monkeypatch.setattr(pipeline, "to_graph", damaged)
    with pytest.raises(ProofError, match="fp32: relative error"):
        export_packed(pack(random_ffn(8, 16)), Options("ffn", tmp_path), source={})
    assert list(tmp_path.iterdir()) == []
