"""The Transformer block, post-norm or pre-norm, and stacks of them as one module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn

from export.blocks.attention import SelfAttention
from export.blocks.ffn import FFN, Activation
from export.blocks.moe import MixtureOfExperts

NormKind = Literal["layernorm", "rmsnorm"]
NormPlace = Literal["post", "pre"]


def make_norm(kind: NormKind, d: int, eps: float, *, bias: bool = True) -> nn.Module:
    """LayerNorm or RMSNorm over the last axis; `eps` is always explicit (RMSNorm's default depends on the dtype)."""
    if kind == "rmsnorm":
        return nn.RMSNorm(d, eps=eps)
    return nn.LayerNorm(d, eps=eps, bias=bias)


class TransformerBlock(nn.Module):
    """Self-attention and an FFN, each with a residual and a norm.

    post: x = norm1(x + attention(x)); x = norm2(x + ffn(x))       (Vaswani et al. 2017)
    pre:  x = x + attention(norm1(x)); x = x + ffn(norm2(x))       (Xiong et al. 2020)

    `adapter1` and `adapter2`, None unless they are set, take what attention and FFN give before the residual.
    """

    adapter1: nn.Module | None
    adapter2: nn.Module | None

    def __init__(
        self,
        d: int,
        num_heads: int,
        d_ff: int,
        *,
        place: NormPlace = "post",
        norm: NormKind = "layernorm",
        eps: float = 1e-5,
        activation: str | Activation = "gelu",
        bias: bool = True,
        causal: bool = False,
    ) -> None:
        """Make a block of width `d`; `bias` holds for every projection and norm.

        Raises:
            ValueError: `num_heads` does not divide `d`, or the activation is unknown.
        """
        super().__init__()
        self.place = place
        self.attention = SelfAttention(d, num_heads, bias=bias, causal=causal)
        self.ffn: FFN | MixtureOfExperts = FFN(d, d_ff, activation=activation, bias=bias)
        self.norm1 = make_norm(norm, d, eps, bias=bias)
        self.norm2 = make_norm(norm, d, eps, bias=bias)
        self.adapter1, self.adapter2 = None, None

    @classmethod
    def of(
        cls,
        attention: SelfAttention,
        ffn: FFN | MixtureOfExperts,
        norm1: nn.Module,
        norm2: nn.Module,
        *,
        place: NormPlace,
    ) -> TransformerBlock:
        """A block of parts that exist: for families whose attention has more to say than `__init__` asks."""
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block.place = place
        block.attention, block.ffn, block.norm1, block.norm2 = attention, ffn, norm1, norm2
        block.adapter1, block.adapter2 = None, None
        return block

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        """Map (N, d) and (S,) to (N, d)."""
        out: Tensor
        if self.place == "pre":
            tokens = tokens + self._attend(self.norm1(tokens), seq_lens)
            out = tokens + self._feed_forward(self.norm2(tokens))
        else:
            tokens = self.norm1(tokens + self._attend(tokens, seq_lens))
            out = self.norm2(tokens + self._feed_forward(tokens))
        return out

    def _attend(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        attended: Tensor = self.attention(tokens, seq_lens)
        return attended if self.adapter1 is None else self.adapter1(attended)

    def _feed_forward(self, tokens: Tensor) -> Tensor:
        fed: Tensor = self.ffn(tokens)
        return fed if self.adapter2 is None else self.adapter2(fed)


class BlockStack(nn.Module):
    """Blocks one after another, and an optional norm after the last."""

    def __init__(self, blocks: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        """Map (N, d) and (S,) to (N, d)."""
        for block in self.blocks:
            tokens = block(tokens, seq_lens)
        return tokens if self.norm is None else self.norm(tokens)
