"""The textbook's questions, answered from a manifest: what does attention cost beside the FFN, and from what length on?

Exact integers, FLOPs as 2 x multiply-adds. Pure: no file, no torch. A memory is taken to be as long as its sequence.
"""

from __future__ import annotations

from typing import Final

from service.manifest import AttentionLayers, Composition, Manifest

FLOAT_BYTES: Final = 4
_LONGEST: Final = 1 << 32  # tokens; attention that has not overtaken the FFN there never will


def attended_pairs(attention: AttentionLayers, tokens: int) -> int:
    """Pairs of a token and one that it attends to, over a sequence of `tokens` (and a memory of as many rows)."""
    if attention.of_memory or not attention.causal:
        return tokens * tokens
    window = min(attention.window or tokens, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def score_flops(composition: Composition, tokens: int) -> int:
    """Of all scores q k^T and of the sums weighted by them, over one sequence: 4 heads head_size for each pair."""
    return sum(4 * a.layers * a.heads * a.head_size * attended_pairs(a, tokens) for a in composition.attention)


def attention_flops(manifest: Manifest, tokens: int) -> int:
    """Of everything that is attention, over one sequence: projections, those of its memory, and scores."""
    made = _recorded(manifest)
    per_token = made.attention_flops_per_token + (manifest.flops_per_memory_row or 0)
    return tokens * per_token + score_flops(made, tokens)


def ffn_flops(manifest: Manifest, tokens: int) -> int:
    """Of the FFNs, over `tokens` tokens in whatever sequences."""
    return tokens * _recorded(manifest).ffn_flops_per_token


def overtakes_at(manifest: Manifest) -> int | None:
    """The shortest sequence over which attention costs more than the FFN; None: it never does.

    With d_ff = 4 d it is 2 d + 1 tokens (scores 4 n d a token, projections 8 d^2, FFN 16 d^2).
    """

    def over(tokens: int) -> bool:
        return attention_flops(manifest, tokens) > ffn_flops(manifest, tokens)

    if not _recorded(manifest).attention or not over(_LONGEST):
        return None
    below, at = 0, _LONGEST  # attention's cost for each token never falls with the length
    while at - below > 1:
        middle = (below + at) // 2
        below, at = (below, middle) if over(middle) else (middle, at)
    return at


def hidden_bytes(composition: Composition, tokens: int) -> int:
    """Of the widest activation inside an FFN, (tokens, d_ff) float32."""
    return FLOAT_BYTES * tokens * composition.hidden_units


def score_bytes(composition: Composition, tokens: int) -> int:
    """Of one layer's scores over one sequence, (heads, tokens, tokens) float32, for kernels that hold them all."""
    return FLOAT_BYTES * tokens * tokens * max((a.heads for a in composition.attention), default=0)


def _recorded(manifest: Manifest) -> Composition:
    assert manifest.composition is not None, "see Manifest.composition"
    return manifest.composition
