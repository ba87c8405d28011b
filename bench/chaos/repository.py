"""A model repository of the shipped bundles for a server to change under load, and versions of them to change it with.

A version's weights are those of version 1 with every bias rolled: other answers, and the certificate still holds. All
are made beforehand in a hidden folder; a version comes and goes by rename, as exports do.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from service.manifest import MANIFEST, Manifest, file_sha256, read_manifest

STAGE: Final = ".made"
GUEST: Final = "guest"  # comes and goes by load and unload
BROKEN: Final = "broken"  # can never be served


@dataclass(frozen=True, slots=True)
class Made:
    """One version of a bundle in the stage, or where the server looks for it."""

    root: Path
    manifest: Manifest

    @property
    def staged(self) -> Path:
        return self.root / STAGE / self.manifest.name / str(self.manifest.version)

    @property
    def served(self) -> Path:
        return self.root / self.manifest.name / str(self.manifest.version)

    @property
    def folder(self) -> Path:
        """Where it lies now."""
        return self.served if self.served.exists() else self.staged

    def show(self) -> None:
        """Put it where the server looks, in one step."""
        self.served.parent.mkdir(exist_ok=True)
        os.rename(self.staged, self.served)

    def hide(self) -> None:
        """Take it away again."""
        os.rename(self.served, self.staged)


def make_repository(source: Path, root: Path, versions: int) -> list[Made]:
    """Version 1 of every bundle in `source`, shown; versions 2 to `versions`, a guest and a broken bundle, staged.

    Raises:
        BundleError: a bundle in `source` is not sound.
    """
    made = []
    folders = sorted(path.parent for path in source.glob(f"*/1/{MANIFEST}"))
    for folder in folders:
        manifest = read_manifest(folder)
        made += [_make(folder, root, manifest.name, version) for version in range(1, versions + 1)]
        made[-versions].show()
    made.append(_make(folders[0], root, GUEST, 1))
    made[-1].show()
    broken = _make(folders[0], root, BROKEN, 1)
    with (broken.staged / broken.manifest.variants[0].file).open("ab") as file:
        file.write(b"more than its hash says")
    return [*made, broken]


def _make(folder: Path, root: Path, name: str, version: int) -> Made:
    manifest = read_manifest(folder)
    target = root / STAGE / name / str(version)
    shutil.copytree(folder, target)
    variants = []
    for variant in manifest.variants:
        path = target / variant.file
        if name != manifest.name or version != 1:
            _roll_biases(path, version)
        variants.append(variant.model_copy(update={"sha256": file_sha256(path), "bytes": path.stat().st_size}))
    manifest = manifest.model_copy(update={"name": name, "version": version, "variants": variants})
    (target / MANIFEST).write_text(manifest.model_dump_json())
    return Made(root, manifest)


def _roll_biases(path: Path, steps: int) -> None:
    model = onnx.load(path)
    for initializer in model.graph.initializer:
        if initializer.name.endswith(".bias"):
            rolled = np.roll(numpy_helper.to_array(initializer), steps)
            initializer.CopyFrom(numpy_helper.from_array(rolled, initializer.name))
    onnx.save(model, path)
