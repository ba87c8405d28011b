"""A bundle appears whole or not at all, and leaves nothing else behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from export.bundle import check_name, new_bundle
from export.errors import ExportError


def test_the_folder_appears_under_its_name_only_at_the_end(tmp_path: Path) -> None:
    models = tmp_path / "deep" / "models"
    with new_bundle(models, "ffn", 3, overwrite=False) as folder:
        (folder / "file").write_text("x")
        assert folder.name.startswith(".3.")
        assert not (models / "ffn" / "3").exists()
    assert [path.name for path in (models / "ffn").iterdir()] == ["3"]
    assert (models / "ffn" / "3" / "file").read_text() == "x"


def write_and_raise(path: Path, fault: type[BaseException]) -> None:
    path.write_text("x")
    raise fault


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing_not_even_the_folders_it_made(tmp_path: Path, fault: type[BaseException]) -> None:
    with pytest.raises(fault), new_bundle(tmp_path / "models", "ffn", 1, overwrite=False) as folder:
        write_and_raise(folder / "file", fault)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_what_was_there_before(tmp_path: Path) -> None:
    with new_bundle(tmp_path, "ffn", 1, overwrite=False) as folder:
        (folder / "file").write_text("old")
    with pytest.raises(ValueError, match="x"), new_bundle(tmp_path, "ffn", 1, overwrite=True):
        raise ValueError("x")
    assert [path.name for path in (tmp_path / "ffn").iterdir()] == ["1"]
    assert (tmp_path / "ffn" / "1" / "file").read_text() == "old"


def test_an_existing_version_is_replaced_only_when_told(tmp_path: Path) -> None:
    for text, overwrite in (("old", False), ("new", True)):
        with new_bundle(tmp_path, "ffn", 1, overwrite=overwrite) as folder:
            (folder / text).write_text(text)
    assert [path.name for path in (tmp_path / "ffn" / "1").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "ffn").iterdir()] == ["1"]
    with pytest.raises(ExportError, match="exists: pass --version for another, or --overwrite"):
        new_bundle(tmp_path, "ffn", 1, overwrite=False).__enter__()


def test_a_version_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exists"), new_bundle(tmp_path, "ffn", 1, overwrite=False):
        (tmp_path / "ffn" / "1" / "theirs").mkdir(parents=True)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["ffn", "ffn/1", "ffn/1/theirs"]


def test_a_full_disk_is_named_with_its_file(tmp_path: Path) -> None:
    message = "weights.onnx: No space left on device"
    with pytest.raises(ExportError, match=message), new_bundle(tmp_path, "ffn", 1, overwrite=False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    with pytest.raises(ExportError, match="models"):
        new_bundle(tmp_path / "models", "ffn", 1, overwrite=False).__enter__()


SCRIPT = """
import signal, sys
from pathlib import Path
from export.bundle import new_bundle
with new_bundle(Path(sys.argv[1]), "ffn", 1, overwrite=False) as folder:
    (folder / "file").write_text("x")
    print("ready", flush=True)
    while True:
        signal.pause()
"""


EXIT_CODE = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: -signal.SIGINT}


@pytest.mark.parametrize("number", EXIT_CODE)
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    models = tmp_path / "models"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(models)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert models.exists()
        process.send_signal(number)
        code = process.wait(timeout=60)
    assert code == EXIT_CODE[number]
    assert list(tmp_path.iterdir()) == []


# The signal arrives right after the call of `function` that is counted, in the middle of replacing a version.
REPLACE = """
import os, shutil, sys
from pathlib import Path
from export.bundle import new_bundle
models, function, calls, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
owner, name = (Path, "rename") if function == "rename" else (shutil, "rmtree")
real = getattr(owner, name)
def interrupted(*args, **kwargs):
    global calls
    real(*args, **kwargs)
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), number)
with new_bundle(models, "ffn", 1, overwrite=True) as folder:
    (folder / "new").write_text("new")
    setattr(owner, name, interrupted)
