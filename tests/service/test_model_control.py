"""Models that come and go while others are served: what is taken, what is left alone, and what is freed."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from service.errors import LoadFailed, NotFound, RoomError
from service.loading import load_bundle, load_repository
from service.manifest import MANIFEST
from service.model import Model
from service.model_control import ModelControl
from service.repository import Repository
from service.settings import Settings
from tests.bundles import relu_ffn, sequence_mean, write_bundle


class Stage:
    """A repository of one bundle, and its control; what leaves is drained when the test says so."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.settings = Settings(models=root, threads=1, max_window_tokens=16, **settings)
        self.repository: Repository = load_repository(self.settings)
        self.retired: list[str] = []
        self.drained = asyncio.Event()
        self.drained.set()
        self.control = ModelControl(
            self.repository, self.settings, lambda found: load_bundle(found, self.settings), self._retire
        )

    async def _retire(self, model: Model) -> None:
        await self.drained.wait()
        self.retired.append(f"{model.label}/{model.version}")

    def served(self) -> list[str]:
        return [f"{name}/{model.version}" for name, model in self.repository]

    def states(self) -> dict[str, tuple[str, str]]:
        return {f"{row.name}/{row.version}": (row.state, row.reason) for row in self.repository.index()}


def put(root: Path, name: str = "ffn", version: int = 1, *, seed: int = 0) -> Path:
    return write_bundle(root, name, relu_ffn(8, 16, seed=seed), version=version)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path)
    return tmp_path


