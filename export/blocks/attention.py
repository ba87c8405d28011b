"""Self-attention over packed sequences.

In an export the attention is one intent node, `tokenslab::VarlenAttention`, which `export.lowering` gives a body for
each execution provider; everywhere else it is a loop over the sequences, in whatever dtype the tokens have.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VARLEN_ATTENTION: Final = "tokenslab::VarlenAttention"


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, *, num_heads: int, causal: bool, scale: float
) -> Tensor:
    """softmax(scale * q k^T) v for each head of each sequence.

    Args:
        q: (N, num_heads * head_size), as are `k` and `v` and the result.
        k: see `q`.
        v: see `q`.
        seq_lens: (S,) int64, each at least 1, sum N.
        num_heads: heads, side by side in the last axis.
        causal: whether a token attends to itself and earlier tokens only.
        scale: multiplies the scores.
    """
    if torch.compiler.is_exporting():
        attributes: dict[str, Any] = {"num_heads": num_heads, "causal": int(causal), "scale": scale}
        node: Tensor = torch.onnx.ops.symbolic(
            VARLEN_ATTENTION, (q, k, v, seq_lens), attributes, dtype=q.dtype, shape=q.shape, version=1
        )
        return node

    def heads(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), num_heads, -1).transpose(0, 1)

    lengths = seq_lens.tolist()
    attended = [
        F.scaled_dot_product_attention(heads(qs), heads(ks), heads(vs), is_causal=causal, scale=scale)
        .transpose(0, 1)
        .flatten(1)
        for qs, ks, vs in zip(*(_sequences(rows, lengths) for rows in (q, k, v)), strict=True)
    ]
    return torch.cat(attended)


def _sequences(rows: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = rows.split(lengths)  # type: ignore[no-untyped-call]
    return parts


class SelfAttention(nn.Module):
    """Multi-head self-attention. Queries, keys and values are one matmul, (d, 3 d), in that order."""

    def __init__(self, d: int, num_heads: int, *, bias: bool = True, causal: bool = False) -> None:
        """Make the projections with nn.Linear's own initialisation.

        Raises:
            ValueError: `num_heads` does not divide `d`.
        """
        super().__init__()
        if num_heads < 1 or d % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide d {d}")
        self.num_heads = num_heads
        self.causal = causal
        self.scale = 1 / math.sqrt(d // num_heads)
        self.qkv = nn.Linear(d, 3 * d, bias=bias)
        self.out = nn.Linear(d, d, bias=bias)

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        """Map (N, d) and (S,) to (N, d); rows of one sequence attend to one another."""
        q, k, v = self.qkv(tokens).chunk(3, dim=-1)
        attended = varlen_attention(q, k, v, seq_lens, num_heads=self.num_heads, causal=self.causal, scale=self.scale)
        out: Tensor = self.out(attended)
        return out
