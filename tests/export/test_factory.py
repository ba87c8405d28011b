"""A target is a file or a module and a factory; whatever is wrong with it is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from export.errors import SourceError
from export.factory import load_module

SOURCE = """
from torch import nn
from sibling import WIDTH
number = 3
ready = nn.Linear(WIDTH, 2)
class Net(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, 5)
def make():
    from late_sibling import OUT
    return nn.Linear(WIDTH, OUT)
def broken(): raise ValueError("no weights\\nsecond line")
def quits(): raise SystemExit(3)
def nothing(): return None
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "sibling.py").write_text("WIDTH = 4\n")
    (tmp_path / "late_sibling.py").write_text("OUT = 7\n")
    (tmp_path / "nets.py").write_text(SOURCE)
    return tmp_path / "nets.py"


@pytest.mark.parametrize(("attribute", "width"), [("make", 7), ("Net", 5), ("ready", 2)])
def test_a_function_a_class_or_a_module_of_a_file(nets: Path, attribute: str, width: int) -> None:
    made = load_module(f"{nets}:{attribute}")
    assert isinstance(made, nn.Linear)
    assert (made.in_features, made.out_features) == (4, width)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("absent", "has no 'absent'"),
        ("number", "is int, expected a function that returns an nn.Module"),
        ("broken", r"raised ValueError: no weights \(.*nets.py:12\)"),
        ("quits", "raised SystemExit: 3"),
        ("nothing", r"nothing\(\) returned NoneType, expected an nn.Module"),
    ],
)
def test_what_is_wrong_with_a_factory(nets: Path, attribute: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        load_module(f"{nets}:{attribute}")


def test_a_package_module_is_imported_by_name() -> None:
    with pytest.raises(SourceError, match="returned OrderedDict"):
        load_module("collections:OrderedDict")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nets.py", "expected path/to/file.py:factory"),
        ("nowhere/nets.py:make", "nowhere/nets.py: no such file"),
        ("no_such_package.nets:make", "no_such_package.nets: no such module"),
    ],
)
def test_what_is_wrong_with_a_place(target: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        load_module(target)


def test_a_file_that_fails_to_import_says_where(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nimport not_installed_anywhere\n")
    with pytest.raises(SourceError, match=r"raised ModuleNotFoundError: .*not_installed_anywhere.* \(.*bad.py:2\)"):
        load_module(f"{tmp_path / 'bad.py'}:make")
