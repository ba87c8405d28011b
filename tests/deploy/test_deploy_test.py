"""`make deploy-test`'s summary: a part that fails, and one whose package cannot be had, are different things."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from deploy.deploy_test import __main__ as deploy_test
from deploy.deploy_test.kserve import KServeFault
from deploy.deploy_test.packages import PackageMissing, fetch


def part(fault: Exception) -> Any:
    def run() -> NoReturn:
        raise fault

    return run


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (PackageMissing("kserve==0 cannot be downloaded: no route"), 0, "NOT RUN: kserve==0 cannot be downloaded"),
        (KServeFault("runtime.yaml: spec.multi: no such field"), 1, "FAILED: runtime.yaml: spec.multi"),
    ],
    ids=["no package", "no fit"],
)
def test_a_package_that_cannot_be_had_is_not_run_and_a_resource_that_does_not_fit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception, code: int, said: str
) -> None:
    monkeypatch.setattr(deploy_test, "PARTS", {"KServe resources": part(fault)})
    assert deploy_test.main() == code
    assert f"KServe resources: {said}" in capsys.readouterr().out


def test_what_pip_cannot_download_is_missing_with_its_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(PackageMissing, match="x==1 cannot be downloaded: ERROR: No matching distribution found"):
        fetch("x==1", tmp_path)
