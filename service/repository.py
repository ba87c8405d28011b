"""The model repository: bundles on disk -> what is served under which name and version. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from service.errors import BundleError, NotFound
from service.loading import load_bundle
from service.manifest import MANIFEST, NAME, RESERVED
from service.model import Model
from service.settings import Settings


class Repository:
    """All models that are served, by name and version; one model may have two names."""

    def __init__(self, models: dict[tuple[str, str], Model]) -> None:
        self._models = models
        self._versions: dict[str, tuple[str, ...]] = {}
        for name, version in sorted(models, key=_order):
            self._versions[name] = (*self._versions.get(name, ()), version)

    def versions(self, name: str) -> tuple[str, ...]:
        """All versions that are served under `name`, oldest first."""
        return self._versions[name]

    def get(self, name: str, version: str | None = None) -> Model:
        """The model, its latest version unless one is named; raises NotFound with what there is."""
        if name not in self._versions:
            raise NotFound(f"unknown model {name[:80]!r}; served: {', '.join(self._versions)}")
        model = self._models.get((name, self._versions[name][-1] if version is None else version))
        if model is None:
            raise NotFound(
                f"model {name!r} has no version {str(version)[:20]!r} here; served: {', '.join(self._versions[name])}"
            )
        return model

    def __iter__(self) -> Iterator[tuple[str, Model]]:
        return iter((name, self._models[name, version]) for name, version in sorted(self._models, key=_order))


def _order(key: tuple[str, str]) -> tuple[str, int]:
    return key[0], int(key[1])


def load_repository(settings: Settings) -> Repository:
    """Load, check and warm up every bundle under `settings.models`.

    Raises:
        BundleError: names the file that cannot be served and why; nothing is served then.
        ProviderError: the execution provider is not the one that was asked for.
    """
    try:
        return _load(settings)
    except OSError as cause:
        raise BundleError(f"{cause.filename}: {cause.strerror}") from cause


def _load(settings: Settings) -> Repository:
    root = settings.models
    if not root.is_dir():
        raise BundleError(f"{root.absolute()}: the model repository is not a folder")
    models: dict[tuple[str, str], Model] = {}
    owners: dict[str, Path] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        versions = _versions(folder)
        for version in versions if settings.versions == "all" else versions[-1:]:
            for name, model in load_bundle(folder / str(version), settings).items():
                owner = owners.setdefault(name, folder)
                if owner != folder:
                    raise BundleError(f"{folder}: its model {name!r} clashes with one of {owner}: rename one of them")
                models[name, model.version] = model
    if not models:
        raise BundleError(f"{root.absolute()}: no bundle in it (looked for <name>/<version>/{MANIFEST})")
    return Repository(models)


def _versions(folder: Path) -> list[int]:
    if not NAME.fullmatch(folder.name) or folder.name in RESERVED:
        raise BundleError(f"{folder}: not a model name (expected {NAME.pattern}, and not {', '.join(RESERVED)})")
    versions = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue  # an export under way
        if not (path.is_dir() and path.name.isascii() and path.name.isdigit() and str(int(path.name)) == path.name):
            raise BundleError(f"{path}: not a version folder (expected a whole number)")
        versions.append(int(path.name))
    if not versions:
        raise BundleError(f"{folder}: no version folder in it")
    return sorted(versions)
