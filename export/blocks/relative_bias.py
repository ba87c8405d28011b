"""T5's relative position bias (Raffel et al. 2020): a learned number for each head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class RelativeBias(nn.Module):
    """A table of buckets, read by distance. Beyond `max_distance` every distance is in the last bucket.

    `forward()` gives the bias of every distance, so that attention needs no logarithm: see `varlen_attention`.
    """

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, *, bidirectional: bool = True) -> None:
        """Make the table, N(0, 1); half of the buckets are for later keys if `bidirectional`.

        Raises:
            ValueError: there are too few buckets, or `max_distance` lies among those for exact distances.
        """
        super().__init__()
        one_side = num_buckets // 2 if bidirectional else num_buckets
        if one_side < 2 or max_distance <= one_side // 2:
            raise ValueError(f"{num_buckets} buckets cannot divide distances up to {max_distance}")
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.randn(num_buckets, num_heads))
        distances = torch.arange(-max_distance, max_distance + 1)
        self.buckets = nn.Buffer(_buckets(distances, num_buckets, max_distance, bidirectional), persistent=False)

    def forward(self) -> Tensor:
        """(num_heads, 2 max_distance + 1): the bias of key position - query position + max_distance."""
        return self.weight[self.buckets].T


def _buckets(distances: Tensor, count: int, max_distance: int, bidirectional: bool) -> Tensor:
    """As transformers' `T5Attention._relative_position_bucket`, float32 logarithms and all: bounds are hit exactly."""
    if bidirectional:
        count //= 2
        side = (distances > 0).long() * count
        distances = distances.abs()
    else:
        side = torch.zeros_like(distances)
        distances = (-distances).clamp_min(0)
    exact = count // 2
    logarithms = torch.log(distances.float() / exact) / math.log(max_distance / exact)
    far = (exact + (logarithms * (count - exact)).clamp_min(0).long()).clamp_max(count - 1)
    return side + torch.where(distances < exact, distances, far)
