"""The console script: what it lists, and what it says when an extra is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def run(*words: str, code: str = "from tokenslab import main; main()") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.argv = ['tokenslab', *{words!r}]; {code}"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, check=False)


def test_the_version_is_the_distributions() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, version("tokenslab"))


def test_help_lists_every_command_and_loads_no_torch() -> None:
    loaded = "print([m for m in ('torch', 'onnx', 'transformers') if m in sys.modules])"
    done = run("--help", code=f"from tokenslab import main\ntry: main()\nexcept SystemExit: {loaded}")
    for command in ("serve", "export", "inspect", "verify", "bench"):
        assert command in done.stdout
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize(("command", "missing", "extra"), [("export", "torch", "export"), ("serve", "pydantic", "cpu")])
def test_a_missing_extra_is_named(command: str, missing: str, extra: str) -> None:
    hide = f"sys.modules[{missing!r}] = None"
    done = run(
        command,
        *(["module", "x:y", "--name", "z"] if command == "export" else []),
        code=f"{hide}\nfrom tokenslab import main; main()",
    )
    assert done.returncode == 2
    assert f"pip install 'tokenslab[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_closed_standard_streams_are_no_file_that_is_opened_later(closed: str) -> None:
    models = Path(__file__).parents[1] / "models"
    shut = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {shut}', "sh", sys.executable, "-m", "tokenslab", "inspect", str(models / "demo-ffn")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("demo-ffn version 1" in done.stdout) == ("1" not in closed)
