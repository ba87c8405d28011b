"""Loading and unloading while the service runs: on demand, and by looking at the folder every so often.

A version warms up before it takes over, and the one it replaces goes only when its last request is answered. What
fails changes nothing that is served; the reason stands in the index. One load at a time, off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from service.background import in_thread
from service.errors import BundleError, LoadFailed, NotFound, ProviderError, RoomError
from service.model import Model
from service.repository import Key, Loaded, Repository
from service.settings import Settings
from service.versions import Found, Versions, bundle_folders, chosen, scan_bundle

log = logging.getLogger("tokenslab.repository")

Load = Callable[[Found], Loaded]


class ModelControl:
    """The only one that changes the repository. All methods run on the event loop's thread."""

    def __init__(
        self,
        repository: Repository,
        settings: Settings,
        load: Load,
        retire: Callable[[Model], Awaitable[None]],
    ) -> None:
        self._repository = repository
        self._root = settings.models
        self._policy = settings.versions
        self._load_bundle = load
        self._retire = retire
        self._lock = asyncio.Lock()
        self._pinned: dict[str, set[int]] = {}  # versions that were asked for beside the policy's
        self._withdrawn: set[str] = set()  # bundles that were unloaded, until they are asked for again
        self._failed: dict[Key, str] = {}  # fingerprints that are not tried again by polling
        self._said: dict[Key, str] = {}  # why a version could not be loaded, as the log has it
        self._seen: dict[Key, str] = {}  # fingerprints at the last poll
        self._absent: set[Key] = set()  # what is served and was not on disk at the last poll
        self._leaving: set[asyncio.Task[None]] = set()

    async def load(self, name: str, version: int | None = None) -> None:
        """Serve the versions of bundle `name` that the policy chooses, and `version` too if one is named.

        Versions that are served and whose files have not changed stay as they are.

        Raises:
            NotFound: there is no such bundle, or not that version of it.
            LoadFailed: a version cannot be served; what was served before still is.
        """
        async with self._lock:
            versions = await self._on_disk(name)
            if version is not None and version not in versions:
                raise NotFound(f"{name!r} has no version {version}; in its folder: {', '.join(map(str, versions))}")
            if version is not None:
                self._pinned.setdefault(name, set()).add(version)
            self._withdrawn.discard(name)
            wanted = self._wanted(name, versions)
            if not wanted:
                raise NotFound(f"{name!r} has versions {', '.join(map(str, versions))}, none of {self._policy}")
            failures = await self._serve(name, wanted, self._stale(name, wanted))
        if failures:
            raise LoadFailed("; ".join(failures))

    async def unload(self, name: str) -> None:
        """Take no more requests for bundle `name`, answer those that were accepted, and free its sessions.

        Raises:
            NotFound: it is not served.
        """
        async with self._lock:
            held = self._repository.loaded(name)
            if not held:
                raise NotFound(
                    f"no bundle {name[:80]!r} is served; served: {', '.join(sorted(self._repository.bundles()))}"
                )
            self._withdrawn.add(name)
            self._pinned.pop(name, None)
            leaving = self._leave(self._repository.swap((), [one.bundle for one in held.values()]), "unloaded")
            log.info("unloading %s", name)
        await leaving

    async def resize_windows(self, tokens: int) -> None:
        """Serve every model with windows of at most `tokens`; requests that wait already keep the size there was."""
        async with self._lock:
            resized = {model: model.with_window(tokens) for model in self._repository.models()}
            fresh = [
                replace(one, models={name: resized[model] for name, model in one.models.items()})
                for bundle in self._repository.bundles()
                for one in self._repository.loaded(bundle).values()
            ]
            self._leave(self._repository.swap(fresh, ()))

    async def poll(self, seconds: float) -> None:
        """Look at the folder every `seconds`; a new or changed version is served, one that has gone is not.

        A version is taken only when two looks in a row find its files alike: it may be being written. It is let go only
        when two in a row do not find it: it may be being replaced.
        """
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.look()
            except BundleError as error:
                log.warning("polling: %s", error)
            except Exception:
                log.exception("polling failed; trying again in %g s", seconds)

    async def look(self) -> None:
        """One poll."""
        async with self._lock:
            bundles = await in_thread(self._scan, "tokenslab-scan")
            seen = {
                (name, str(v)): found.fingerprint for name, found_ in bundles.items() for v, found in found_.items()
            }
            settled = {key for key, fingerprint in seen.items() if self._seen.get(key) == fingerprint}
            self._seen = seen
            self._repository.forget_remarks(seen)
            absent = {
                (name, str(version))
                for name, versions in bundles.items()
                for version in self._repository.loaded(name).keys() - versions.keys()
            }
            waiting = {name for name, _ in absent - self._absent}
            self._absent = absent
            for name, versions in bundles.items():
                if name not in self._withdrawn | waiting:
                    wanted = self._wanted(name, versions)
                    fresh = {
                        version: found
                        for version, found in self._stale(name, wanted).items()
                        if (name, str(version)) in settled
                        and self._failed.get((name, str(version))) != found.fingerprint
                    }
                    await self._serve(name, wanted, fresh)

    def _scan(self) -> dict[str, Versions]:
        """What is on disk, and nothing for what was there; a bundle that cannot be read stays as it is served."""
        bundles: dict[str, Versions] = {}
        for folder in {*bundle_folders(self._root), *(self._root / name for name in self._repository.bundles())}:
            try:
                bundles[folder.name] = scan_bundle(folder)
            except BundleError as error:
                log.warning("polling: %s", error)
        return bundles

    async def close(self) -> None:
        """Stop waiting for models that leave; the engine's stop ends them."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _on_disk(self, name: str) -> Versions:
        try:
            versions = await in_thread(lambda: scan_bundle(self._root / name), "tokenslab-scan")
        except BundleError as cause:
            raise LoadFailed(str(cause)) from cause
        if not versions:
            raise NotFound(f"no bundle {name[:80]!r} in the model repository")
        return versions

    def _wanted(self, name: str, versions: Versions) -> Versions:
        if not versions:
            return {}
        pinned = self._pinned.get(name, set())
        return chosen(self._policy, versions) | {v: found for v, found in versions.items() if v in pinned}

    def _stale(self, name: str, wanted: Versions) -> Versions:
        """Those that are not served, or from other files than there are now."""
        held = self._repository.loaded(name)
        return {
            version: found
            for version, found in wanted.items()
            if version not in held or held[version].found.fingerprint != found.fingerprint
        }

    async def _serve(self, name: str, wanted: Versions, fresh: Versions) -> list[str]:
        """Load `fresh`, swap, and let go what is not `wanted`; returns what went wrong."""
        loaded, failures = [], []
        for version, found in fresh.items():
            outcome = await self._try(name, version, found)
            if isinstance(outcome, str):
                failures.append(outcome)
            else:
                loaded.append(outcome)
        held = self._repository.loaded(name)
        # A version that policy would drop stays as long as what is to replace it has not arrived.
        arrived = all(v in held or any(one.bundle[1] == str(v) for one in loaded) for v in wanted)
        gone = [one.bundle for version, one in held.items() if version not in wanted] if arrived else []
        if loaded or gone:
            self._leave(self._repository.swap(loaded, gone))
            log.info("%s: now serving version %s", name, ", ".join(map(str, self._repository.loaded(name))) or "none")
        return failures

    async def _try(self, name: str, version: int, found: Found) -> Loaded | str:
        serving = version in self._repository.loaded(name)
        if not serving:
            self._repository.remark(name, str(version), "LOADING")
        try:
            fresh = await in_thread(lambda: self._load_bundle(found), "tokenslab-load")
            clash = self._repository.clashes(fresh)
            if clash is not None:
                raise BundleError(f"{found.folder}: {clash}")
        except (BundleError, ProviderError, OSError, MemoryError) as error:
            if self._said.get((name, str(version))) != str(error):
                log.error("%s version %d: %s", name, version, error)
            self._said[name, str(version)] = str(error)
            if _is_of_the_files(error):
                self._failed[name, str(version)] = found.fingerprint
            reason = f"its files have changed and cannot be served: {error}" if serving else str(error)
            self._repository.remark(name, str(version), "READY" if serving else "UNAVAILABLE", reason)
            return str(error)
        finally:
            self._repository.clear_remark(name, str(version), "LOADING")
        self._failed.pop((name, str(version)), None)
        self._said.pop((name, str(version)), None)
        return fresh

    def _leave(self, models: Iterable[Model], reason: str = "") -> asyncio.Future[None]:
        """Wait in the background until each of `models` has answered what it was asked."""
        task = asyncio.get_running_loop().create_task(self._drain(list(models), reason))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return asyncio.shield(task)

    async def _drain(self, models: list[Model], reason: str) -> None:
        served = {(model.manifest.name, model.version) for _, model in self._repository}
        keys = {(model.manifest.name, model.version) for model in models} - served
        for key in keys:
            self._repository.remark(*key, "UNLOADING")
        while models:
            model = models.pop()
            await self._retire(model)
            log.info("%s version %s: unloaded", model.label, model.version)
            del model
        for key in keys:
            if self._repository.clear_remark(*key, "UNLOADING") and reason:
                self._repository.remark(*key, "UNAVAILABLE", reason)


def _is_of_the_files(error: Exception) -> bool:
    """Whether a version will fail so again unless its files change; a lack of memory or descriptors may pass."""
    cause = error.__cause__
    passing = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, BundleError | ProviderError) and not isinstance(error, RoomError) and not passing
