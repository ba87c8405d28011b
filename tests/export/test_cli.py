"""`tokenslab export`: examples in the help, one line for a fault, a path for a bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from export import cli
from service.manifest import read_manifest

runner = CliRunner()


@pytest.fixture
def app() -> Typer:
    made = Typer()
    made.callback()(lambda: None)
    cli.register(made)
    return made


@pytest.mark.parametrize(
    "words",
    [
        *(["module"], ["bert"], ["vit"], ["llama"], ["mixtral"], ["gpt2"], ["t5"], ["t5-decoder"], ["switch"]),
        *(["random", "ffn"], ["random", "block"]),
    ],
    ids=" ".join,
)
def test_help_has_an_example(app: Typer, words: list[str]) -> None:
    result = runner.invoke(app, ["export", *words, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert "--name" in result.output


def test_help_does_not_load_torch() -> None:
    code = "import sys, tokenslab; sys.argv = ['tokenslab', 'export', 'random', 'ffn', '--help']\n"
    code += "try: tokenslab.main()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_random_block_is_exported_and_its_path_printed(app: Typer, tmp_path: Path) -> None:
    words = ["export", "random", "block", "--d", "8", "--heads", "2", "--d-ff", "16", "--name", "b", "--seed", "3"]
    words += ["--models", str(tmp_path), "--precision", "fp32", "--no-bias", "--norm-place", "pre", "--causal"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "b" / "1")
    assert "certify" in result.stderr
    manifest = read_manifest(tmp_path / "b" / "1")
    assert (manifest.architecture["causal"], manifest.architecture["norm_place"]) == (True, "pre")
    assert manifest.source["seed"] == "3"
    again = runner.invoke(app, words)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr.splitlines()[-1] == (
        f"tokenslab export: {tmp_path / 'b' / '1'} exists: pass --version for another, or --overwrite"
    )


@pytest.mark.parametrize(
    ("target", "said"), [("absent.py:make", "absent.py: no such file"), ("nets.py", "expected path")]
)
def test_a_target_that_is_none_is_refused_before_torch_is_loaded(tmp_path: Path, target: str, said: str) -> None:
    code = f"import sys, tokenslab; sys.argv = ['tokenslab', 'export', 'module', {target!r}, '--name', 'x']\n"
    code += "try: tokenslab.main()\nexcept SystemExit as end: sys.exit(7 if 'torch' in sys.modules else end.code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert said in done.stderr


def test_a_file_s_factory_is_exported_with_its_hash(app: Typer, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("from torch import nn\ndef make(): return nn.Linear(4, 3)\n")
    words = ["export", "module", f"{tmp_path / 'nets.py'}:make", "--name", "lin", "--models", str(tmp_path / "models")]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "models" / "lin" / "1")
    assert manifest.d_out == 3
    assert {"factory", "class", "factory_sha256"} <= set(manifest.source)
    assert {v.precision for v in manifest.variants} == {"fp32", "int8"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["module", "nowhere.py:make", "--name", "x"], "nowhere.py: no such file"),
        (["module", "nowhere", "--name", "x"], "expected path/to/file.py:factory"),
        (["bert", "weights.bin", "config.json", "--name", "x"], "config.json: No such file"),
        (["random", "ffn", "--d", "4", "--d-ff", "4", "--name", "x-fp32"], "ends in '-fp32'"),
        (["random", "ffn", "--d", "4", "--d-ff", "4", "--name", "x", "--activation", "y"], "activation 'y'"),
        (["random", "block", "--d", "4", "--d-ff", "4", "--heads", "3", "--name", "x"], "num_heads 3 does not divide"),
    ],
)
def test_a_fault_is_one_line_on_stderr_and_exit_code_1(
    app: Typer, tmp_path: Path, words: list[str], message: str
) -> None:
    result = runner.invoke(app, ["export", *words, "--models", str(tmp_path / "models")])
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("tokenslab export: ")
    assert message in last
    assert "Traceback" not in result.output
    assert not (tmp_path / "models").exists()