"""


@pytest.mark.parametrize("number", EXIT_CODE)
@pytest.mark.parametrize(("function", "calls"), [("rename", 1), ("rename", 2), ("rmtree", 1)])
def test_a_signal_while_a_version_is_replaced_waits_until_it_is(
    tmp_path: Path, number: signal.Signals, function: str, calls: int
) -> None:
    (tmp_path / "ffn" / "1").mkdir(parents=True)
    (tmp_path / "ffn" / "1" / "old").touch()
    words = [str(tmp_path), function, str(calls), str(int(number))]
    done = subprocess.run([sys.executable, "-c", REPLACE, *words], capture_output=True, check=False, timeout=60)
    assert done.returncode == EXIT_CODE[number], done.stderr
    assert [path.name for path in (tmp_path / "ffn").iterdir()] == ["1"]
    assert [path.name for path in (tmp_path / "ffn" / "1").iterdir()] == ["new"]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with new_bundle(tmp_path, "ffn", 1, overwrite=False):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "ffn" / "1").is_dir()


def test_handlers_are_as_they_were_afterwards(tmp_path: Path) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = [signal.getsignal(number) for number in numbers]
    with new_bundle(tmp_path, "ffn", 1, overwrite=False):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in numbers] == before


def test_another_thread_can_export_too(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(replace_with, tmp_path, "theirs").result()
    assert (tmp_path / "ffn" / "1" / "theirs").exists()


def replace_with(models: Path, text: str) -> None:
    with new_bundle(models, "ffn", 1, overwrite=True) as folder:
        (folder / text).write_text(text)


def test_a_version_that_cannot_be_replaced_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_with(tmp_path, "old")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if target.name == "1" and not path.name.endswith(".old.tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(ExportError, match="Input/output error"):
        replace_with(tmp_path, "new")
    assert [path.name for path in (tmp_path / "ffn").iterdir()] == ["1"]
    assert [path.name for path in (tmp_path / "ffn" / "1").iterdir()] == ["old"]


def test_an_old_version_that_cannot_be_removed_does_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace_with(tmp_path, "old")

    def fails(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "rmtree", fails)
    replace_with(tmp_path, "new")
    assert [path.name for path in (tmp_path / "ffn" / "1").iterdir()] == ["new"]
    assert "the version that was replaced could not be removed: [Errno 13]" in caplog.text


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_exports_at_once_one_wins_and_neither_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """The other one publishes in the last moment: after the check, and after the old version stepped aside."""
    replace_with(tmp_path, "old")
    rename = Path.rename
    ours: list[Path] = []

    def late(path: Path, target: Path) -> Path:
        if path in ours:
            ours.clear()
            replace_with(tmp_path, "theirs")
        return rename(path, target)

    if not overwrite:
        shutil.rmtree(tmp_path / "ffn")
    monkeypatch.setattr(Path, "rename", late)
    message = "ffn/1: another export wrote it meanwhile"
    with pytest.raises(ExportError, match=message), new_bundle(tmp_path, "ffn", 1, overwrite=overwrite) as folder:
        ours.append(folder)
    assert [path.name for path in (tmp_path / "ffn").iterdir()] == ["1"]
    assert [path.name for path in (tmp_path / "ffn" / "1").iterdir()] == ["theirs"]


@pytest.mark.parametrize("target", ["nowhere", "elsewhere"])
def test_a_link_in_the_place_of_a_version_is_replaced_itself(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "ffn").mkdir()
    (tmp_path / "ffn" / "1").symlink_to(tmp_path / target)
    with pytest.raises(ExportError, match="exists: pass --version"):
        new_bundle(tmp_path, "ffn", 1, overwrite=False).__enter__()
    replace_with(tmp_path, "new")
    assert not (tmp_path / "ffn" / "1").is_symlink()
    assert (tmp_path / "elsewhere" / "file").exists()
    assert [path.name for path in (tmp_path / "ffn").iterdir()] == ["1"]


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a b", "a/b", "..", "x-fp32", "x-int8", "stats", "ä"])
def test_names_that_cannot_be_served_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="name"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "demo-ffn", "MiniLM_L6.v2", "0", "int8", "x-fp32-y"])
def test_other_names_are_not(name: str) -> None:
    check_name(name)
