"""Randomly initialised FFNs and block stacks, for trials: the same dimensions and seed give the same weights."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from export.blocks import FFN, BlockStack, TransformerBlock, make_norm
from export.blocks.transformer import NormKind, NormPlace
from export.errors import ExportError

Init = Literal["linear", "normal"]


def random_ffn(
    d: int, d_ff: int, *, activation: str = "gelu", bias: bool = True, init: Init = "linear", seed: int = 0
) -> FFN:
    """Make an FFN; `init` is nn.Linear's default, or N(0, 1/fan_in) for weights and biases.

    Raises:
        ExportError: a dimension or the activation makes no sense.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            ffn = FFN(_positive("d", d), _positive("d_ff", d_ff), activation=activation, bias=bias)
        except ValueError as cause:
            raise ExportError(str(cause)) from cause
        _initialise(ffn, init)
        return ffn


def random_stack(
    d: int,
    num_heads: int,
    d_ff: int,
    *,
    layers: int = 1,
    place: NormPlace = "post",
    norm: NormKind = "layernorm",
    eps: float = 1e-5,
    activation: str = "gelu",
    bias: bool = True,
    causal: bool = False,
    init: Init = "linear",
    seed: int = 0,
) -> BlockStack:
    """Make a stack of blocks, pre-norm ones with a norm after the last, as they are used.

    Raises:
        ExportError: a dimension or the activation makes no sense.
    """
    for key, value in (("d", d), ("d_ff", d_ff), ("layers", layers), ("heads", num_heads)):
        _positive(key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            blocks = [
                TransformerBlock(
                    d,
                    num_heads,
                    d_ff,
                    place=place,
                    norm=norm,
                    eps=eps,
                    activation=activation,
                    bias=bias,
                    causal=causal,
                )
                for _ in range(layers)
            ]
        except ValueError as cause:
            raise ExportError(str(cause)) from cause
        last = make_norm(norm, d, eps, bias=bias) if place == "pre" else None
        stack = BlockStack(blocks, last)
        _initialise(stack, init)
        return stack


def _initialise(module: nn.Module, init: Init) -> None:
    if init == "linear":  # what nn.Linear did when it was made
        return
    for part in module.modules():
        if isinstance(part, nn.Linear):
            std = 1 / math.sqrt(part.in_features)
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.normal_(part.bias, std=std)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ExportError(f"{name} is {value}, expected at least 1")
    return value
