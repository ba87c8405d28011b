"""docs/quick-start.md: its requests, as they stand there, and where each page's commands are run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.server import serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quick-start.md").read_text()

# Who runs the blocks of a page; a block that nobody runs is here with its reason.
RUN_BY = {
    "README.md": "tests/e2e/test_readme_page.py; demo, export and verify take minutes: tested in parts",
    "docs/quick-start.md": "its requests here; its exports take minutes: tests/export has their like",
    "docs/load-testing.md": "tests/bench/loadtest/test_page_of_docs.py; k6 and perf_analyzer are not run, as it says",
    "docs/operations.md": "tests/e2e/test_operations_page.py",
    "docs/own-module.md": "tests/export/test_own_module_page.py",
    "docs/wire.md": "tests/e2e/test_wire_page.py",
    "docs/deployment.md": "not run by a test: they need a cluster or an engine; make deploy-test has its part",
    "docs/scaling.md": "not run by a test here: they need Ray, installed apart; make ray-test has its part",
}


def test_every_page_with_commands_says_here_who_runs_them() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    with_blocks = {str(page.relative_to(ROOT)) for page in pages if "```" in page.read_text()}
    assert with_blocks <= RUN_BY.keys()
    for who in RUN_BY.values():
        for path in re.findall(r"tests/[\w/]+\.py", who):
            assert (ROOT / path).exists(), path


def test_the_requests_of_the_page_are_answered(tmp_path: Path) -> None:
    """The exported `trial` stands aside for a bundle that the repository ships."""
    (text,) = re.findall(r"```\n(\.venv/bin/python .*?)```", PAGE, re.DOTALL)
    (tmp_path / "build").mkdir()
    with serving(ROOT / "models", "--threads", "1") as server:
        here = text.replace(".venv/bin/python", sys.executable).replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        here = here.replace("/trial/", "/demo-ffn/").replace("768", "64")
        done = subprocess.run(
            ["bash", "-ec", here], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert '"outputs"' in done.stdout, done.stdout
    assert (tmp_path / "build/out.npy").read_bytes().startswith(b"\x93NUMPY")
