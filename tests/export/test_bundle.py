"""A bundle appears whole or not at all, and leaves nothing else behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from export.bundle import check_name, new_bundle, write_reference
from export.errors import ExportError
from export.parity import Case


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    models = tmp_path / "models"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(models)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert models.exists()
        process.send_signal(number)
        code = process.wait(timeout=60)
    assert code == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a b", "a/b", "..", "x-fp32", "x-int8", "stats", "ä"])
def test_names_that_cannot_be_served_are_refused(name: str) -> None:
    with pytest.raises(ExportError, match="name"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "demo-ffn", "MiniLM_L6.v2", "0", "int8", "x-fp32-y"])
def test_other_names_are_not(name: str) -> None:
    check_name(name)


def test_the_reference_keeps_what_fits_into_a_mebibyte_and_at_least_one(tmp_path: Path) -> None:
    cases = [Case(np.ones((n, 512), np.float32), (n,), np.full((n, 512), 1 / 3)) for n in (1, 2, 64, 257)]
    assert write_reference(tmp_path / "reference.npz", cases[::-1]) == 3
    assert (tmp_path / "reference.npz").stat().st_size < 1 << 20
    with np.load(tmp_path / "reference.npz", allow_pickle=False) as arrays:
        assert set(arrays) == {f"{name}_{i}" for name in ("tokens", "seq_lens", "out") for i in range(3)}
        assert [arrays[f"seq_lens_{i}"].tolist() for i in range(3)] == [[1], [2], [64]]
        assert {arrays["tokens_0"].dtype, arrays["out_0"].dtype} == {np.dtype(np.float32)}
    wide = [Case(np.ones((3, 1 << 18), np.float32), (3,), np.ones((3, 4)))]
    assert write_reference(tmp_path / "reference.npz", wide) == 1
