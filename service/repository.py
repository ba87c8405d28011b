"""What is served: models by name and version, and the state of every bundle. Changed on the event loop alone, in one
step each time, so that a reader never sees half a change. Knows nothing of requests, folders or loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal
from weakref import WeakSet

from service.errors import NotFound
from service.model import Model
from service.versions import Found

Key = tuple[str, str]  # name, version
State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the repository index."""

    name: str
    version: str
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """One version of a bundle as it is served: its models by name, and the state of the files they came from."""

    found: Found
    models: dict[str, Model]

    @property
    def bundle(self) -> Key:
        """The bundle's own name and version."""
        model = next(iter(self.models.values()))
        return model.manifest.name, model.version


class Repository:
    """All models that are served, by name and version; one model may have two names."""

    def __init__(self, loaded: Iterable[Loaded] = ()) -> None:
        self._loaded: dict[Key, Loaded] = {}
        self._models: dict[Key, Model] = {}
        self._versions: dict[str, tuple[str, ...]] = {}
        self._remarks: dict[Key, tuple[State, str]] = {}
        self._alive: WeakSet[Model] = WeakSet()  # those that still answer their last requests too
        self._watchers: list[Callable[[], None]] = []
        self.swap(loaded, ())

    def versions(self, name: str) -> tuple[str, ...]:
        """All versions that are served under `name`, oldest first."""
        return self._versions[name]

    def get(self, name: str, version: str | None = None) -> Model:
        """The model, its latest version unless one is named; raises NotFound with what there is."""
        if name not in self._versions:
            raise NotFound(f"unknown model {name[:80]!r}; served: {', '.join(self._versions) or 'none'}")
        model = self._models.get((name, self._versions[name][-1] if version is None else version))
        if model is None:
            raise NotFound(
                f"model {name!r} has no version {str(version)[:20]!r} here; served: {', '.join(self._versions[name])}"
            )
        return model

    def __iter__(self) -> Iterator[tuple[str, Model]]:
        return iter((name, self._models[name, version]) for name, version in sorted(self._models, key=_order))

    def loaded(self, bundle: str) -> dict[int, Loaded]:
        """The versions of `bundle` that are served, oldest first."""
        found = {int(version): held for (name, version), held in self._loaded.items() if name == bundle}
        return dict(sorted(found.items()))

    def bundles(self) -> set[str]:
        """Names of the bundles of which something is served."""
        return {name for name, _ in self._loaded}

    def memory_bytes(self) -> int:
        """What all models take that are served, or were and are still held."""
        return sum(model.memory_bytes for model in self._alive)

    def models(self) -> set[Model]:
        """Every model that is served, once."""
        return set(self._models.values())

    def clashes(self, fresh: Loaded) -> str | None:
        """A name that `fresh` would take from another bundle, as text; None if there is none."""
        owners = {name: held.bundle[0] for held in self._loaded.values() for name in held.models}
        for name in fresh.models:
            owner = owners.get(name, fresh.bundle[0])
            if owner != fresh.bundle[0]:
                return f"its model {name!r} clashes with one of {owner}: rename one of them"
        return None

    def swap(self, fresh: Iterable[Loaded], gone: Iterable[Key]) -> list[Model]:
        """Serve `fresh`, in place of the same versions of the same bundles, and no longer the bundles `gone`.

        Returns the models that are not served any more, each once.
        """
        before = self.models()
        for key in gone:
            del self._loaded[key]
            self._remarks.pop(key, None)
        for held in fresh:
            self._loaded[held.bundle] = held
            self._alive.update(held.models.values())
            self._remarks.pop(held.bundle, None)
        self._models = {
            (name, version): model for (_, version), held in self._loaded.items() for name, model in held.models.items()
        }
        versions: dict[str, tuple[str, ...]] = {}
        for name, version in sorted(self._models, key=_order):
            versions[name] = (*versions.get(name, ()), version)
        self._versions = versions
        for watcher in self._watchers:
            watcher()
        return list(before - self.models())

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every swap: who keeps what `get` returned must ask again."""
        self._watchers.append(changed)

    def remark(self, bundle: str, version: str, state: State, reason: str = "") -> None:
        """State that a version of a bundle is not simply ready."""
        self._remarks[bundle, version] = state, reason

    def clear_remark(self, bundle: str, version: str, state: State) -> bool:
        """It is no longer in `state`; False if it was not any more."""
        remark = self._remarks.get((bundle, version))
        if remark is None or remark[0] != state:
            return False
        del self._remarks[bundle, version]
        return True

    def forget_remarks(self, present: Iterable[Key]) -> None:
        """Say nothing more of bundles that are neither served nor among those `present`."""
        for key in self._remarks.keys() - self._loaded.keys() - set(present):
            if self._remarks[key][0] == "UNAVAILABLE":
                del self._remarks[key]

    def index(self) -> list[Row]:
        """Every name that is served, and every bundle that is loading, unloading or failed, with the reason."""
        rows = []
        for name, model in self:
            _, reason = self._remarks.get((model.manifest.name, model.version), ("READY", ""))
            rows.append(Row(name, model.version, "READY", reason))
        rows += [
            Row(name, version, state, reason)
            for (name, version), (state, reason) in self._remarks.items()
            if (name, version) not in self._loaded
        ]
        return sorted(rows, key=lambda row: _order((row.name, row.version)))


def _order(key: Key) -> tuple[str, int]:
    return key[0], int(key[1])
