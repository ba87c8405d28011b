"""docs/load-testing.md: its commands run, and wrk and locust (`make recipes-test`) load the service by its recipes."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import typer
from typer.testing import CliRunner

import bench.cli
import bench.loadtest.sweep
from bench.server import Server

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "load-testing.md").read_text()
LOCUST = ROOT / "build" / "locust" / "bin" / "locust"
COMMANDS = re.findall(r"^tokenslab bench load (.*)$", PAGE, re.MULTILINE)
QUICK = ("--seconds", "0.3", "--warm-up", "0", "--rounds", "1", "--threads", "1", "--processes", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(ROOT / "models", 1, tmp_path_factory.mktemp("logs") / "server.log") as running:
        yield running


def block(language: str, containing: str = "") -> str:
    found: list[str] = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text]
    return found[0]


def test_the_commands_of_the_page_run_in_their_order(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is shortened, and asks the tests' server in place of one of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.loadtest.sweep, "LIMIT_S", 0.02)
    (tmp_path / "models").symlink_to(ROOT / "models")
    app = typer.Typer()
    bench.cli.register(app)
    assert len(COMMANDS) == 4
    for line in COMMANDS:
        words = line.replace("--serve models", f"--url {server.url}")
        words = words.replace("http://127.0.0.1:8000", server.url)
        loose = ("--latency-tolerance", "1e9", "--tolerance", "1") if "--ci" in words else ()
        done = CliRunner().invoke(app, ["bench", "load", *shlex.split(words), *QUICK, *loose])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "build" / "load.html").exists()


def test_the_sweep_of_windows_of_the_page_recommends_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, with a server of its own; shortened."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench.loadtest.sweep, "LIMIT_S", 0.02)
    (tmp_path / "models").symlink_to(ROOT / "models")
    app = typer.Typer()
    bench.cli.register(app)
    (line,) = re.findall(r"^tokenslab (bench windows .*)$", PAGE, re.MULTILINE)
    done = CliRunner().invoke(app, [*shlex.split(line), *QUICK])
    assert done.exit_code == 0, done.output
    assert "recommended: max_window_tokens" in done.output
    assert (tmp_path / "build" / "windows.html").exists()


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_the_recipe_for_wrk_is_answered(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "make.py").write_text(block("python", "body.npy"))
    runpy.run_path(str(tmp_path / "make.py"))
    (tmp_path / "infer.lua").write_text(block("lua"))
    (line,) = re.findall(r"^wrk .*$", PAGE, re.MULTILINE)
    words = line.replace("http://127.0.0.1:8000", server.url).replace("-d5s", "-d1s")
    before = server.counts()["tokenslab_requests_total"]
    done = subprocess.run(shlex.split(words), capture_output=True, text=True, timeout=30, check=True)
    assert "Non-2xx" not in done.stdout
    assert server.counts()["tokenslab_requests_total"] > before


@pytest.mark.skipif(not LOCUST.exists(), reason="make recipes-test installs locust: it patches whatever imports it")
def test_the_recipe_for_locust_is_answered(server: Server, tmp_path: Path) -> None:
    (tmp_path / "locustfile.py").write_text(block("python", "from locust"))
    (line,) = re.findall(r"^locust .*$", PAGE, re.MULTILINE)
    words = shlex.split(line.replace("http://127.0.0.1:8000", server.url).replace("10s", "2s"))
    before = server.counts()["tokenslab_requests_total"]
    done = subprocess.run(
        [str(LOCUST), *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr  # 1 if any request failed
    assert server.counts()["tokenslab_requests_total"] > before


def test_locusts_request_is_one_that_the_service_answers(server: Server) -> None:
    """locust itself brings an interpreter-wide monkey patch, so only its request is sent here."""
    tree = ast.parse(block("python", "locust"))
    (assigned,) = [node for node in tree.body if isinstance(node, ast.Assign)]
    space: dict[str, object] = {}
    exec(compile(ast.Module([assigned], []), "locustfile.py", "exec"), space)
    body = json.dumps({"inputs": [space["TOKENS"]]}).encode()
    request = Request(server.infer_url("demo-ffn"), body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as answer:
        assert json.load(answer)["outputs"][0]["shape"] == [16, 64]
