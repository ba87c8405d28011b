from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from export.bundle_folder import bundle_folder
from export.inspection import register
from export.quantize import quantize_int8
from service.manifest import read_manifest
from tests.export.hand_built import random_ffn, write_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    model = random_ffn(16, 64, 0)
    return write_bundle(tmp_path, {"fp32": model, "int8": quantize_int8(model)}, d=16)


def inspect(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_it_shows_shapes_sizes_variants_and_certificates(bundle: Path) -> None:
    result = inspect(bundle)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "demo version 1, position-wise" in shown
    assert "tokens float32 (tokens, 16)" in shown
    assert "out float32 (tokens, 16)" in shown
    assert f"{2 * 16 * 64 + 64 + 16:,}" in shown  # parameters
    assert "1,024 in weight matmuls" in shown
    assert "ffn [by hand]" in shown  # brackets are not markup
    for variant in read_manifest(bundle).variants:
        assert f"{variant.bytes:,}" in shown
    assert "2 quantized, 0" in shown
    assert "0 quantized, 2" in shown
    assert shown.count("exact") == 2


def test_json_is_the_manifest_and_the_bytes_on_disk(bundle: Path) -> None:
    (bundle / "report.md").write_bytes(b"x" * 1000)
    printed = json.loads(inspect(bundle, "--json").stdout)
    total = printed.pop("total_bytes")
    assert printed.pop("arithmetic") is None, "a manifest from before compositions were recorded"
    assert printed == read_manifest(bundle).model_dump(mode="json")
    assert total == sum(path.stat().st_size for path in bundle.iterdir())


def test_a_broken_manifest_is_one_line_that_names_the_field(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text().replace('"d_in": 16', '"d_in": 0')
    (bundle / "manifest.json").write_text(text)
    result = inspect(bundle)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "d_in: Input should be greater than or equal to 1" in result.stderr


def test_the_latest_version_is_the_highest_number_not_the_last_name(tmp_path: Path) -> None:
    for version in ("2", "10", "9"):
        (tmp_path / "m" / version).mkdir(parents=True)
    (tmp_path / "m" / ".11.tmp").mkdir()
    (tmp_path / "m" / "011").mkdir()  # no version is written so
    assert bundle_folder(tmp_path / "m").name == "10"


def test_a_folder_given_by_a_relative_path_has_a_name(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle)
    assert inspect(".").exit_code == 0
