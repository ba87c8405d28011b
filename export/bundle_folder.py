"""What a user types -> the folder of one bundle: `models/demo-ffn/1`, or `models/demo-ffn` for its latest version."""

from __future__ import annotations

import os
import re
from pathlib import Path

from service.errors import BundleError
from service.manifest import MANIFEST


def bundle_folder(path: Path) -> Path:
    """The absolute folder that holds the manifest: `path` itself, else the highest version in it.

    Raises:
        BundleError: there is neither a manifest nor a version.
    """
    path = Path(os.path.abspath(path))  # not resolve(): a link may name the bundle
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        raise BundleError(f"{path}: no such bundle (expected <models>/<name> or <models>/<name>/<version>)")
    try:
        names = [child.name for child in path.iterdir()]
    except OSError as cause:
        raise BundleError(f"{path}: {cause.strerror}") from cause
    versions = [int(name) for name in names if re.fullmatch(r"[1-9][0-9]*", name)]
    if not versions:
        bundles = sorted(child.parent.parent.name for child in path.glob(f"*/*/{MANIFEST}"))
        named = f"; its bundles are {', '.join(dict.fromkeys(bundles))}" if bundles else ""
        raise BundleError(f"{path}: neither {MANIFEST} nor a version folder in it{named}")
    return path / str(max(versions))
