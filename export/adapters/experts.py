"""What the adapters of mixture-of-experts families share: a proof with tokens for every expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from export.adapters.equality import SEQ_LENS, prove_equal
from export.adapters.registry import PackOptions
from export.adapters.transformers_parts import in_float64
from export.blocks import FFN
from export.experts import expert_layers
from export.packed import Packed

_TOKENS_FOR_EACH: Final = 16  # of an even load; those of Switch's 128 experts are 2,048
_LONGEST: Final = 64


def prove_equal_to_experts(
    original: nn.Module,
    packed: Packed,
    options: PackOptions,
    *,
    forward: Callable[..., Tensor] | None = None,
    layers: Sequence[nn.Module] | None = None,
) -> Packed:
    """`prove_equal` with tokens for every expert, and with the original's own float32 casts left in float64.

    How many experts the random tokens were routed to is added to the architecture: no number of them is sure to reach
    an expert that a router hardly ever chooses.

    Args:
        original: see `prove_equal`.
        packed: see `prove_equal`; it need not have experts.
        options: for the seed.
        forward: the original on a batch of one sequence, (1, n, d), and its memory (1, m, d) if it takes one, to
            (1, n, d); None: the original itself.
        layers: see `prove_equal`.
    """
    mixtures = list(expert_layers(packed.module).values())
    most = max((mixture.router.num_experts for mixture in mixtures), default=0)
    crowd = (_LONGEST,) * -(-most * _TOKENS_FOR_EACH // _LONGEST)
    windows = [*SEQ_LENS, *([crowd] if crowd else [])]
    met: set[nn.Module] = set()

    def meet(expert: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args[0]):
            met.add(expert)

    hooks = [expert.register_forward_pre_hook(meet) for mixture in mixtures for expert in mixture.experts]
    try:
        proved = prove_equal(
            original,
            packed,
            one_sequence=in_float64(forward if forward is not None else original),
            layers=layers,
            seq_lens=windows,
            seed=options.seed,
        )
    finally:
        for hook in hooks:
            hook.remove()
    if not mixtures:
        return proved
    return replace(proved, architecture={**proved.architecture, "experts_met_by_the_proof": len(met)})


def empty_ffn(d: int, d_ff: int, activation: str | nn.Module) -> FFN:
    """An FFN without biases whose weights the caller is about to put in."""
    with torch.device("meta"):
        return FFN(d, d_ff, activation=activation, bias=False)
