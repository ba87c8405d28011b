"""What the GPU's script does, on the CPU: bound runs, parity, the page; and its refusal where there is no CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import Attention, Bound, Row, attention_rows, ffn_rows, page
from tests.bundles import relu_ffn, sequence_mean, write_bundle

D = 8


def test_rows_have_the_files_own_errors_and_times(tmp_path: Path) -> None:
    right = write_bundle(tmp_path, "right", relu_ffn(D, 16)) / "fp32.onnx"
    other = write_bundle(tmp_path, "other", relu_ffn(D, 16, seed=1)) / "fp32.onnx"
    rows = ffn_rows({"fp32": right, "w8": other}, right, "cpu", (1, 5), repeats=2)
    assert [(row.precision, row.tokens) for row in rows] == [("fp32", 1), ("w8", 1), ("fp32", 5), ("w8", 5)]
    assert all(row.us_per_token > 0 for row in rows)
    assert [row.relative_error for row in rows if row.precision == "fp32"] == [0.0, 0.0]
    assert all(row.relative_error > 0.1 for row in rows if row.precision == "w8"), "other weights, other answers"


def test_packed_and_padded_are_timed_on_as_many_rows_as_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_bundle(tmp_path, "means", sequence_mean(D)) / "fp32.onnx"
    seen: list[int] = []
    timed = Bound.median_s

    def noting(self: Bound, feeds: gpu.Feeds, repeats: int = 1) -> float:
        seen.append(len(feeds["tokens"]))
        return timed(self, feeds, repeats)

    monkeypatch.setattr(Bound, "median_s", noting)
    (row,) = attention_rows({"fp32": file}, "cpu", (1, 2, 5), repeats=1)
    assert seen == [8, 15]
    assert row.gain == row.padded_ms / row.packed_ms > 0


def test_the_page_has_every_figure() -> None:
    rows = [
        Row("fp32", 1, 30.0, 1e-7),
        Row("fp32", 64, 2.0, 2e-7),
        Row("fp16", 1, 25.0, 1e-3),
        Row("fp16", 64, 1.0, 2e-3),
    ]
    text = page({"gpu": "X", "cpu": "Y"}, rows, [Attention("fp16", 2.0, 9.0)])
    assert "gpu X, cpu Y." in text
    assert "| precision | 1 | 64 |" in text
    assert "| fp16 | 25 (1.0e-03) | 1 (2.0e-03) |" in text
    assert "| fp16 | 2 | 9 | 4.50x |" in text


def test_without_cuda_it_says_so_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.gpu", "--models", str(tmp_path), "--out", str(tmp_path / "gpu")])
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    assert gpu.main() == 1
    assert "CUDAExecutionProvider" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
