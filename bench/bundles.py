"""The bundles that are measured: exported once, by the project's own command, into a folder that git ignores."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from service.manifest import MANIFEST, Manifest, read_manifest


class ExportFailed(Exception):
    """A bundle is missing and could not be exported."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A bundle's name and the arguments of `tokenslab export` that make it."""

    name: str
    arguments: tuple[str, ...]


FFN: Final = Recipe(
    "bench-ffn",
    ("random", "ffn", "--d", "768", "--d-ff", "3072", "--activation", "gelu", "--seed", "0"),
)
THIN: Final = Recipe(  # as wide, and next to nothing to compute: what is left is the wire
    "bench-thin",
    ("random", "ffn", "--d", "768", "--d-ff", "1", "--activation", "gelu", "--seed", "0"),
)
BLOCK: Final = Recipe(
    "bench-block",
    ("random", "block", "--d", "768", "--heads", "12", "--d-ff", "3072", "--activation", "gelu", "--seed", "0"),
)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk; `folder` is <models>/<name>/<version>."""

    folder: Path
    manifest: Manifest

    def model(self, precision: str) -> str:
        """The name under which the service answers for one precision."""
        return f"{self.manifest.name}-{precision}"


def ensure(recipe: Recipe, models: Path) -> Bundle:
    """The bundle of `recipe` under `models`, exported now if it is missing.

    Raises:
        ExportFailed: the export did not succeed; the message says why.
        BundleError: what is there is no sound bundle.
    """
    folder = models / recipe.name / "1"
    if not (folder / MANIFEST).exists():
        command = [sys.executable, "-m", "tokenslab", "export", *recipe.arguments]
        finished = subprocess.run(
            [*command, "--name", recipe.name, "--models", str(models)], capture_output=True, text=True, check=False
        )
        if finished.returncode != 0:
            raise ExportFailed(
                f"{folder} is missing, and exporting it failed (it needs tokenslab[export]):\n"
                f"{finished.stdout[-2000:]}{finished.stderr[-2000:]}"
            )
    return Bundle(folder, read_manifest(folder))
