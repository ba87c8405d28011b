"""The lock files are what pyproject.toml asks for, at the versions that are tested."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from deploy.lock_files import EXTRAS, HEADER, LOCK, ROOT, wanted


def locked(extra: str) -> dict[NormalizedName, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", (LOCK / f"{extra}.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_requirement_is_locked_at_a_version_that_it_allows(extra: str) -> None:
    pins = locked(extra)
    for text in wanted(extra):
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, text


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_line_has_a_hash_and_the_version_of_the_constraints(extra: str) -> None:
    text = (LOCK / f"{extra}.txt").read_text()
    assert text.startswith(HEADER.format(extra=extra))
    blocks = re.split(r"\n(?=\S)", text.removeprefix(HEADER.format(extra=extra)).strip())
    assert len(blocks) == len(locked(extra)) > 25
    for block in blocks:
        assert "--hash=sha256:" in block, block
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines) if pin}
    for name, pin in locked(extra).items():
        assert constraints.get(name, pin) == pin, name


def test_what_the_cpu_image_installs_is_what_is_tested_here() -> None:
    for name, pin in locked("cpu").items():
        assert version(name) == pin, name


def test_the_images_label_has_the_version_of_the_project() -> None:
    (labelled,) = re.findall(r'image\.version="([^"]+)"', (ROOT / "Dockerfile").read_text())
    assert f'version = "{labelled}"' in (ROOT / "pyproject.toml").read_text()
