"""Sessions: the provider is the one asked for, or there is no session; and the service never loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from service.errors import ProviderError
from service.session import open_session, session_options
from tests.bundles import relu_ffn


def test_a_provider_that_this_build_lacks_is_an_error_and_never_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(relu_ffn(4, 8), path)
    with pytest.raises(ProviderError, match="'cuda' needs CUDAExecutionProvider; this ONNX Runtime has"):
        open_session(path, "cuda", 1)


def test_a_provider_that_does_not_take_the_session_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(relu_ffn(4, 8), path)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession.get_providers", lambda _: ["CPUExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession.__init__", lambda *_, **__: None)
    with pytest.raises(ProviderError, match="ONNX Runtime took CPUExecutionProvider"):
        open_session(path, "cuda", 1)


def test_prepacking_stays_on_because_batch_exactness_needs_it() -> None:
    options = session_options(3)
    assert options.intra_op_num_threads == 3
    with pytest.raises(RuntimeError):
        options.get_session_config_entry("session.disable_prepacking")


def test_the_service_imports_neither_torch_nor_export() -> None:
    code = (
        "import sys, pkgutil, importlib, service\n"
        "for m in pkgutil.walk_packages(service.__path__, 'service.'): importlib.import_module(m.name)\n"
        "print(sorted(n for n in sys.modules if n.split('.')[0] in ('torch', 'export', 'onnx', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
