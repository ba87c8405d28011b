"""Loads a user's module: `path/to/file.py:factory` or `package.module:factory`. Runs the user's code, nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from torch import nn

from export.errors import SourceError, first_line
from export.target import split_target

T = TypeVar("T")


def load_module(target: str) -> nn.Module:
    """Import what is before the last colon, call what is after it, and return its nn.Module.

    Raises:
        SourceError: the file, module or attribute is missing, is not callable, raises, or returns something else.
    """
    place, attribute = split_target(target)
    namespace = _import_file(place) if isinstance(place, Path) else _import_module(place)
    try:
        factory = getattr(namespace, attribute)
    except AttributeError:
        raise SourceError(f"{place} has no {attribute!r}") from None
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise SourceError(f"{target} is {type(factory).__name__}, expected a function that returns an nn.Module")
    made = _run(target, factory)
    if not isinstance(made, nn.Module):
        raise SourceError(f"{target}() returned {type(made).__name__}, expected an nn.Module")
    return made


def _import_file(path: Path) -> ModuleType:
    # Classes of a module must be found in sys.modules to be copied; the name cannot clash with a real package.
    name = f"tokenslab_target.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as when the file is run: it can import its neighbours, now and in its functions
        sys.path.insert(0, folder)
    loader = spec.loader
    _run(str(path), lambda: loader.exec_module(module))
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return _run(name, lambda: importlib.import_module(name))
    except SourceError as failed:
        cause = failed.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name in (name, name.split(".")[0]):
            raise SourceError(f"{name}: no such module (a file needs its .py)") from cause
        raise


def _run(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except (Exception, SystemExit) as cause:
        frames = traceback.extract_tb(cause.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise SourceError(f"{what} raised {first_line(cause)}{where}") from cause
