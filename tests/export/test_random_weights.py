"""Dimensions and a seed decide every weight."""

from __future__ import annotations

import math

import pytest
import torch

from export.adapters.random_weights import random_ffn, random_stack
from export.errors import ExportError


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_s_own_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (random_stack(8, 2, 16, layers=2, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.ffn.up.weight"], other["blocks.0.ffn.up.weight"])


def test_normal_weights_have_the_variance_of_their_fan_in() -> None:
    ffn = random_ffn(256, 512, init="normal", seed=3).requires_grad_(False)
    for linear in (ffn.up, ffn.down):
        assert float(linear.weight.std()) == pytest.approx(1 / math.sqrt(linear.in_features), rel=0.02)


def test_pre_norm_stacks_end_with_a_norm() -> None:
    assert random_stack(8, 2, 16, place="pre").norm is not None
    assert random_stack(8, 2, 16, place="post").norm is None


def test_impossible_dimensions_are_refused() -> None:
    with pytest.raises(ExportError, match="num_heads 3 does not divide d 8"):
        random_stack(8, 3, 16)
    with pytest.raises(ExportError, match="d_ff is 0, expected at least 1"):
        random_ffn(8, 0)
    with pytest.raises(ExportError, match="activation 'x'"):
        random_ffn(8, 8, activation="x")
