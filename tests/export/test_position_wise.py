"""Any module is exported as position-wise if it proves to be, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from export.adapters.pointwise_conv import PointwiseConv
from export.adapters.registry import pack
from export.errors import ExportError, ProofError

ROWS = "rows are independent"
CONVS = "matmuls equal the convolutions"


class Transposing(nn.Module):
    """(1, N, d) outside, channels-first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (nn.Sequential(nn.Linear(6, 9), nn.Dropout(), nn.GELU(), nn.Linear(9, 4)), "(N, d)"),
        (nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.LayerNorm(9)), "(N, d)"),
        (nn.Sequential(nn.Conv1d(6, 9, 1), nn.BatchNorm1d(9), nn.Conv1d(9, 4, 1)), "(1, d, N)"),
        (Transposing(), "(1, N, d)"),
    ],
)
def test_the_layout_is_found(module: nn.Module, layout: str) -> None:
    packed = pack(module.train())
    assert (packed.kind, packed.d_in) == ("position-wise", 6)
    assert packed.architecture["layout"] == layout
    assert packed.proofs[ROWS] < 1e-12


def test_pointwise_convolutions_become_matmuls_on_transposed_tokens() -> None:
    module = nn.Sequential(nn.Conv1d(6, 9, 1), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Conv1d(9, 4, 1)))
    packed = pack(module)
    assert packed.proofs[CONVS] < 1e-12
    assert sum(isinstance(part, PointwiseConv) for part in packed.module.modules()) == 2
    tokens = torch.randn(5, 6)
    torch.testing.assert_close(packed.module(tokens), module(tokens.T[None])[0].T)
    assert not any(isinstance(part, PointwiseConv) for part in module.modules()), "the user's module was changed"


def test_a_convolution_over_three_tokens_is_refused_by_name_with_a_counter_example() -> None:
    module = nn.Sequential(nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 3, padding=1))
    message = (
        r"not position-wise: token \d+ of \d+ changed by .* when token \d+ did; 1 is an nn.Conv1d with kernel_size 3"
    )
    with pytest.raises(ProofError, match=message):
        pack(module)


def test_a_convolution_that_drops_tokens_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match=r"\(1, 6, 7\) to \(1, 6, 5\).* it is an nn.Conv1d with kernel_size 3"):
        pack(nn.Conv1d(6, 6, 3))


class Leak(nn.Module):
    """A linear map, and a little of something else."""

    def __init__(self, leak: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if self.leak == "mean":
            out = out + 1e-9 * x.mean(0)
        elif self.leak == "position":
            out = out + torch.arange(len(x), dtype=x.dtype)[:, None]
        elif self.leak == "previous":
            out = out + 1e-9 * x.roll(1, 0)
        elif self.leak == "many":
            out = out + (x.mean(0) if len(x) > 50 else 0)
        elif self.leak == "outlier":
            out = out / x.abs().max()
        elif self.leak == "chance":
            out = F.dropout(out, training=True)
        elif self.leak == "infinite":
            out = out / 0
        return out


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        ("mean", r"changed by .* when token \d+ did"),
        ("previous", r"changed by .* when token \d+ did"),
        ("many", r"token \d+ of 64 changed by .* when token \d+ did"),
        ("outlier", "changed"),
        ("position", "when it is alone|at position"),
        ("chance", "two runs on the same tokens differ"),
        ("infinite", "is not finite"),
    ],
)
def test_what_depends_on_neighbours_place_or_chance_is_refused(leak: str, message: str) -> None:
    with pytest.raises(ProofError, match=message):
        pack(Leak(leak))


def test_the_first_layout_that_fits_decides() -> None:
    # As (1, N, d) a softmax over the first axis sees one token and gives ones: position-wise, and not what was meant.
    with pytest.raises(ProofError, match="not position-wise"):
        pack(nn.Sequential(nn.Linear(6, 6), nn.Softmax(dim=0)))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_the_width_must_be_given_where_nothing_states_it() -> None:
    with pytest.raises(ExportError, match="give it with --d"):
        pack(Bare())
    assert pack(Bare(), d=6).d_in == 6
    with pytest.raises(ExportError, match="does not take tokens of width 5"):
        pack(Bare(), d=5)


def test_a_module_with_another_signature_is_refused_with_its_own_reason() -> None:
    with pytest.raises(ExportError, match="missing 2 required positional arguments"):
        pack(nn.MultiheadAttention(6, 2))


class Returning(nn.Module):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.linear(x))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda out: out.round().long(), "it returns torch.int64, expected floating-point numbers"),
        (lambda out: out > 0, "it returns torch.bool, expected floating-point numbers"),
        (lambda out: (out, out), "it returns tuple, expected one tensor"),
        (lambda out: {"out": out}, "it returns dict, expected one tensor"),
        (lambda out: out[..., 0], r"it maps \(7, 6\) to \(7,\)"),
    ],
)
def test_an_answer_that_is_not_one_tensor_of_numbers_is_refused(answer: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        pack(Returning(answer))


@pytest.mark.parametrize("leak", [False, True])
def test_hooks_are_part_of_what_is_exported(leak: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 6))
    module[0].register_forward_hook(lambda _module, _args, out: out + out.mean(0) if leak else out * 2)
    if leak:
        with pytest.raises(ProofError, match="not position-wise"):
            pack(module)
    else:
        tokens = torch.randn(5, 6)
        torch.testing.assert_close(pack(module).module(tokens), module(tokens))
