"""Which bundles lie in a model repository, and which of their versions are to be served. Reads names and file states;
opens no model.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from service.errors import BundleError
from service.manifest import MANIFEST, NAME, RESERVED, manifest_bytes


@dataclass(frozen=True, slots=True)
class Found:
    """A version folder and the state of its files: the same `fingerprint` means that nothing in it has changed."""

    folder: Path
    fingerprint: str


Versions = dict[int, Found]  # ascending


def bundle_folders(root: Path) -> list[Path]:
    """Every folder of `root`, by name; names that begin with a dot are exports under way.

    Raises:
        BundleError: `root` is no folder, or a bundle, or cannot be read.
    """
    if not root.is_dir():
        raise BundleError(f"{root.absolute()}: the model repository is not a folder")
    try:
        for path in (root, *_visible(root)):
            if (path == root or path.name.isdigit()) and (path / MANIFEST).is_file():
                above = root.absolute().parents[1 if path == root else 0]
                raise BundleError(f"{root.absolute()}: a bundle, not a model repository; did you mean {above}?")
        return sorted(path for path in _visible(root) if path.is_dir())
    except OSError as cause:
        raise BundleError(f"{cause.filename}: {cause.strerror}") from cause


def scan_bundle(folder: Path) -> Versions:
    """The versions of one bundle; none if the folder is empty or not there.

    Raises:
        BundleError: its name is none, something in it is not a version folder, or it cannot be read.
    """
    if not NAME.fullmatch(folder.name) or folder.name in RESERVED:
        raise BundleError(f"{folder}: not a model name (expected {NAME.pattern}, and not {', '.join(RESERVED)})")
    versions: Versions = {}
    try:
        for path in _visible(folder):
            name = path.name
            if not (path.is_dir() and name.isascii() and name.isdigit() and str(int(name)) == name):
                raise BundleError(f"{path}: not a version folder (expected a whole number)")
            with suppress(FileNotFoundError):  # taken away meanwhile
                versions[int(name)] = Found(path, _fingerprint(path))
    except FileNotFoundError:  # the bundle was never there, or was taken away
        return {}
    except OSError as cause:
        raise BundleError(f"{cause.filename}: {cause.strerror}") from cause
    return dict(sorted(versions.items()))


def chosen(policy: str, versions: Versions) -> Versions:
    """The versions that `policy` serves: `latest`, `all`, or those that it names, as in `2,5`."""
    if policy == "all":
        return versions
    if policy == "latest":
        latest = max(versions)
        return {latest: versions[latest]}
    named = {int(version) for version in policy.split(",")}
    return {version: found for version, found in versions.items() if version in named}


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _fingerprint(folder: Path) -> str:
    """Of the manifest's bytes and every visible file's name, size and time: cheap enough to take at every poll.

    A file under way (its name begins with a dot), an editor's lock and a link to nothing are no part of a version.
    """
    digest = hashlib.sha256()
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            with suppress(FileNotFoundError):
                state = entry.stat()
                digest.update(f"{entry.name}/{state.st_size}/{state.st_mtime_ns}\n".encode())
    with suppress(FileNotFoundError):
        digest.update(manifest_bytes(folder / MANIFEST))
    return digest.hexdigest()
