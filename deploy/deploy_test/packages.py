"""Wheels that are only read, never installed: where others publish the types of their resources. Knows no resource."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class PackageMissing(Exception):
    """The package cannot be had here, so what needs it cannot be run; the message has pip's last word."""


def fetch(package: str, folder: Path) -> Path:
    """The wheel of `package`, a name with its version, without what it depends on. Raises PackageMissing."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(  # noqa: S603 - our own words
        [*command, "--disable-pip-version-check", "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise PackageMissing(f"{package} cannot be downloaded: {last}")
    (wheel,) = folder.glob("*.whl")
    return wheel
