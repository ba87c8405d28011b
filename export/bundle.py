"""Writes a bundle's folder all at once or not at all. It knows names, versions and files, not what is in them."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import get_args

from export.errors import ExportError
from service.manifest import NAME, RESERVED, Precision, file_sha256

_log = logging.getLogger(__name__)


def check_name(name: str) -> None:
    """Raise ExportError unless `name` can be a bundle's: its precisions are models too, `<name>-fp32` and so on."""
    if NAME.fullmatch(name) is None:
        raise ExportError(f"name {name!r}: expected letters, digits, '.', '_' and '-', a letter or digit first")
    if name in RESERVED:
        raise ExportError(f"name {name!r} is reserved by the protocol")
    for ending in (f"-{precision}" for precision in get_args(Precision)):
        if name.endswith(ending):
            raise ExportError(f"name {name!r} ends in {ending!r}, which is how a precision is addressed")


def check_free(models: Path, name: str, version: int, *, overwrite: bool) -> None:
    """Raise ExportError if the version exists and is not to be replaced."""
    if version < 1:
        raise ExportError(f"version {version}: expected at least 1")
    final = models / name / str(version)
    try:
        os.lstat(final)  # not exists(): a dangling link is in the way too
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as cause:
        raise ExportError(f"{final}: {cause.strerror or cause}") from cause
    if not overwrite:
        raise ExportError(f"{final} exists: pass --version for another, or --overwrite")


@contextmanager
def new_bundle(models: Path, name: str, version: int, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `<models>/<name>/<version>` if the block ends without an exception.

    SIGTERM inside the block is an exception too. Whatever fails, the temporary folder goes, and so do the folders
    above it that this call created; a version that was to be replaced is there as it was.

    Raises:
        ExportError: the version exists and `overwrite` is false, or the file system refused (disk full, permissions).
    """
    check_name(name)
    check_free(models, name, version, overwrite=overwrite)
    final = models / name / str(version)
    temporary = final.parent / f".{version}.{secrets.token_hex(4)}.tmp"
    made = [folder for folder in (final.parent, models, *models.parents) if not folder.exists()]
    with _terminate_raises():
        try:
            temporary.mkdir(parents=True)
            yield temporary
            check_free(models, name, version, overwrite=overwrite)
            _publish(temporary, final, overwrite=overwrite)
        except OSError as cause:
            where = cause.filename or temporary
            raise ExportError(f"{where}: {cause.strerror or cause}") from cause
        finally:
            with _signals_held():
                _clean(temporary, made)


def report_hashes(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of each file of a bundle's report: its text, figures and plots."""
    return {path.name: file_sha256(path) for path in sorted(folder.glob("report*"))}


def _publish(temporary: Path, final: Path, *, overwrite: bool) -> None:
    """Rename into place. A folder cannot be renamed over another: the old one steps aside, and back if that fails.

    Signals wait until it is done, one way or the other. Once the new version is in place nothing here fails.
    """
    aside = final.parent / f".{final.name}.{secrets.token_hex(4)}.old.tmp"
    with _signals_held():
        try:
            if overwrite:
                with suppress(FileNotFoundError):  # nothing to replace
                    final.rename(aside)
            temporary.rename(final)
        except OSError as cause:
            with suppress(FileNotFoundError):  # nothing stepped aside
                _put_back(aside, final)
            if cause.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise ExportError(f"{final}: another export wrote it meanwhile") from cause
            raise
        _remove(aside, "the version that was replaced")


def _put_back(aside: Path, final: Path) -> None:
    try:
        aside.rename(final)
    except OSError as cause:
        if cause.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _remove(aside, "a version that another export has replaced")  # theirs is in its place


def _remove(path: Path, what: str) -> None:
    """Remove a file, link or folder, if it is there; a failure is logged, for the bundle is in place all the same."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as cause:
        _log.warning("%s: %s could not be removed: %s", path, what, cause)


def _clean(temporary: Path, made: list[Path]) -> None:
    _remove(temporary, "the unfinished bundle")
    for folder in made:
        with suppress(OSError):  # not made after all, or no longer empty: another export is at work in it
            folder.rmdir()


@contextmanager
def _terminate_raises() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit here, so that clean-up runs; SIGINT raises anyway."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled_by(stop, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let signals that would end the process wait until the block is done, and deliver them then.

    By handlers, not by a mask: another thread would take a signal that is masked here, and Python would still run its
    handler in the main thread.
    """
    arrived: dict[int, None] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        arrived[number] = None

    try:
        with _handled_by(note, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            yield
    finally:
        for number in arrived:
            signal.raise_signal(number)


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: tuple[signal.Signals, ...]
) -> Iterator[None]:
    """Set `handler` for `numbers`, except for those that are ignored, as under nohup.

    Handlers belong to the main thread: in another one this does nothing, and no handler raises there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in found.items() if old is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
