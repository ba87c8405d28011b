"""Bottleneck adapters: a small trained FFN with a residual of its own, beside a frozen model's weights.

Houlsby et al. 2019 put one after attention and one after the FFN of every block, Pfeiffer et al. 2021 after the FFN
alone; in both the adapter stands before the block's own residual.
"""

from __future__ import annotations

from torch import Tensor, nn

from export.blocks.ffn import ACTIVATIONS, Activation, activation_name


class BottleneckAdapter(nn.Module):
    """`x + up(activation(down(x)))`, (N, d) to (N, d), each row by itself."""

    def __init__(self, d: int, d_bottleneck: int, *, activation: str | Activation = "relu", bias: bool = True) -> None:
        """Make one with nn.Linear's own initialisation.

        Args:
            d: width of the rows.
            d_bottleneck: hidden units, fewer than `d` as a rule.
            activation: a name in `ACTIVATIONS` that does not gate, or an elementwise callable.
            bias: whether the projections have one.

        Raises:
            ValueError: the activation's name is unknown or gates a second projection.
        """
        super().__init__()
        self.activation_name = activation if isinstance(activation, str) else activation_name(activation)
        if isinstance(activation, str):
            plain = {name: function for name, (function, gated) in ACTIVATIONS.items() if not gated}
            if activation not in plain:
                raise ValueError(f"activation {activation!r}: expected one of {', '.join(plain)}")
            activation = plain[activation]
        self.activation = activation
        self.down = nn.Linear(d, d_bottleneck, bias=bias)
        self.up = nn.Linear(d_bottleneck, d, bias=bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Map (N, d) to (N, d)."""
        out: Tensor = rows + self.up(self.activation(self.down(rows)))
        return out
