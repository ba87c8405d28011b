"""A stack in stages: the files in a row give the whole's bits, each stage is proved, and nothing else is written."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from export.adapters.random_weights import random_ffn, random_stack
from export.cutting import cut_out, find_cuts
from export.errors import ExportError, ProofError
from export.graph import to_graph
from export.pipeline import Options, export_module
from export.verification import verify_bundle
from service.manifest import REPORT, Manifest, file_sha256, read_manifest
from service.session import open_session, run_packed

D = 24
SHAPES: dict[str, dict[str, Any]] = {
    "post-norm": {"layers": 3, "place": "post"},
    "pre-norm": {"layers": 3, "place": "pre", "norm": "rmsnorm", "activation": "swiglu", "causal": True, "bias": False},
}


def stack(**kwargs: Any) -> nn.Module:
    return random_stack(D, 3, 2 * D, seed=int(np.random.default_rng().integers(1 << 30)), **kwargs)


@pytest.fixture(scope="module", params=SHAPES)
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("stages")
    # The post-norm one with its weights beside the files, as a stack that is too large for one node has them.
    external_above = 0 if request.param == "post-norm" else Options("any").external_above
    options = Options("whole", models, stages=2, external_above=external_above)
    export_module(stack(**SHAPES[request.param]), options, consume=True)
    return models


def manifests(models: Path) -> list[Manifest]:
    return [read_manifest(models / f"whole-stage{index}of2" / "1") for index in (1, 2)]


def test_the_report_of_the_whole_and_of_each_stage_is_hashed_in_its_own_manifest(bundles: Path) -> None:
    for manifest in (read_manifest(bundles / "whole" / "1"), *manifests(bundles)):
        assert manifest.report_sha256 == {REPORT: file_sha256(bundles / manifest.name / "1" / REPORT)}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_stages_in_a_row_give_the_bits_of_the_whole_on_random_ragged_windows(bundles: Path, precision: str) -> None:
    rng = np.random.default_rng()
    file = f"{precision}-cpu.onnx"
    whole = open_session(bundles / "whole" / "1" / file, "cpu", 1)
    row = [open_session(bundles / m.name / "1" / file, "cpu", 1) for m in manifests(bundles)]
    for _ in range(20):
        lens = rng.integers(1, 30, rng.integers(1, 9)).astype(np.int64)
        tokens = rng.standard_normal((lens.sum(), D), dtype=np.float32) * 10 ** rng.uniform(-2, 2)
        passed = tokens
        for session in row:
            passed = run_packed(session, passed, lens)
        assert passed.tobytes() == run_packed(whole, tokens, lens).tobytes()


def test_a_stage_says_what_it_is_of_and_holds_its_share(bundles: Path) -> None:
    whole = read_manifest(bundles / "whole" / "1")
    first, last = manifests(bundles)
    assert whole.stage is None
    assert first.stage is not None
    assert last.stage is not None
    assert (first.stage.of, first.stage.index, first.stage.count) == ("whole", 1, 2)
    assert first.stage.last_layer + 1 == last.stage.first_layer
    assert last.stage.last_layer == 2
    assert first.stage.whole == last.stage.whole == {v.file: v.sha256 for v in whole.variants}
    assert f"| stage | {last.stage} |" in (bundles / last.name / "1" / REPORT).read_text()
    assert str(last.stage) == f"2 of 2 of whole, layers {last.stage.first_layer} to 2"
    assert first.parameters + last.parameters == whole.parameters
    assert first.flops_per_token + last.flops_per_token == whole.flops_per_token
    assert {v.certificate.kind for m in (first, last) for v in m.variants} == {"exact"}
    for at, variant in enumerate(whole.variants):
        parts = [m.variants[at] for m in (first, last)]
        assert sum(p.quantized_matmuls for p in parts) == variant.quantized_matmuls
        assert [matmul for part in parts for matmul in part.matmuls] == variant.matmuls
        assert sum(p.total_bytes for p in parts) < 1.5 * variant.total_bytes


def test_a_stage_is_verified_like_any_other_bundle(bundles: Path) -> None:
    findings = list(verify_bundle(bundles / "whole-stage2of2" / "1", "cpu", 1, seed=0))
    assert {finding.precision for finding in findings} == {"fp32", "int8", "report"}
    assert [finding for finding in findings if finding.failure is not None] == []


def test_stages_that_give_other_bits_are_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_little(model: ir.Model, cut: Any) -> ir.Model:
        part = cut_out(model, cut)
        bias = next(v for v in part.graph.initializers.values() if v.name is not None and v.name.endswith("norm1.bias"))
        assert bias.const_value is not None
        bias.const_value = ir.tensor(bias.const_value.numpy() + np.float32(1e-7), name=bias.name)
        return part

    monkeypatch.setattr("export.stages.cut_out", off_by_little)
    with pytest.raises(ProofError, match="fp32: the stages in a row give other bits than the whole"):
        export_module(stack(layers=2), Options("whole", tmp_path, precisions=("fp32",), stages=2))
    assert list(tmp_path.iterdir()) == []


def test_no_file_s_session_outlives_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its weights once more: of a stack that is cut because it is large."""
    held = list[weakref.ref[Any]]()
    alive = list[int]()  # where the next file's first session is opened

    def opened(*arguments: Any) -> Any:
        made = open_session(*arguments)
        held.append(weakref.ref(made))
        return made

    def watched(*arguments: Any) -> Any:
        alive.append(sum(each() is not None for each in held))
        return opened(*arguments)

    monkeypatch.setattr("export.variants.open_session", opened)  # the certificate's
    monkeypatch.setattr("export.stages.open_session", watched)
    export_module(stack(layers=2), Options("whole", tmp_path, stages=2))
    assert alive == [0] * (2 * 2 + 2 * 3)  # measured: two stages in two precisions; compared: these and the whole
    assert len(held) > len(alive)


def test_what_cannot_be_cut_is_refused_before_any_file(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="only a stack of Transformer blocks is cut, not FFN"):
        export_module(random_ffn(8, 16, seed=0), Options("ffn", tmp_path, stages=2))
    with pytest.raises(ExportError, match="3 stages: the stack has 2 layers"):
        export_module(stack(layers=2), Options("short", tmp_path, stages=3))
    assert list(tmp_path.iterdir()) == []


def test_layers_that_share_their_weights_are_not_torn_apart() -> None:
    made = stack(layers=2)
    assert isinstance(made.blocks, nn.ModuleList)
    made.blocks[1] = made.blocks[0]
    with pytest.raises(ExportError, match="no place to cut before layer 1"):
        find_cuts(to_graph(made.eval(), "sequence", D), 2, 2)


def test_a_stage_that_exists_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "whole-stage2of2" / "1").mkdir(parents=True)
    with pytest.raises(ExportError, match="whole-stage2of2/1 exists"):
        Options("whole", tmp_path, stages=2).check()
    Options("whole", tmp_path, stages=3).check()
    with pytest.raises(ExportError, match="stages 0: expected at least 1"):
        Options("whole", tmp_path, stages=0).check()
