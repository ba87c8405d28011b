"""Sparse mixture of experts: a router sends each token to its top-k experts (Shazeer et al. 2017; Fedus et al. 2021).

Each expert runs once over the tokens of the whole window that were routed to it. There is no capacity: a token that
was dropped because others came first would depend on its neighbours. In an export the choice of experts is one intent
node, `tokenslab::Route`, so that a graph says where it routes; gathering, experts and summing are standard operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from export.blocks.ffn import FFN

ROUTE: Final = "tokenslab::Route"


def route(logits: Tensor, *, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, best first; of equal logits the lower index wins.

    Args:
        logits: (N, num_experts).
        top_k: experts for each token.
        normalise: whether a token's weights sum to 1, a softmax over its chosen logits (Mixtral); otherwise they are
            probabilities among all experts (Switch).

    Returns:
        The experts, int64 (N, top_k), and their weights, (N, top_k).
    """
    if torch.compiler.is_exporting():
        shape = (logits.shape[0], top_k)
        chosen, weights = torch.onnx.ops.symbolic_multi_out(
            ROUTE,
            (logits,),
            {"top_k": top_k, "normalise": int(normalise)},
            dtypes=(torch.int64, logits.dtype),
            shapes=(shape, shape),
            version=1,
        )
        return chosen, weights
    # torch.topk promises nothing about equal values
    ranked, experts = logits.sort(dim=-1, descending=True, stable=True)
    chosen = experts[:, :top_k]
    if normalise:
        return chosen, ranked[:, :top_k].softmax(dim=-1)
    return chosen, logits.softmax(dim=-1).gather(1, chosen)


class Router(nn.Module):
    """One linear map from a token to a logit for each expert, and the choice among them."""

    def __init__(self, d: int, num_experts: int, top_k: int, *, normalise: bool, bias: bool = False) -> None:
        """Make the projection with nn.Linear's own initialisation; see `route` for `top_k` and `normalise`.

        Raises:
            ValueError: `top_k` is not between 1 and `num_experts`.
        """
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k {top_k}: expected 1 to {num_experts}, the number of experts")
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalise = normalise
        self.projection = nn.Linear(d, num_experts, bias=bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map (N, d) to the chosen experts, int64 (N, top_k), and their weights, (N, top_k)."""
        return route(self.projection(tokens), top_k=self.top_k, normalise=self.normalise)


class MixtureOfExperts(nn.Module):
    """The weighted sum of each token's top-k experts; the experts are FFNs of one shape."""

    def __init__(self, router: Router, experts: Iterable[FFN]) -> None:
        """Put `router` before `experts`, one for each of its logits.

        Raises:
            ValueError: their number, widths, hidden units or biases differ.
        """
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        if len(self.experts) != router.num_experts:
            raise ValueError(f"{len(self.experts)} experts, but the router has {router.num_experts} logits")
        shapes = {
            (e.up.in_features, e.down.in_features, e.down.out_features, e.gated, e.up.bias is None)
            for e in experts_of(self)
        }
        d = router.projection.in_features
        if len(shapes) != 1 or {(width, out) for width, _, out, _, _ in shapes} != {(d, d)}:
            raise ValueError(f"the experts must be FFNs of one shape, {d} wide as the router is")

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (N, d) to (N, d), each row by itself. A row's experts are summed in the order of their indices."""
        chosen, weights = self.router(tokens)
        places, shares = chosen.flatten(), weights.flatten()
        token_of_place = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1).expand_as(chosen).flatten()
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            taken = (places == index).nonzero().squeeze(1)
            rows = token_of_place.index_select(0, taken)
            answer = expert(tokens.index_select(0, rows)) * shares.index_select(0, taken).unsqueeze(1)
            mixed = mixed.index_add(0, rows, answer)
        return mixed


def experts_of(moe: MixtureOfExperts) -> list[FFN]:
    """The experts, typed."""
    return [expert for expert in moe.experts if isinstance(expert, FFN)]
