"""The decoder block, post-norm or pre-norm, and stacks of them that read one memory."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from export.blocks.attention import SelfAttention
from export.blocks.cross_attention import CrossAttention
from export.blocks.ffn import FFN, Activation
from export.blocks.moe import MixtureOfExperts
from export.blocks.transformer import NormKind, NormPlace, make_norm


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention and an FFN or a mixture of experts, each with a residual and a norm.

    post: x = norm1(x + self(x)); x = norm2(x + cross(x, memory)); x = norm3(x + ffn(x))     (Vaswani et al. 2017)
    pre:  x = x + self(norm1(x)); x = x + cross(norm2(x), memory); x = x + ffn(norm3(x))
    """

    def __init__(
        self,
        d: int,
        num_heads: int,
        d_ff: int,
        *,
        d_memory: int | None = None,
        place: NormPlace = "post",
        norm: NormKind = "layernorm",
        eps: float = 1e-5,
        activation: str | Activation = "gelu",
        bias: bool = True,
        causal: bool = True,
    ) -> None:
        """Make a block of width `d` that reads a memory of width `d_memory` (None: `d`).

        Raises:
            ValueError: `num_heads` does not divide `d`, or the activation is unknown.
        """
        super().__init__()
        self.place = place
        self.attention = SelfAttention(d, num_heads, bias=bias, causal=causal)
        self.cross = CrossAttention(d, num_heads, d_memory=d_memory, bias=bias)
        self.ffn: FFN | MixtureOfExperts = FFN(d, d_ff, activation=activation, bias=bias)
        self.norm1 = make_norm(norm, d, eps, bias=bias)
        self.norm2 = make_norm(norm, d, eps, bias=bias)
        self.norm3 = make_norm(norm, d, eps, bias=bias)

    @classmethod
    def of(
        cls,
        attention: SelfAttention,
        cross: CrossAttention,
        ffn: FFN | MixtureOfExperts,
        norms: tuple[nn.Module, nn.Module, nn.Module],
        *,
        place: NormPlace,
    ) -> DecoderBlock:
        """A block of parts that exist, its norms in the order of the formulas."""
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block.place = place
        block.attention, block.cross, block.ffn = attention, cross, ffn
        block.norm1, block.norm2, block.norm3 = norms
        return block

    def forward(self, tokens: Tensor, seq_lens: Tensor, memory: Tensor, memory_seq_lens: Tensor) -> Tensor:
        """Map (N, d), (S,), (M, d_memory) and (S,) to (N, d)."""
        out: Tensor
        if self.place == "pre":
            tokens = tokens + self.attention(self.norm1(tokens), seq_lens)
            tokens = tokens + self.cross(self.norm2(tokens), seq_lens, memory, memory_seq_lens)
            out = tokens + self.ffn(self.norm3(tokens))
        else:
            tokens = self.norm1(tokens + self.attention(tokens, seq_lens))
            tokens = self.norm2(tokens + self.cross(tokens, seq_lens, memory, memory_seq_lens))
            out = self.norm3(tokens + self.ffn(tokens))
        return out


class DecoderStack(nn.Module):
    """Decoder blocks one after another, all reading the same memory, and an optional norm after the last."""

    def __init__(self, blocks: Iterable[DecoderBlock], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, tokens: Tensor, seq_lens: Tensor, memory: Tensor, memory_seq_lens: Tensor) -> Tensor:
        """Map (N, d), (S,), (M, d_memory) and (S,) to (N, d)."""
        for block in self.blocks:
            tokens = block(tokens, seq_lens, memory, memory_seq_lens)
        return tokens if self.norm is None else self.norm(tokens)
