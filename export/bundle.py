"""Writes a bundle's folder all at once or not at all. It knows names, versions and files, not what is in them."""

from __future__ import annotations

import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import numpy as np

from export.errors import ExportError
from service.manifest import NAME, RESERVED

if TYPE_CHECKING:  # writing files needs no torch
    from export.parity import Case

REFERENCE_BYTES: Final = 1 << 20


def check_name(name: str) -> None:
    """Raise ExportError unless `name` can be a bundle's: its precisions are models `<name>-fp32` and `<name>-int8`."""
    if NAME.fullmatch(name) is None:
        raise ExportError(f"name {name!r}: expected letters, digits, '.', '_' and '-', a letter or digit first")
    if name in RESERVED:
        raise ExportError(f"name {name!r} is reserved by the protocol")
    for ending in ("-fp32", "-int8"):
        if name.endswith(ending):
            raise ExportError(f"name {name!r} ends in {ending!r}, which is how a precision is addressed")


def check_free(models: Path, name: str, version: int, *, overwrite: bool) -> None:
    """Raise ExportError if the version exists and is not to be replaced."""
    if version < 1:
        raise ExportError(f"version {version}: expected at least 1")
    if (models / name / str(version)).exists() and not overwrite:
        raise ExportError(f"{models / name / str(version)} exists: pass --version for another, or --overwrite")


@contextmanager
def new_bundle(models: Path, name: str, version: int, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `<models>/<name>/<version>` if the block ends without an exception.

    SIGTERM inside the block is an exception too. Whatever fails, the temporary folder goes, and so do the folders
    above it that this call created.

    Raises:
        ExportError: the version exists and `overwrite` is false, or the file system refused (disk full, permissions).
    """
    check_name(name)
    check_free(models, name, version, overwrite=overwrite)
    final = models / name / str(version)
    temporary = final.parent / f".{version}.{secrets.token_hex(4)}.tmp"
    made = [folder for folder in (final.parent, models, *models.parents) if not folder.exists()]
    try:
        with _terminate_raises():
            temporary.mkdir(parents=True)
            yield temporary
            check_free(models, name, version, overwrite=overwrite)
            _publish(temporary, final)
    except OSError as cause:
        where = cause.filename or temporary
        raise ExportError(f"{where}: {cause.strerror or cause}") from cause
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def write_reference(path: Path, cases: Sequence[Case]) -> int:
    """Write `tokens_<i>` float32, `seq_lens_<i>` int64 and `out_<i>` float32 (rounded from float64) of the cases.

    Smallest first, as many as fit into 1 MiB, at least one. Returns how many.
    """
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    size = 0
    count = 0
    for case in sorted(cases, key=lambda case: len(case.tokens)):
        size += case.tokens.nbytes + case.reference.nbytes // 2
        if count and size > REFERENCE_BYTES:
            break
        arrays[f"tokens_{count}"] = case.tokens
        arrays[f"seq_lens_{count}"] = np.array(case.seq_lens, dtype=np.int64)
        arrays[f"out_{count}"] = case.reference.astype(np.float32)
        count += 1
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return count


def _publish(temporary: Path, final: Path) -> None:
    """Rename into place. A folder cannot be renamed over another: the old one steps aside, and back if that fails."""
    if not final.exists():
        temporary.rename(final)
        return
    aside = final.parent / f".{final.name}.{secrets.token_hex(4)}.old.tmp"
    final.rename(aside)
    try:
        temporary.rename(final)
    except BaseException:
        aside.rename(final)
        raise
    shutil.rmtree(aside)


@contextmanager
def _terminate_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit(143) here, so that clean-up runs; only the main thread may, and needs to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