def test_polling_takes_a_new_version_once_its_files_hold_still(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        await stage.control.look()
        put(root, version=2)
        await stage.control.look()
        assert stage.repository.get("ffn").version == "1", "it may still be being written"
        await stage.control.look()
        assert stage.served() == ["ffn/2", "ffn-fp32/2"]
        await asyncio.sleep(0)
        assert stage.retired == ["ffn-fp32/1"]

    asyncio.run(story())


def test_polling_leaves_a_bundle_that_is_being_written_alone(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        shutil.copytree(root / "ffn" / "1", root / "ffn" / ".2.tmp")
        folder = root / "ffn" / "2"
        folder.mkdir()
        for size in range(3):
            (folder / MANIFEST).write_bytes(b"{" * size)
            await stage.control.look()
        assert stage.states() == {"ffn/1": ("READY", ""), "ffn-fp32/1": ("READY", "")}
        await stage.control.look()
        state, reason = stage.states()["ffn/2"]
        assert (state, MANIFEST in reason) == ("UNAVAILABLE", True)
        shutil.rmtree(folder)
        put(root, version=2)
        await stage.control.look()
        await stage.control.look()
        assert stage.states() == {"ffn/2": ("READY", ""), "ffn-fp32/2": ("READY", "")}

    asyncio.run(story())


def test_a_changed_version_replaces_itself_and_one_that_fails_leaves_what_was_served(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        before = stage.repository.get("ffn")
        shutil.rmtree(root / "ffn" / "1")
        put(root, seed=1)
        await stage.control.load("ffn")
        changed = stage.repository.get("ffn")
        assert changed is not before
        (root / "ffn" / "1" / "fp32.onnx").write_bytes(b"broken")
        with pytest.raises(LoadFailed, match=r"fp32\.onnx: its SHA-256 is"):
            await stage.control.load("ffn")
        assert stage.repository.get("ffn") is changed
        state, reason = stage.states()["ffn/1"]
        assert (state, "have changed and cannot be served" in reason) == ("READY", True)

    asyncio.run(story())


def test_what_failed_is_not_tried_again_until_it_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage = Stage(root)
        tried: list[Path] = []

        def load(found: Any) -> Any:
            tried.append(found.folder)
            return load_bundle(found, stage.settings)

        monkeypatch.setattr(stage.control, "_load_bundle", load)
        folder = put(root, version=2)
        (folder / "fp32.onnx").write_bytes(b"broken")
        for _ in range(4):
            await stage.control.look()
        assert tried == [folder]
        assert stage.repository.get("ffn").version == "1", "the old version serves while the new one cannot"
        assert stage.states()["ffn/2"][0] == "UNAVAILABLE"
        shutil.rmtree(folder)
        await stage.control.look()
        assert "ffn/2" not in stage.states()

    asyncio.run(story())


def test_a_version_that_vanishes_is_unloaded_and_freed(root: Path) -> None:
    async def story() -> None:
        put(root, version=2)
        put(root, "other")
        stage = Stage(root, versions="all")
        gone = weakref.ref(stage.repository.get("ffn", "1"))
        shutil.rmtree(root / "ffn" / "1")
        await stage.control.look()
        assert stage.repository.versions("ffn") == ("1", "2"), "it may be being replaced"
        await stage.control.look()
        for _ in range(3):
            await asyncio.sleep(0)
        assert stage.repository.versions("ffn") == ("2",)
        gc.collect()
        assert gone() is None, "its session is still held"
        shutil.rmtree(root / "ffn")
        await stage.control.look()
        await stage.control.look()
        assert stage.served() == ["other/1", "other-fp32/1"]

    asyncio.run(story())


def test_unloading_answers_what_was_accepted_and_keeps_the_bundle_away_until_it_is_asked_for(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        stage.drained.clear()
        unloading = asyncio.create_task(stage.control.unload("ffn"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert stage.states() == {"ffn/1": ("UNLOADING", "")}
        assert not unloading.done()
        with pytest.raises(NotFound, match="unknown model 'ffn'; served: none"):
            stage.repository.get("ffn")
        stage.drained.set()
        await unloading
        for _ in range(2):
            await stage.control.look()
        assert stage.states() == {"ffn/1": ("UNAVAILABLE", "unloaded")}
        await stage.control.load("ffn")
        assert stage.states() == {"ffn/1": ("READY", ""), "ffn-fp32/1": ("READY", "")}
        with pytest.raises(NotFound, match="no bundle 'other' is served; served: ffn"):
            await stage.control.unload("other")

    asyncio.run(story())


def test_loading_a_version_by_number_serves_it_beside_the_policys_choice(root: Path) -> None:
    async def story() -> None:
        put(root, version=2)
        put(root, version=3)
        stage = Stage(root)
        await stage.control.load("ffn", 1)
        assert stage.repository.versions("ffn") == ("1", "3")
        for _ in range(2):
            await stage.control.look()
        assert stage.repository.versions("ffn") == ("1", "3")
        with pytest.raises(NotFound, match="'ffn' has no version 9; in its folder: 1, 2, 3"):
            await stage.control.load("ffn", 9)

    asyncio.run(story())


def test_a_policy_may_name_versions(root: Path) -> None:
    for version in (2, 3, 5):
        put(root, version=version)
    assert Stage(root, versions="2,5").repository.versions("ffn") == ("2", "5")


def test_loading_what_is_served_already_changes_nothing(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        before = stage.repository.get("ffn")
        await stage.control.load("ffn")
        assert stage.repository.get("ffn") is before

    asyncio.run(story())


def test_a_name_that_clashes_with_a_served_one_is_not_loaded(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        put(root, "ffn-fp32")
        with pytest.raises(LoadFailed, match="clashes with one of ffn"):
            await stage.control.load("ffn-fp32")
        assert stage.repository.get("ffn-fp32") is stage.repository.get("ffn")

    asyncio.run(story())


@pytest.mark.parametrize("name", ["none", "..", "a/b", ".hidden"])
def test_what_is_no_bundle_cannot_be_loaded(root: Path, name: str) -> None:
    with pytest.raises((NotFound, LoadFailed)):
        asyncio.run(Stage(root).control.load(name))


def test_another_bundle_that_cannot_be_read_does_not_stop_polling(root: Path) -> None:
    async def story() -> None:
        stage = Stage(root)
        (root / "stray" / "v1").mkdir(parents=True)
        write_bundle(root, "mean", sequence_mean(4))
        for _ in range(2):
            await stage.control.look()
        assert stage.repository.get("mean").version == "1"

    asyncio.run(story())


def test_what_comes_and_goes_in_a_version_s_folder_unloads_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `verify --write` does it, an editor that locks the manifest, and a copy that is renamed."""

    async def story() -> None:
        stage = Stage(root)
        before = stage.repository.get("ffn")
        folder = root / "ffn" / "1"
        (folder / ".#manifest.json").symlink_to("somebody@somewhere.1234")
        (folder / "notes").symlink_to("nothing")
        for _ in range(3):
            await stage.control.look()
        (folder / ".manifest.json.1a2b.tmp").write_text("{")
        temporary = folder / "copy.tmp"
        temporary.write_text("")
        scandir = os.scandir

        def late(path: Any) -> Any:
            found = scandir(path)
            temporary.unlink(missing_ok=True)  # it was listed, or will not be
            return found

        monkeypatch.setattr(os, "scandir", late)
        for _ in range(3):
            await stage.control.look()
        assert stage.repository.get("ffn") is before

    asyncio.run(story())


def test_a_version_that_steps_aside_while_it_is_replaced_stays_served(root: Path) -> None:
    async def story() -> None:
        put(root, version=2)
        stage = Stage(root)
        before = stage.repository.get("ffn")
        aside = root / "ffn" / ".2.old"
        for _ in range(3):
            (root / "ffn" / "2").rename(aside)
            await stage.control.look()
            aside.rename(root / "ffn" / "2")
            await stage.control.look()
        assert stage.repository.get("ffn") is before
        assert stage.repository.versions("ffn") == ("2",), "the older one is not asked for"

    asyncio.run(story())


@pytest.mark.parametrize("lacking", [OSError(errno.EMFILE, "Too many open files"), MemoryError(), RoomError("full")])
def test_what_failed_for_lack_of_something_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: Exception
) -> None:
    async def story() -> None:
        stage = Stage(root)
        lacks = True

        def load(found: Any) -> Any:
            if lacks:
                raise lacking
            return load_bundle(found, stage.settings)

        monkeypatch.setattr(stage.control, "_load_bundle", load)
        put(root, version=2)
        for _ in range(5):
            await stage.control.look()
        assert stage.repository.get("ffn").version == "1"
        lacks = False
        await stage.control.look()
        assert stage.repository.get("ffn").version == "2"
        assert len([record for record in caplog.records if "ffn version 2" in record.message]) == 1

    asyncio.run(story())
