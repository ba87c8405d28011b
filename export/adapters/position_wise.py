"""Any other nn.Module, exported as position-wise if it proves to be.

Finds how the module wants its tokens laid out, proves in float64 that no token can see another, and wraps it as
`forward(tokens)`. Trusts no class name: only what the module computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from export.adapters.pointwise_conv import replace_pointwise_convs
from export.adapters.row_proof import prove_rows_independent
from export.errors import ExportError, ProofError, first_line
from export.packed import Packed
from export.precision import float64

_BAR: Final = 1e-12


@dataclass(frozen=True)
class Layout:
    """How (N, d) tokens are handed to a module and its answer is read back."""

    name: str
    arrange: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]
    rank: int
    token_axis: int


LAYOUTS: Final = (
    Layout("(N, d)", lambda rows: rows, lambda out: out, 2, 0),
    Layout("(1, N, d)", lambda rows: rows.unsqueeze(0), lambda out: out.squeeze(0), 3, 1),
    Layout("(1, d, N)", lambda rows: rows.T.unsqueeze(0), lambda out: out.squeeze(0).T, 3, 2),
    Layout("(d, N)", lambda rows: rows.T, lambda out: out.T, 2, 1),
)


class PositionWise(nn.Module):
    """`inner` as `forward(tokens)`: (N, d_in) to (N, d_out)."""

    def __init__(self, inner: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.inner = inner
        self.layout = layout

    def forward(self, tokens: Tensor) -> Tensor:
        """Arrange, run, restore; raises ExportError unless the answer has as many tokens as were given."""
        out = self.inner(self.layout.arrange(tokens))
        if not isinstance(out, Tensor):
            raise ExportError(f"it returns {type(out).__name__}, expected one tensor")
        if not out.is_floating_point():
            raise ExportError(f"it returns {out.dtype}, expected floating-point numbers")
        if out.dim() != self.layout.rank or out.shape[self.layout.token_axis] != tokens.shape[0]:
            raise ExportError(f"it maps {tuple(self.layout.arrange(tokens).shape)} to {tuple(out.shape)}")
        if out.dim() == 3 and out.shape[0] != 1:
            raise ExportError(f"it changes the batch size from 1 to {out.shape[0]}")
        return self.layout.restore(out)


def pack_position_wise(module: nn.Module, *, d: int | None, seed: int) -> Packed:
    """Prove that `module`, an exportable copy, is position-wise and wrap it.

    Args:
        module: changed in place: pointwise convolutions become matmuls.
        d: width of a token; found from the first nn.Linear or nn.Conv1d if None.
        seed: of the random tokens.

    Raises:
        ExportError: no layout fits, or the width cannot be found.
        ProofError: a token's result depends on its neighbours, or on chance; the message has the counter-example.
    """
    width = d if d is not None else _find_width(module)
    wrapped, error = _find_layout(module, width, seed)
    proofs = {"rows are independent": error}
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        wrapped, proofs["matmuls equal the convolutions"] = _without_pointwise_convs(wrapped, width, seed)
    architecture = {"family": "module", "class": type(module).__name__, "layout": wrapped.layout.name}
    return Packed(wrapped, "position-wise", width, [wrapped], None, architecture, proofs)


def _find_width(module: nn.Module) -> int:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            return part.in_features
        if isinstance(part, nn.Conv1d):
            return part.in_channels
    raise ExportError(f"{type(module).__name__} has no nn.Linear or nn.Conv1d to take its width from: give it with --d")


def _find_layout(module: nn.Module, d: int, seed: int) -> tuple[PositionWise, float]:
    first = next((part for part in module.modules() if isinstance(part, nn.Linear | nn.Conv1d)), None)
    layouts: Sequence[Layout] = LAYOUTS
    if isinstance(first, nn.Conv1d):
        layouts = [*LAYOUTS[2:], *LAYOUTS[:2]]
    name = type(module).__name__
    misfits: dict[str, str] = {}  # reason -> layout
    with float64(module):
        for layout in layouts:
            wrapped = PositionWise(module, layout).eval()
            try:
                for n in [n for n in (7, 5, 3) if n != d][:2]:
                    wrapped(_tokens(n, d, seed))
            except Exception as misfit:  # noqa: BLE001 (the module's own errors say: not my layout)
                reason = str(misfit) if isinstance(misfit, ExportError) else first_line(misfit)
                misfits.setdefault(reason, layout.name)
                continue
            # The first that fits decides: a module that mixes rows may well ignore a batch of one.
            try:
                return wrapped, prove_rows_independent(wrapped, d, seed)
            except ProofError as refused:
                raise ProofError(f"{name} is not position-wise: {refused}{_mixing_convs(module)}") from refused
    reasons = "; ".join(f"as {layout}: {reason}" for reason, layout in misfits.items())
    raise ExportError(f"{name} does not take tokens of width {d} (--d sets it): {reasons}{_mixing_convs(module)}")


def _mixing_convs(module: nn.Module) -> str:
    mixing = [
        f"{name or 'it'} is an nn.Conv1d with kernel_size {part.kernel_size[0]}, which mixes neighbouring tokens"
        for name, part in module.named_modules()
        if isinstance(part, nn.Conv1d) and part.kernel_size != (1,)
    ]
    return "".join(f"; {line}" for line in mixing)


def _without_pointwise_convs(wrapped: PositionWise, d: int, seed: int) -> tuple[PositionWise, float]:
    samples = [_tokens(n, d, seed) for n in (1, 5, 17)]
    with float64(wrapped):
        expected = [wrapped(tokens) for tokens in samples]
    swapped = PositionWise(replace_pointwise_convs(wrapped.inner), wrapped.layout).eval()
    with float64(swapped):
        errors = [
            float((swapped(tokens) - reference).norm() / reference.norm().clamp_min(torch.finfo(torch.float64).tiny))
            for tokens, reference in zip(samples, expected, strict=True)
        ]
    if not max(errors) <= _BAR:
        raise ProofError(f"its kernel-size-1 convolutions differ from matmuls by {max(errors):.1e}, allowed {_BAR:.0e}")
    return swapped, max(errors)


def _tokens(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64)
