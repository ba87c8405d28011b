"""docs/own-module.md is run: its file, its command, and what it says about a module that is not what it claims."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from export import cli
from service.manifest import REPORT, read_manifest

PAGE = (Path(__file__).parents[2] / "docs" / "own-module.md").read_text()


def own_file() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return str(code)


def own_command() -> list[str]:
    (command,) = re.findall(r"```\n(tokenslab .*?)\n```", PAGE, re.DOTALL)
    return shlex.split(command)[1:]


@pytest.fixture
def app() -> Typer:
    made = Typer()
    made.callback()(lambda: None)
    cli.register(made)
    return made


def test_the_page_s_file_is_exported_by_the_page_s_command(
    app: Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(own_file())
    result = CliRunner().invoke(app, own_command())
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "build/models/own/1")
    assert (manifest.kind, manifest.d_in, manifest.d_out) == ("sequence", 64, 64)
    assert manifest.architecture["family"] == "gated-block"
    assert {v.certificate.kind for v in manifest.variants} == {"exact"}
    assert {(v.precision, v.quantized_matmuls) for v in manifest.variants} == {("fp32", 0), ("int8", 5)}
    assert "equals the original module, per sequence" in (tmp_path / "build/models/own/1" / REPORT).read_text()


def test_a_packed_form_that_computes_something_else_is_refused(
    app: Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(own_file().replace("return tokens + self.mix(tokens)", "return self.mix(tokens)"))
    result = CliRunner().invoke(app, own_command())
    assert result.exit_code == 1
    assert "GatedBlock does not compute what its weights say" in result.stderr
    assert not Path("build").exists()
