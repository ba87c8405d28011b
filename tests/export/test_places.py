"""Activations whose bits depend on the window, which a sample of windows may miss, get no certificate `exact`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.errors import ProofError
from export.pipeline import Options, export_module
from export.places import PLACE_DEPENDENT
from service.manifest import read_manifest
from tests.export.elementwise import CONTRIB, Operator, differences


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


# Those of the optimized graphs of FFN, blocks, GPT-2, Llama and T5 in fp32 and int8, and activations users bring.
PROBED = [
    *map(Operator, ("Abs", "Ceil", "Clip", "Cos", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish")),
    *map(Operator, ("Identity", "LeakyRelu", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin")),
    *map(Operator, ("Softsign", "Tanh", "ThresholdedRelu", "Softplus", "Mish", "Elu", "Selu", "Celu")),
    *(Operator(name, positive=True) for name in ("Log", "Sqrt")),
    *(Operator(name, inputs=2) for name in ("Add", "Sub", "Mul", "Div", "Min", "Max")),
    Operator("Pow", inputs=2, positive=True),
    *(Operator(name, CONTRIB) for name in ("FastGelu", "QuickGelu")),
    Operator("BiasGelu", CONTRIB, inputs=2, vector=True),
]


@pytest.mark.parametrize("operator", [o for o in PROBED if o.name not in PLACE_DEPENDENT], ids=lambda o: o.name)
def test_every_other_elementwise_operator_gives_a_value_the_same_bits_wherever_it_lies(operator: Operator) -> None:
    assert differences(operator, np.random.default_rng()) == 0


def test_the_probe_sees_what_it_looks_for() -> None:
    assert differences(Operator("Softplus"), np.random.default_rng()) > 0
    assert {o.name for o in PROBED} >= PLACE_DEPENDENT


class Wave(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.sin(tokens)


def test_a_sine_is_refused_as_exact(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), Wave(), nn.Linear(16, 8))
    with pytest.raises(ProofError, match=r"wherever it lies \(Sin\)"):
        export_module(module, Options("sine", tmp_path, precisions=["fp32"]))
