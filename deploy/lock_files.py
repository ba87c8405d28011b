"""Make deploy/lock/<extra>.txt: what an image installs, resolved at the pins of constraints.txt, with hashes.

uv resolves, from the index that pip's users have; it is not needed to install. Standard library alone.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy" / "lock"
EXTRAS = ("cpu", "cuda")
UV = ROOT / "build" / "uv" / "bin" / "uv"
HEADER = (
    "# What the image with the extra `{extra}` installs, with the hash of every file that pip may take. "
    "Made by `make lock`.\n"
)


def wanted(extra: str) -> list[str]:
    """The requirements of the service with `extra`, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"][extra]]


def lock(extra: str) -> str:
    """The lock file's text. Raises CalledProcessError."""
    command = [str(UV), "pip", "compile", "--quiet", "-", "--constraint", str(ROOT / "constraints.txt")]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu", "--only-binary", ":all:"]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    done = subprocess.run(command, input="\n".join(wanted(extra)), check=True, capture_output=True, text=True)  # noqa: S603 - our own words
    return HEADER.format(extra=extra) + done.stdout


def main() -> int:
    """Write both."""
    LOCK.mkdir(exist_ok=True)
    for extra in EXTRAS:
        (LOCK / f"{extra}.txt").write_text(lock(extra))
    return 0


if __name__ == "__main__":
    sys.exit(main())
