"""What the adapters of mixture-of-experts families share: a proof with tokens for every expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from export.adapters.equality import SEQ_LENS, prove_equal
from export.adapters.registry import PackOptions
from export.blocks import FFN
from export.experts import expert_layers
from export.packed import Packed
from export.precision import KeepFloat64

_TOKENS_FOR_EACH: Final = 16  # of an even load; those of Switch's 128 experts are 2,048
_LONGEST: Final = 64


def prove_equal_to_experts(
    original: nn.Module, packed: Packed, options: PackOptions, run: Callable[[Tensor], Tensor] | None = None
) -> Packed:
    """`prove_equal` with tokens for every expert, and with the original's own float32 casts lifted.

    How many experts the random tokens were routed to is added to the architecture: no number of them is sure to reach
    an expert that a router hardly ever chooses.

    Args:
        original: maps (1, n, d) to (1, n, d), unless `run` says how it is called on (n, d).
        packed: see `prove_equal`.
        options: see `prove_equal`.
        run: see `original`.
    """

    def one_sequence(rows: Tensor) -> Tensor:
        with KeepFloat64():  # type: ignore[no-untyped-call]
            out: Tensor = original(rows.unsqueeze(0)).squeeze(0) if run is None else run(rows)
            return out

    layers = list(expert_layers(packed.module).values())
    most = max((layer.router.num_experts for layer in layers), default=0)
    crowd = (_LONGEST,) * -(-most * _TOKENS_FOR_EACH // _LONGEST)
    windows = [*SEQ_LENS, *([crowd] if crowd else [])]
    met: set[nn.Module] = set()

    def meet(expert: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args[0]):
            met.add(expert)

    hooks = [expert.register_forward_pre_hook(meet) for layer in layers for expert in layer.experts]
    try:
        proved = prove_equal(original, packed, one_sequence=one_sequence, seq_lens=windows, seed=options.seed)
    finally:
        for hook in hooks:
            hook.remove()
    if not layers:
        return proved
    return replace(proved, architecture={**proved.architecture, "experts_met_by_the_proof": len(met)})


def empty_ffn(d: int, d_ff: int, activation: str | nn.Module) -> FFN:
    """An FFN without biases whose weights the caller is about to put in."""
    with torch.device("meta"):
        return FFN(d, d_ff, activation=activation, bias=False)
