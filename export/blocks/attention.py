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

from export.blocks.relative_bias import RelativeBias
from export.blocks.rotary import Rotary

VARLEN_ATTENTION: Final = "tokenslab::VarlenAttention"


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens: Tensor,
    *,
    num_heads: int,
    causal: bool,
    scale: float,
    num_kv_heads: int | None = None,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + bias) v for each head of each sequence.

    Args:
        q: (N, num_heads * head_size), as is the result.
        k: (N, num_kv_heads * head_size), as is `v`; each of its heads serves num_heads / num_kv_heads of q's in a row.
        v: see `k`.
        seq_lens: (S,) int64, each at least 1, sum N.
        num_heads: heads, side by side in the last axis.
        causal: whether a token attends to itself and earlier tokens only.
        scale: multiplies the scores.
        num_kv_heads: heads of `k` and `v`; None: as many as `num_heads`.
        window: how many tokens a token attends to, itself included; None: all. Only with `causal`.
        bias: (num_heads, 2 D + 1), added to the scores by key position - query position, clipped to [-D, D].
    """
    num_kv_heads = num_kv_heads or num_heads
    if torch.compiler.is_exporting():
        attributes: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": q.shape[1] // num_heads,
            "causal": int(causal),
            "scale": scale,
            "window": window or 0,
        }
        inputs = (q, k, v, seq_lens) if bias is None else (q, k, v, seq_lens, bias)
        node: Tensor = torch.onnx.ops.symbolic(
            VARLEN_ATTENTION, inputs, attributes, dtype=q.dtype, shape=q.shape, version=1
        )
        return node

    def heads(rows: Tensor, count: int) -> Tensor:
        return rows.reshape(len(rows), count, -1).transpose(0, 1).repeat_interleave(num_heads // count, dim=0)

    lengths = seq_lens.tolist()
    attended = []
    for qs, ks, vs in zip(*(_sequences(rows, lengths) for rows in (q, k, v)), strict=True):
        parts = heads(qs, num_heads), heads(ks, num_kv_heads), heads(vs, num_kv_heads)
        mask = _mask(len(qs), q, causal=causal, window=window, bias=bias)
        one = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
        attended.append(one.transpose(0, 1).flatten(1))
    return torch.cat(attended)


def _mask(length: int, like: Tensor, *, causal: bool, window: int | None, bias: Tensor | None) -> Tensor | None:
    """What is added to the scores, (length, length) or (num_heads, length, length), if it is not causality alone."""
    if bias is None and window is None:
        return None
    positions = torch.arange(length)
    distances = positions - positions.unsqueeze(1)
    if bias is None:
        mask = like.new_zeros(length, length)
    else:
        farthest = bias.shape[1] // 2
        mask = bias[:, distances.clamp(-farthest, farthest) + farthest]
    hidden = distances <= -(window or length)
    return mask.masked_fill(hidden | (distances > 0) if causal else hidden, -math.inf)


def _sequences(rows: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = rows.split(lengths)  # type: ignore[no-untyped-call]
    return parts


class SelfAttention(nn.Module):
    """Multi-head self-attention. Queries, keys and values are one matmul, (d, (num_heads + 2 num_kv_heads) head_size).

    They come in that order; with fewer key and value heads it is grouped-query attention (Ainslie et al. 2023).
    """

    def __init__(
        self,
        d: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        rotary: Rotary | None = None,
        relative_bias: RelativeBias | None = None,
    ) -> None:
        """Make the projections with nn.Linear's own initialisation.

        Args:
            d: width of `tokens` and of the result.
            num_heads: heads of the queries.
            num_kv_heads: heads of keys and values, a divisor of `num_heads`; None: `num_heads`.
            head_size: width of a head; None: d / num_heads.
            bias: whether the projections have one.
            out_bias: whether the last projection has one; None: as `bias`.
            causal: whether a token attends to itself and earlier tokens only.
            scale: of the scores; None: 1 / sqrt(head_size).
            window: tokens that a token attends to, itself included; None: all.
            rotary: turns queries and keys by their positions; blocks may share it.
            relative_bias: added to the scores; blocks may share it.

        Raises:
            ValueError: the dimensions do not fit one another, or a window is not causal.
        """
        super().__init__()
        if head_size is None:
            if num_heads < 1 or d % num_heads:
                raise ValueError(f"num_heads {num_heads} does not divide d {d}")
            head_size = d // num_heads
        num_kv_heads = num_kv_heads or num_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
        if window is not None and (window < 1 or not causal):
            raise ValueError(f"window {window}: expected at least 1, and causal attention")
        if rotary is not None and rotary.head_size != head_size:
            raise ValueError(f"rotary turns heads of {rotary.head_size}, these have {head_size}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.causal = causal
        self.scale = 1 / math.sqrt(head_size) if scale is None else scale
        self.window = window
        self.rotary = rotary
        self.relative_bias = relative_bias
        self.qkv = nn.Linear(d, (num_heads + 2 * num_kv_heads) * head_size, bias=bias)
        self.out = nn.Linear(num_heads * head_size, d, bias=bias if out_bias is None else out_bias)

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        """Map (N, d) and (S,) to (N, d); rows of one sequence attend to one another."""
        width_q, width_kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        qkv: Tensor = self.qkv(tokens)
        if self.rotary is None:
            q, k, v = qkv.split([width_q, width_kv, width_kv], dim=-1)  # type: ignore[no-untyped-call]
        else:  # queries and keys at once
            qk, v = qkv.split([width_q + width_kv, width_kv], dim=-1)  # type: ignore[no-untyped-call]
            q, k = self.rotary(qk, seq_lens).split([width_q, width_kv], dim=-1)
        attended = varlen_attention(
            q,
            k,
            v,
            seq_lens,
            num_heads=self.num_heads,
            causal=self.causal,
            scale=self.scale,
            num_kv_heads=self.num_kv_heads,
            window=self.window,
            bias=None if self.relative_bias is None else self.relative_bias(),
        )
        out: Tensor = self.out(attended)
        return out
