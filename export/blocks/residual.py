"""An FFN with its pre-norm and residual, as the second half of a pre-norm Transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from export.blocks.ffn import FFN
from export.blocks.moe import MixtureOfExperts


class ResidualFFN(nn.Module):
    """`tokens + ffn(norm(tokens))`, position-wise."""

    def __init__(self, norm: nn.Module, ffn: FFN | MixtureOfExperts) -> None:
        super().__init__()
        self.norm = norm
        self.ffn = ffn

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, d) to (N, d), each row by itself."""
        out: Tensor = tokens + self.ffn(self.norm(tokens))
        return out
