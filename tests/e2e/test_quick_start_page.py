"""docs/quick-start.md: its requests, as they stand there. Its exports: tests/export/test_export_pages.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.server import serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quick-start.md").read_text()


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
