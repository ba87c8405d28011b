from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.bundles import FFN, ExportFailed, ensure
from tests.bundles import relu_ffn, write_bundle


def test_a_bundle_that_is_there_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("exported again"))
    folder = write_bundle(tmp_path, FFN.name, relu_ffn(4, 8), precisions=("fp32", "int8"))
    bundle = ensure(FFN, tmp_path)
    assert bundle.folder == folder
    assert bundle.model("int8") == "bench-ffn-int8"


def test_a_missing_bundle_is_exported_by_the_projects_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "tokenslab", "export"]
        assert command[-4:] == ["--name", FFN.name, "--models", str(tmp_path)]
        write_bundle(tmp_path, FFN.name, relu_ffn(4, 8))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", export)
    assert ensure(FFN, tmp_path).manifest.name == FFN.name


def test_an_export_that_fails_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, "", "needs the package 'torch'")
    )
    with pytest.raises(ExportFailed, match=r"tokenslab\[export\][\s\S]*needs the package 'torch'"):
        ensure(FFN, tmp_path)
