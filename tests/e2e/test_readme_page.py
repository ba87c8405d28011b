"""README.md: its service, its curl and its client, as they stand there, with the bundles that the repository ships."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import shell
from tests.e2e.server import Server, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    program, command, flag, models, *more = shell("README.md", ".venv/bin/tokenslab serve").split()
    assert (program, command, flag) == (".venv/bin/tokenslab", "serve", "--models")
    with serving(ROOT / models, *more, "--threads", "1") as running:
        yield running


def block(language: str, server: Server) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    port = f"127.0.0.1:{server.port}"
    found: str = text.replace("127.0.0.1:8000", port)
    assert port in found
    return found


def test_the_curl_of_the_readme_is_answered(server: Server) -> None:
    done = subprocess.run(["bash", "-ec", block("sh", server)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "HTTP/1.1 200" in done.stdout
    assert 'window;desc="5"' in done.stdout


def test_the_client_of_the_readme_prints_its_shape(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python", server)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(5, 64)\n"


def test_every_file_that_the_table_of_promises_names_exists() -> None:
    table = PAGE.split("## What is promised")[1].split("\n\n")[0]
    named = re.findall(r"`(tests/[\w/.]+)`", table)
    assert len(named) > 4
    for path in named:
        assert (ROOT / path).exists(), path
