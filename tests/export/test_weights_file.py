"""Weights beside the graph: the same answers, every file in the manifest, and torch's copy given back."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from export import budget, variants
from export.adapters.random_weights import random_stack
from export.adapters.registry import pack
from export.errors import ExportError, ProofError
from export.pipeline import Options, export_module, export_packed
from export.quantization import calibration
from export.quantization.calibration import Activations
from export.quantization.forms import EIGHT_BIT
from export.quantization.smoothing import activation_widths, smooth
from export.weights_file import SCRATCH, move_out, provisional
from service import session
from service.errors import BundleError
from service.manifest import Manifest, file_sha256, read_manifest
from service.session import open_session
from tests.export.hand_built import random_ffn


def stack() -> nn.Module:
    return random_stack(32, 4, 64, layers=2, seed=3)


def answer(folder: Path, manifest: Manifest, precision: str) -> Any:
    variant = next(v for v in manifest.variants if v.precision == precision)
    tokens = np.random.default_rng(0).standard_normal((9, 32), dtype=np.float32)
    opened = open_session(folder / variant.file, "cpu", 1)
    return opened.run(["out"], {"tokens": tokens, "seq_lens": np.array([4, 5])})[0]


def test_a_bundle_with_weights_beside_the_graph_answers_bit_for_bit_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = export_module(stack(), Options("inside", tmp_path))
    beside = export_module(stack(), Options("beside", tmp_path, external_above=0))
    monkeypatch.chdir(tmp_path.parent)  # ONNX Runtime looks beside the file, not in the working directory
    manifest = read_manifest(beside)
    assert {path.name for path in beside.iterdir()} == {
        *("manifest.json", "report.md", "reference.npz", "fp32-cpu.onnx", "int8-cpu.onnx"),
        *("fp32-cpu.onnx.data", "int8-cpu.onnx.data"),
    }
    for variant in manifest.variants:
        (data,) = variant.data
        assert (data.sha256, data.bytes) == (file_sha256(beside / data.file), (beside / data.file).stat().st_size)
        assert variant.total_bytes == variant.bytes + data.bytes
        assert variant.certificate.kind == "exact"
        stored = onnx.load(beside / variant.file, load_external_data=False)
        places = {e.value for t in stored.graph.initializer for e in t.external_data if e.key == "location"}
        assert places == {data.file}, "each file stands alone"
        same = answer(inside, read_manifest(inside), variant.precision)
        assert answer(beside, manifest, variant.precision).tobytes() == same.tobytes()


@pytest.mark.parametrize("limit", [30_000])
def test_only_what_is_too_large_goes_beside(tmp_path: Path, limit: int) -> None:
    manifest = read_manifest(export_module(stack(), Options("mixed", tmp_path, external_above=limit)))
    assert {v.precision: len(v.data) for v in manifest.variants} == {"fp32": 1, "int8": 0}
    assert next(v.bytes for v in manifest.variants if v.precision == "int8") < 100_000


def test_int8_alone_leaves_no_float_weights(tmp_path: Path) -> None:
    folder = export_module(stack(), Options("int8", tmp_path, precisions=("int8",), external_above=0))
    assert {path.name for path in folder.glob("*.onnx*")} == {"int8-cpu.onnx", "int8-cpu.onnx.data"}


def test_torch_s_weights_are_given_back_before_onnx_runtime_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stack()
    weights = [weakref.ref(parameter.untyped_storage()) for parameter in module.parameters()]
    held: list[int] = []
    opened = session.open_session

    def watched(*arguments: Any) -> Any:
        held.append(sum(weight() is not None for weight in weights))
        return opened(*arguments)

    monkeypatch.setattr(variants, "open_session", watched)
    monkeypatch.setattr(budget, "open_session", watched)
    export_module(module, Options("consumed", tmp_path, external_above=0), consume=True)
    assert set(held) == {0}
    assert all(parameter.numel() == 0 for parameter in module.parameters())


def test_no_other_session_is_open_while_the_float_graph_calibrates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has all weights once more."""
    opened, alive = session.open_session, list[weakref.ref[Any]]()
    together: dict[str, list[int]] = {"variants": [], "calibration": []}

    def watching(where: str) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            together[where].append(sum(other() is not None for other in alive))
            made = opened(*arguments, **options)
            alive.append(weakref.ref(made))
            return made

        return watched

    monkeypatch.setattr(variants, "open_session", watching("variants"))
    monkeypatch.setattr(budget, "open_session", watching("variants"))
    monkeypatch.setattr(calibration, "open_session", watching("calibration"))
    export_module(stack(), Options("x", tmp_path, external_above=0))
    assert together["calibration"]
    assert set(together["calibration"]) == {0}
    assert max(together["variants"]) <= 2  # a file with both numbers of threads, and the float one beside it


