"""A decoder from torch to a bundle: parity, certificate and reference with a memory, and verify on all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from export.pipeline import Options, export_module
from export.reference import read_references
from export.verification import verify_bundle
from service.manifest import REFERENCE, Manifest, read_manifest
from service.memory import Memory
from service.packing import Float32
from service.recheck import Part, difference, run_window
from service.session import open_session, run_packed
from tests.export.test_inspection import inspect

D = 32


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 4, 48, batch_first=True), 1)
    return export_module(decoder, Options("recall", models=tmp_path_factory.mktemp("models")), causal=True)


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


def session(bundle: Path, precision: str) -> ort.InferenceSession:
    return open_session(bundle / f"{precision}-cpu.onnx", "cpu", 1)


def test_the_manifest_says_what_the_memory_is_and_costs(manifest: Manifest) -> None:
    assert (manifest.kind, manifest.d_memory) == ("sequence", D)
    per_token, per_row = 2 * (4 * D * D + 2 * D * D + 2 * D * 48), 2 * 2 * D * D
    assert (manifest.flops_per_token, manifest.flops_per_memory_row) == (per_token, per_row)
    assert [variant.certificate.kind for variant in manifest.variants] == ["exact", "exact"]
    for variant in manifest.variants:
        assert all(row.memory_seq_lens is not None for row in variant.parity)
        ragged = [row for row in variant.parity if len(set(row.memory_seq_lens or ())) > 1]
        assert any(row.memory_seq_lens != row.seq_lens for row in ragged)
    assert {variant.precision: variant.quantized_matmuls for variant in manifest.variants} == {"fp32": 0, "int8": 7}


def test_the_reference_travels_with_its_memory(bundle: Path) -> None:
    cases = read_references(bundle / REFERENCE)
    fp32 = session(bundle, "fp32")
    for case in cases:
        assert case.memory is not None
        assert len(case.memory.ends) == len(case.seq_lens)
        out = run_packed(fp32, case.tokens, np.array(case.seq_lens), case.memory)
        np.testing.assert_allclose(out, case.reference, atol=2e-5)


def test_verify_repeats_everything_with_the_memory(bundle: Path) -> None:
    findings = list(verify_bundle(bundle, "cpu", 1, seed=1))
    assert [finding.failure for finding in findings] == [None] * len(findings)
    assert {finding.check for finding in findings if finding.check == "certificate"} == {"certificate"}


def test_inspect_shows_the_inputs(bundle: Path) -> None:
    shown = inspect(bundle)
    assert shown.exit_code == 0
    assert "memory float32 (m, 32), memory_seq_lens int64 (sequences,)" in " ".join(shown.stdout.split())
    assert "FLOPs per memory row" in shown.stdout


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30], ids=["nan", "inf", "huge"])
def test_another_sequences_memory_changes_no_bit(bundle: Path, precision: str, bad: float) -> None:
    rng = np.random.default_rng()
    opened = session(bundle, precision)

    def run(tokens: Float32, seq_lens: object, memory: Memory | None = None, /) -> Float32:
        return run_packed(opened, tokens, seq_lens, memory)  # type: ignore[arg-type]

    def part(tokens: int, memory: int) -> Part:
        rows = rng.standard_normal((tokens, D), dtype=np.float32), rng.standard_normal((memory, D), dtype=np.float32)
        return Part(*rows)

    quiet = [part(1, 1), part(5, 17), part(17, 2)]
    loud = [Part(p.tokens, np.full_like(p.memory, bad)) for p in (part(3, 1), part(2, 40)) if p.memory is not None]
    together = run_window(run, "sequence", [loud[0], *quiet, loud[1]])
    for one, out in zip(quiet, together[1:-1], strict=True):
        assert difference(run_window(run, "sequence", [one])[0], out) is None
        assert np.isfinite(out).all()
    if not np.isfinite(bad):
        assert not np.isfinite(together[0]).any()
        assert not np.isfinite(together[-1]).any()
