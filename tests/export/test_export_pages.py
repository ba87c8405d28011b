"""README.md and docs/quick-start.md: what they export, inspect and verify, in their own words and their own order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from export import cli, inspection, verification
from service.manifest import read_manifest
from service.versions import bundle_folders
from tests.commands import ROOT, blocks

README = [block.removeprefix(".venv/bin/") for block in blocks("README.md")]
QUICK_START = blocks("docs/quick-start.md")


def of_files(page: list[str]) -> list[list[str]]:
    """The words of the commands that need no service."""
    commands = [shlex.split(block) for block in page]
    return [words for words in commands if words[:1] == ["tokenslab"] and words[1] != "serve"]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typer:
    """The commands, in a folder with the page's own nets.py."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/quick-start.md").read_text(), re.DOTALL)
    Path("nets.py").write_text(code)
    made = Typer()
    made.callback()(lambda: None)
    for module in (cli, inspection, verification):
        module.register(made)
    return made


def run(app: Typer, words: list[str]) -> str:
    narrow = {"768": "32", "3072": "64"}  # of the trial: the same, in less time
    details = ["--no-details"] if words[1] == "export" else []
    done = CliRunner().invoke(app, [narrow.get(word, word) for word in words[1:]] + details)
    assert done.exit_code == 0, (words, done.output)
    return done.output


def test_the_readmes_module_is_exported_shown_and_verified(app: Typer) -> None:
    commands = of_files(README)
    assert [words[1] for words in commands] == ["export", "inspect", "verify"]
    said = [run(app, words) for words in commands]
    assert read_manifest(Path("build/models/mine/1")).d_in == 64
    assert "exact" in said[1]
    assert "certificate" in said[2]


def test_the_quick_starts_commands_leave_the_repository_that_it_serves(app: Typer, tmp_path: Path) -> None:
    commands = of_files(QUICK_START)
    assert [words[1] for words in commands] == ["export", "inspect", "verify", "export"]
    for words in commands:
        run(app, words)
    (copy,) = [shlex.split(block) for block in QUICK_START if block.startswith("cp ")]
    assert copy[:2] == ["cp", "-r"]
    named = {Path(path).name for path in copy[2:-1]}
    assert all((ROOT / path).is_dir() for path in copy[2:-1])
    (serve,) = [shlex.split(block) for block in QUICK_START if block.startswith("tokenslab serve")]
    assert Path(serve[-1]) == Path(copy[-1])
    assert {folder.name for folder in bundle_folders(tmp_path / serve[-1])} == {"trial", "mine"}
    assert named == {"demo-ffn", "demo-block"}
