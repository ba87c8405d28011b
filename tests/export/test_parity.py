"""The bars: what counts as an error, how large it may be, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export import parity
from export.adapters.registry import pack
from export.errors import ExportError, ProofError
from export.packed import Packed
from export.relative_error import relative_error
from service.manifest import Parity


def row(error: float, sqnr: float = 100.0) -> Parity:
    return Parity(seq_lens=[7], relative_error=error, sqnr_db=sqnr)


def test_the_fp32_bar_is_2e_6_for_one_layer_and_1e_5_for_six() -> None:
    assert parity.fp32_bar(1) == pytest.approx(2e-6)
    assert parity.fp32_bar(6) == pytest.approx(1e-5)
    assert [parity.fp32_bar(n) for n in range(1, 13)] == sorted(parity.fp32_bar(n) for n in range(1, 13))


def test_each_precision_is_held_to_its_own_bar() -> None:
    parity.check([row(1.9e-6)], 1, None)
    parity.check([row(9e-6)], 6, None)
    parity.check([row(0.05, 26.0)], 1, 20.0)
    with pytest.raises(ProofError, match=r"relative error 2\.10e-06 .* sequence lengths \[7\], allowed 2\.00e-06"):
        parity.check([row(1e-7), row(2.1e-6)], 1, None)
    with pytest.raises(ProofError, match=r"SQNR 19\.0 dB .* required 20 dB"):
        parity.check([row(0.05, 26.0), row(0.112, 19.0)], 1, 20.0)


def test_relative_error_of_zeros() -> None:
    zeros, ones = np.zeros((2, 2)), np.ones((2, 2))
    assert relative_error(zeros.astype(np.float32), zeros) == 0
    assert relative_error(ones.astype(np.float32), zeros) == math.inf
    assert relative_error(np.full((2, 2), 1.5, np.float32), ones) == pytest.approx(0.5)


def test_references_are_float64_answers_at_every_size() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    cases = parity.reference_cases(pack(module), seed=1)
    assert [case.seq_lens for case in cases] == [(1,), (2,), (7,), (64,), (257,)]
    for case in cases:
        expected = module.double()(torch.from_numpy(case.tokens).double()).detach().numpy()
        np.testing.assert_allclose(case.reference, expected, rtol=1e-12, atol=1e-14)


def test_sequences_are_compared_ragged_too() -> None:
    cases = parity.reference_cases(pack(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)), seed=1)
    assert {len(case.seq_lens) for case in cases} > {1, 2, 4}
    assert all(sum(case.seq_lens) == len(case.tokens) for case in cases)


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(tokens) * (1 / (tokens.shape[0] - 64))  # type: ignore[no-any-return]


def test_a_reference_that_fails_or_is_not_finite_is_refused() -> None:
    module = Overflows().eval()
    packed = Packed(module, "position-wise", 4, [module], 1, {})
    with pytest.raises(ExportError, match=r"failed on \[64\] tokens in float64: ZeroDivisionError"):
        parity.reference_cases(packed, seed=0)
