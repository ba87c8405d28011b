"""The details of a whole export: the document, the pages and the plots, and nothing where they fail."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from torch import nn
from typer.testing import CliRunner

import export.pipeline
from export.adapters.random_weights import random_stack
from export.details.document import REPORT_JSON, Details
from export.details.plots import ACTIVE, ERROR, RANGES, draw
from export.inspection import register
from export.pipeline import Options, export_module
from service.manifest import REPORT, file_sha256, read_manifest

D = 16


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    np.save(models / "own.npy", np.random.default_rng(0).standard_normal((6, 20, D), dtype=np.float32))
    options = Options("stack", models, details=True, calibrate=models / "own.npy")
    return export_module(random_stack(D, 2, 2 * D, layers=1), options)


def test_the_document_has_stages_fusions_and_speed_of_both_files(bundle: Path) -> None:
    details = Details.model_validate_json((bundle / REPORT_JSON).read_bytes())
    assert (details.tokens, details.not_measured) == (120, None)
    assert details.source.startswith("own.npy")
    assert len(details.stages) == 8
    assert all(20 < stage.sqnr_db["int8"] <= 300 for stage in details.stages)
    assert [variant.precision for variant in details.variants] == ["fp32", "int8"]
    for variant in details.variants:
        assert variant.fusions
        assert all(fused.holds for fused in variant.fusions)
        assert [speed.tokens for speed in variant.speed] == [64]


def test_every_file_of_the_report_is_hashed_in_the_manifest(bundle: Path) -> None:
    names = {REPORT, REPORT_JSON, ERROR, RANGES, ACTIVE}
    assert read_manifest(bundle).report_sha256 == {name: file_sha256(bundle / name) for name in names}


def test_the_page_shows_them_and_names_only_pictures_that_are_there(bundle: Path) -> None:
    text = (bundle / REPORT).read_text()
    for heading in ("## Layers and stages", "## What fused", "## Speed"):
        assert heading in text
    assert "| 0 FFN1 | blocks.0.ffn.up.weight.T |" in text
    pictures = re.findall(r"\]\(([^)]+\.svg)\)", text)
    assert pictures == [ERROR, RANGES, ACTIVE]
    for name in pictures:
        root = ElementTree.parse(bundle / name).getroot()
        assert root.tag.endswith("svg")


def test_the_same_figures_make_the_same_pictures(bundle: Path, tmp_path: Path) -> None:
    details = Details.model_validate_json((bundle / REPORT_JSON).read_bytes())
    for name in draw(details, tmp_path):
        assert (tmp_path / name).read_bytes() == (bundle / name).read_bytes()


def test_inspect_sums_the_stages_up(bundle: Path) -> None:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)  # else one command alone takes no name
    shown = CliRunner().invoke(app, ["inspect", str(bundle)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "Stages, 120 tokens" in shown.output
    assert "int8: least SQNR" in shown.output


def test_figures_that_are_no_numbers_are_read_back_and_shown(bundle: Path) -> None:
    details = Details.model_validate_json((bundle / REPORT_JSON).read_bytes())
    stage = details.stages[0].model_copy(update={"rms": float("inf"), "sqnr_db": {"int8": float("nan")}})
    text = details.model_copy(update={"stages": [stage]}).model_dump_json()
    (read,) = Details.model_validate_json(text).stages
    assert np.isinf(read.rms)
    assert np.isnan(read.sqnr_db["int8"])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema_version": 2}', b"\xff\xfe"])
def test_inspect_names_a_report_that_cannot_be_read(content: bytes, bundle: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(bundle.parent, tmp_path / bundle.parent.name) / bundle.name
    (copied / REPORT_JSON).write_bytes(content)
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    shown = CliRunner().invoke(app, ["inspect", str(copied)])
    assert shown.exit_code == 1
    assert f"tokenslab inspect: {copied / REPORT_JSON}: " in shown.output


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.LayerNorm(4)], ids=["one matmul", "no matmul"])
def test_the_smallest_modules_have_details_too(module: nn.Module, tmp_path: Path) -> None:
    bundle = export_module(module, Options("small", tmp_path, precisions=("fp32",), details=True), d=4)
    details = Details.model_validate_json((bundle / REPORT_JSON).read_bytes())
    has_matmul = isinstance(module, nn.Linear)
    assert len(details.variants[0].speed) == has_matmul
    assert [stage.stage for stage in details.stages] == (["matmul"] if has_matmul else ["norm"])


def test_without_details_there_are_none_and_a_failure_among_them_leaves_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = random_stack(D, 2, 2 * D, layers=1)
    plain = export_module(stack, Options("plain", tmp_path, precisions=("fp32",)))
    assert not (plain / REPORT_JSON).exists()
    assert not list(plain.glob("*.svg"))

    def fail(*_: object) -> Details:
        raise RuntimeError("no room")

    monkeypatch.setattr(export.pipeline, "measure_details", fail)
    with pytest.raises(RuntimeError, match="no room"):
        export_module(stack, Options("failed", tmp_path, precisions=("fp32",), details=True))
    assert not (tmp_path / "failed").exists()
