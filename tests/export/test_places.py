"""Activations whose bits depend on the window, which a sample of windows may miss, get no certificate `exact`."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from export.errors import ProofError
from export.pipeline import Options, export_module
from service.manifest import read_manifest


@pytest.mark.parametrize(("activation", "operator"), [(nn.Mish, "Mish|Softplus"), (nn.ELU, "Elu"), (nn.SELU, "Selu")])
def test_it_is_refused_by_name_and_written_as_a_tolerance_where_that_is_allowed(
    activation: type[nn.Module], operator: str, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 8))
    with pytest.raises(ProofError, match=rf"wherever it lies \(({operator})\)"):
        export_module(module, Options("refused", tmp_path, precisions=["fp32"]))
    assert not (tmp_path / "refused").exists()
    folder = export_module(module, Options("allowed", tmp_path, precisions=["fp32"], allow_inexact=True))
    assert [variant.certificate.kind for variant in read_manifest(folder).variants] == ["tolerance"]


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh])
def test_the_usual_ones_stay_exact(activation: type[nn.Module], tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 8))
    folder = export_module(module, Options("exact", tmp_path, precisions=["fp32"]))
    assert [variant.certificate.kind for variant in read_manifest(folder).variants] == ["exact"]
