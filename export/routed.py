"""Where the tokens of a parity case were sent, and by what margin. Pure numpy: measured at export, repeated by verify.

A choice of experts is a step: rounding flips it for tokens whose best and next logits are close, and a token that goes
elsewhere has another answer, not a noisy one. Parity is therefore stated over tokens with a margin that the noise of a
variant does not reach, and flips are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from service.manifest import ExpertLoad, Routing
from service.packing import Int64

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
T = TypeVar("T")

# Standard deviations of a difference of two logits: of 10,000 tokens at that margin one is expected to flip.
_DEVIATIONS: Final = 4 * 2**0.5
_MEDIAN_TO_DEVIATION: Final = 1.4826  # of a normal distribution; tokens that went elsewhere before do not count


@dataclass(frozen=True, slots=True, eq=False)
class RoutedLayer:
    """The logits of one router for the tokens of a case."""

    logits: Float64  # (N, experts)
    top_k: int

    @property
    def chosen(self) -> Int64:
        """(N, top_k), best first; of equal logits the lower index."""
        order: Int64 = np.argsort(-self.logits, axis=1, kind="stable")
        return order[:, : self.top_k]

    @property
    def margins(self) -> Float64:
        """(N,): how far the last expert that was chosen is above the first that was not; inf where all are."""
        ranked = -np.sort(-self.logits, axis=1)
        if self.top_k == ranked.shape[1]:
            return np.full(len(ranked), np.inf)
        gap: Float64 = ranked[:, self.top_k - 1] - ranked[:, self.top_k]
        return gap


def with_margin(reference: Sequence[RoutedLayer], routing: Sequence[Routing], tokens: int) -> Bool:
    """(N,): whether a token's margin is beyond the noise of the variant at every router."""
    counted = np.ones(tokens, np.bool_)
    for layer, measured in zip(reference, routing, strict=True):
        counted &= layer.margins > measured.margin
    return counted


def compare_routing(
    reference: Sequence[Sequence[RoutedLayer]], found: Sequence[Sequence[npt.NDArray[np.floating]]]
) -> list[Routing]:
    """State noise, margin and flips of each router.

    Args:
        reference: for each case, its layers in the order they run.
        found: the same for a variant, logits (N, experts).
    """
    rows = []
    for layers, logits in zip(_by_layer(reference), _by_layer(found), strict=True):
        top_k = layers[0].top_k
        whole = RoutedLayer(np.concatenate([layer.logits for layer in layers]), top_k)
        variant = RoutedLayer(np.concatenate(logits).astype(np.float64), top_k)
        noise = variant.logits - whole.logits
        noise -= noise.mean(axis=1, keepdims=True)  # what all experts share moves no choice
        deviation = _MEDIAN_TO_DEVIATION * float(np.median(np.abs(noise)))
        flipped = (np.sort(variant.chosen, axis=1) != np.sort(whole.chosen, axis=1)).any(axis=1)
        margin = _DEVIATIONS * deviation
        near = whole.margins <= margin
        rows.append(
            Routing(
                noise=deviation,
                margin=margin,
                tokens=len(flipped),
                without_margin=int(near.sum()),
                flipped=int(flipped.sum()),
                flipped_with_margin=int((flipped & ~near).sum()),
            )
        )
    return rows


def expert_loads(cases: Sequence[Sequence[RoutedLayer]]) -> list[ExpertLoad]:
    """The share of the choices that went to each expert, layer by layer."""
    loads = []
    for layers in _by_layer(cases):
        chosen = np.concatenate([layer.chosen.ravel() for layer in layers])
        shares = np.bincount(chosen, minlength=layers[0].logits.shape[1]) / len(chosen)
        used = shares[shares > 0]
        loads.append(ExpertLoad(shares=shares.tolist(), entropy_bits=float(-(used * np.log2(used)).sum()) + 0.0))
    return loads


def _by_layer(cases: Sequence[Sequence[T]]) -> Iterator[tuple[T, ...]]:
    return zip(*cases, strict=True)