def test_weights_computed_from_those_in_a_file_are_in_a_file_too(tmp_path: Path) -> None:
    model = random_ffn(64, 128, 0)
    inside = smoothed(model, tmp_path)
    move_out(model, tmp_path / "m.onnx")
    beside = smoothed(model, tmp_path)
    assert inside
    assert inside.keys() == beside.keys()
    for name, tensor in beside.items():
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.numpy().tobytes() == inside[name].numpy().tobytes()
    assert (tmp_path / f"{SCRATCH}.data").stat().st_size == sum(tensor.nbytes for tensor in beside.values())


def smoothed(model: ir.Model, folder: Path) -> dict[str, ir.TensorProtocol]:
    """The weights that smoothing a copy of `model` changed, but the smallest."""
    copy, widths = model.clone(), activation_widths(model.graph)
    tokens = np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32) * np.geomspace(0.01, 30, 64)
    smooth(copy, Activations(model, widths, [{"tokens": tokens.astype(np.float32)}], folder / "float.onnx"), EIGHT_BIT)
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    weights = {name: value.const_value for name, value in copy.graph.initializers.items()}
    changed = {n: t for n, t in weights.items() if t is not None and n in before and t is not before[n]}
    return {name: tensor for name, tensor in changed.items() if tensor.nbytes > 1024}


def test_what_an_exception_held_is_let_go_while_the_exception_lives(tmp_path: Path) -> None:
    """Of the exceptions that it came from too."""
    array = weakref.ref(np.zeros(8))

    def first() -> None:
        nonlocal array
        weights = np.zeros(8)
        array = weakref.ref(weights)
        raise ValueError

    def second() -> None:
        try:
            first()
        except ValueError as cause:
            raise ProofError("no") from cause

    for name in ("a.onnx", "a.onnx.data", f"{SCRATCH}.onnx", "b.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(ProofError) as held, provisional(tmp_path / "a.onnx"):
        second()
    assert array() is None
    assert held.value.__cause__ is not None
    assert [path.name for path in tmp_path.iterdir()] == ["b.onnx"]


def test_a_module_that_is_not_consumed_keeps_its_weights(tmp_path: Path) -> None:
    module = nn.Linear(32, 32)
    before = module.weight.detach().clone()
    export_module(module, Options("kept", tmp_path, precisions=("fp32",), external_above=0))
    assert torch.equal(module.weight, before)


def test_the_float64_proof_leaves_weights_shared_with_the_module_that_was_passed_in() -> None:
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False).eval()
    packed = pack(module)
    ours = {p.untyped_storage().data_ptr() for p in packed.module.parameters()}
    assert ours == {p.untyped_storage().data_ptr() for p in module.parameters()}


class Tied(nn.Module):
    """Three layers, two of them with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.second.weight = self.first.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.second(torch.relu(self.first(tokens)))))
        return out


@pytest.mark.parametrize("external_above", [0, 1 << 20])
def test_shared_weights_are_stored_once(tmp_path: Path, external_above: int) -> None:
    folder = export_module(Tied(), Options("tied", tmp_path, external_above=external_above))
    manifest = read_manifest(folder)
    assert manifest.parameters == 2 * 48 * 48 + 3 * 48
    assert manifest.architecture["weight_matmuls"] == 3
    fp32 = next(v for v in manifest.variants if v.precision == "fp32")
    assert 4 * manifest.parameters <= fp32.total_bytes < 4 * manifest.parameters + 6000
    matrices = [i for i in onnx.load(folder / fp32.file).graph.initializer if len(i.dims) == 2]
    assert len(matrices) == 2


@pytest.mark.parametrize("damage", ["changed", "absent"])
def test_a_data_file_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path, damage: str) -> None:
    folder = export_module(nn.Linear(32, 32), Options("x", tmp_path, precisions=("fp32",), external_above=0))
    data = folder / "fp32-cpu.onnx.data"
    if damage == "absent":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(BundleError, match=r"fp32-cpu\.onnx\.data: (its SHA-256 is|No such file)"):
        read_manifest(folder)


def test_a_failed_export_leaves_no_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ProofError("no")

    monkeypatch.setattr(variants, "certify", fail)
    with pytest.raises(ProofError):
        export_packed(pack(stack()), Options("x", tmp_path, external_above=0), source={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [-1, 1 << 31])
def test_a_limit_that_protobuf_cannot_hold_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ExportError, match="protobuf's limit"):
        export_module(nn.Linear(2, 2), Options("x", tmp_path, external_above=limit))
