"""Cross-attention: the tokens of each sequence attend to that sequence's own memory.

In an export it is one intent node, `tokenslab::VarlenCrossAttention`; everywhere else a loop over the sequences.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VARLEN_CROSS_ATTENTION: Final = "tokenslab::VarlenCrossAttention"


def varlen_cross_attention(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, memory_seq_lens: Tensor, *, num_heads: int, scale: float
) -> Tensor:
    """softmax(scale * q k^T) v for each head of each sequence and its memory.

    Args:
        q: (N, num_heads * head_size), as is the result.
        k: (M, num_heads * head_size), as is `v`.
        v: see `k`.
        seq_lens: (S,) int64, each at least 1, sum N.
        memory_seq_lens: (S,) int64, each at least 1, sum M.
        num_heads: heads, side by side in the last axis.
        scale: multiplies the scores.
    """
    if torch.compiler.is_exporting():
        attributes: dict[str, Any] = {"num_heads": num_heads, "scale": scale}
        node: Tensor = torch.onnx.ops.symbolic(
            VARLEN_CROSS_ATTENTION,
            (q, k, v, seq_lens, memory_seq_lens),
            attributes,
            dtype=q.dtype,
            shape=q.shape,
            version=1,
        )
        return node

    def heads(rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), num_heads, -1).transpose(0, 1)

    lengths, memory_lengths = seq_lens.tolist(), memory_seq_lens.tolist()
    parts = (q.split(lengths), k.split(memory_lengths), v.split(memory_lengths))  # type: ignore[no-untyped-call]
    return torch.cat(
        [
            F.scaled_dot_product_attention(heads(qs), heads(ks), heads(vs), scale=scale).transpose(0, 1).flatten(1)
            for qs, ks, vs in zip(*parts, strict=True)
        ]
    )


class CrossAttention(nn.Module):
    """Multi-head attention from tokens to memory. Keys and values are one matmul, (d_memory, 2 num_heads head_size)."""

    def __init__(
        self,
        d: int,
        num_heads: int,
        *,
        d_memory: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        scale: float | None = None,
    ) -> None:
        """Make the projections with nn.Linear's own initialisation.

        Args:
            d: width of `tokens` and of the result.
            num_heads: heads of queries, keys and values.
            d_memory: width of `memory`; None: `d`.
            head_size: width of a head; None: d / num_heads.
            bias: whether the projections have one.
            scale: of the scores; None: 1 / sqrt(head_size).

        Raises:
            ValueError: `num_heads` does not divide `d`, and no head size is given.
        """
        super().__init__()
        if head_size is None:
            if num_heads < 1 or d % num_heads:
                raise ValueError(f"num_heads {num_heads} does not divide d {d}")
            head_size = d // num_heads
        width = num_heads * head_size
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = 1 / math.sqrt(head_size) if scale is None else scale
        self.q = nn.Linear(d, width, bias=bias)
        self.kv = nn.Linear(d if d_memory is None else d_memory, 2 * width, bias=bias)
        self.out = nn.Linear(width, d, bias=bias)

    def forward(self, tokens: Tensor, seq_lens: Tensor, memory: Tensor, memory_seq_lens: Tensor) -> Tensor:
        """Map (N, d), (S,), (M, d_memory) and (S,) to (N, d)."""
        k, v = self.kv(memory).chunk(2, dim=-1)
        attended = varlen_cross_attention(
            self.q(tokens), k, v, seq_lens, memory_seq_lens, num_heads=self.num_heads, scale=self.scale
        )
        out: Tensor = self.out(attended)
        return out
