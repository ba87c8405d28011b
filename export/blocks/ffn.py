"""The position-wise feed-forward network, plain and gated (Vaswani et al. 2017; Shazeer 2020, "GLU variants")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh approximation, elementwise (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


# name -> (elementwise function, whether it gates a second projection)
ACTIVATIONS: Final[dict[str, tuple[Activation, bool]]] = {
    "relu": (F.relu, False),
    "gelu": (F.gelu, False),
    "gelu_tanh": (gelu_tanh, False),
    "silu": (F.silu, False),
    "reglu": (F.relu, True),
    "swiglu": (F.silu, True),
    "geglu": (F.gelu, True),
    "geglu_tanh": (gelu_tanh, True),
}


def activation_name(activation: Activation) -> str:
    """Name an elementwise callable: the one in `ACTIVATIONS` if it is there, else its own."""
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if isinstance(activation, nn.ReLU | nn.SiLU):
        return "relu" if isinstance(activation, nn.ReLU) else "silu"
    for name, (known, gated) in ACTIVATIONS.items():
        if activation is known and not gated:
            return name
    return str(getattr(activation, "__name__", type(activation).__name__))


class FFN(nn.Module):
    """`down(activation(up(x)))`, or `down(activation(gate(x)) * up(x))` for the gated names.

    Gate and up are one matmul, (d, 2 d_ff), gate first: reading the tokens once is faster than twice.
    """

    def __init__(self, d: int, d_ff: int, *, activation: str | Activation = "gelu", bias: bool = True) -> None:
        """Make an FFN of width `d` with `d_ff` hidden units and nn.Linear's own initialisation.

        Args:
            d: width of `tokens` and of the result.
            d_ff: hidden units (after gating, for the gated forms).
            activation: a name in `ACTIVATIONS`, or an elementwise callable, not gated.
            bias: whether the projections have one.

        Raises:
            ValueError: the activation's name is unknown.
        """
        super().__init__()
        name = activation if isinstance(activation, str) else activation_name(activation)
        if isinstance(activation, str):
            if name not in ACTIVATIONS:
                raise ValueError(f"activation {name!r}: expected one of {', '.join(ACTIVATIONS)}")
            activation, gated = ACTIVATIONS[name]
        else:
            gated = False
        self.activation_name = name
        self.activation = activation
        self.gated = gated
        self.up = nn.Linear(d, 2 * d_ff if self.gated else d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, d) to (N, d), each row by itself."""
        hidden: Tensor = self.up(tokens)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * up
        else:
            hidden = self.activation(hidden)
        out: Tensor = self.down(hidden)
        return out
