"""Positions, biases, windows and shared heads: per sequence, in torch and in the exported file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.models.t5.modeling_t5 import T5Attention

from export.blocks import BlockStack, RelativeBias, Rotary, SelfAttention, TransformerBlock, make_norm
from export.blocks.ffn import FFN
from export.graph import to_graph
from export.lowering import lower
from export.pipeline import Options, export_module
from export.precision import float64
from export.scan import check_weights
from service.manifest import read_manifest
from service.session import open_session

D, HEADS, SIZE = 24, 4, 8


def rotary(size: int = SIZE, max_positions: int = 600) -> Rotary:
    return Rotary(1e4 ** (-torch.arange(0, size, 2) / size), max_positions=max_positions)


FORMS: dict[str, dict[str, Any]] = {
    "rotary": {"rotary": rotary(), "causal": True},
    "rotary, both ways": {"rotary": rotary()},
    "rotary, grouped, window": {"rotary": rotary(), "causal": True, "num_kv_heads": 2, "window": 5},
    "rotary, one key head": {"rotary": rotary(), "causal": True, "num_kv_heads": 1, "bias": False, "out_bias": True},
    "relative bias": {"relative_bias": RelativeBias(8, 20, HEADS), "scale": 1.0, "bias": False},
    "relative bias, causal": {"relative_bias": RelativeBias(8, 20, HEADS, bidirectional=False), "causal": True},
}


@pytest.mark.parametrize("form", ["rotary, grouped, window", "rotary, both ways", "relative bias"])
def test_the_exported_file_equals_torch_and_is_exact(tmp_path: Path, form: str) -> None:
    module = SelfAttention(D, HEADS, head_size=SIZE, **FORMS[form]).eval().requires_grad_(False)
    model = to_graph(module, "sequence", D)
    check_weights(model)
    lower(model, "cpu")
    ir.save(model, tmp_path / "attention.onnx")
    session = open_session(tmp_path / "attention.onnx", "cpu", 2)
    for seq_lens in ([1], [257], [5, 1, 9, 2], [1] * 16, [64, 1, 17, 40]):
        tokens = torch.randn(sum(seq_lens), D)
        out = session.run(["out"], {"tokens": tokens.numpy(), "seq_lens": np.array(seq_lens)})[0]
        with float64(module):
            reference = module(tokens.double(), torch.tensor(seq_lens)).numpy()
        assert np.linalg.norm(out - reference) <= 2e-6 * np.linalg.norm(reference)
        ends = np.cumsum(seq_lens)
        for start, end in zip(ends - seq_lens, ends, strict=True):
            feeds = {"tokens": tokens[start:end].numpy(), "seq_lens": np.array([end - start])}
            assert session.run(["out"], feeds)[0].tobytes() == out[start:end].tobytes()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(sorted(FORMS)))
def test_a_sequence_is_the_same_alone_and_beside_others(seq_lens: list[int], form: str) -> None:
    module = SelfAttention(D, HEADS, head_size=SIZE, **FORMS[form]).eval().requires_grad_(False)
    with float64(module):
        tokens = torch.randn(sum(seq_lens), D, dtype=torch.float64)
        together = module(tokens, torch.tensor(seq_lens))
        parts = tokens.split(seq_lens)  # type: ignore[no-untyped-call]
        alone = torch.cat([module(rows, torch.tensor([len(rows)])) for rows in parts])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def scores(turn: Rotary, query: Tensor, key: Tensor, length: int) -> Tensor:
    """What the same query and key give at every pair of positions."""
    lengths = torch.tensor([length])
    queries, keys = (turn(row.expand(length, -1), lengths) for row in (query, key))
    found: Tensor = queries @ keys.T
    return found


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, SIZE, dtype=torch.float64)
    found = scores(rotary(), query, key, 20)
    for distance in range(-19, 20):
        diagonal = found.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (16, 100), (4, 3)])
def test_relative_bias_is_the_table_of_t5_read_by_distance(bidirectional: bool, buckets: int, farthest: int) -> None:
    bias = RelativeBias(buckets, farthest, 2, bidirectional=bidirectional)
    rows, near = bias(), torch.arange(300).clamp_max(farthest)
    for sign in (-1, 1):
        distances = sign * torch.arange(300)
        theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, farthest)
        torch.testing.assert_close(rows[:, sign * near + farthest], bias.weight[theirs].T, rtol=0, atol=0)


def test_one_value_everywhere_stays_that_value_whatever_the_scores() -> None:
    """Attention weights add up to one under every mask: equal values come through unchanged."""
    module = SelfAttention(D, HEADS, num_kv_heads=2, causal=True, window=3, rotary=rotary(6)).requires_grad_(False)
    width = HEADS * module.head_size + 2 * module.head_size
    module.qkv.weight[width:] = 0
    tokens = torch.randn(11, D)
    expected = F.linear(module.qkv.bias[width:].reshape(2, -1).repeat_interleave(2, 0).flatten(), module.out.weight)
    found = module(tokens, torch.tensor([7, 4]))
    torch.testing.assert_close(found, (expected + module.out.bias).expand_as(found), rtol=1e-5, atol=1e-5)


def test_a_token_beyond_the_window_changes_nothing() -> None:
    module = SelfAttention(D, HEADS, causal=True, window=3).requires_grad_(False)
    tokens = torch.randn(9, D)
    changed = tokens.clone()
    changed[2] += 1
    lengths = torch.tensor([9])
    moved = (module(tokens, lengths) != module(changed, lengths)).any(1)
    assert moved.tolist() == [False, False, True, True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"window": 4}, "window 4"),
        ({"window": 0, "causal": True}, "window 0"),
        ({"rotary": rotary(6)}, "rotary turns heads of 6, these have 8"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfAttention(D, HEADS, head_size=SIZE, **options)


@pytest.mark.parametrize(("buckets", "farthest"), [(2, 9), (32, 8)])
def test_buckets_that_cannot_hold_the_distances_are_refused(buckets: int, farthest: int) -> None:
    with pytest.raises(ValueError, match="cannot divide distances"):
        RelativeBias(buckets, farthest, 2)


def test_blocks_that_share_their_positions_become_one_bundle(tmp_path: Path) -> None:
    turn = rotary()
    blocks = [
        TransformerBlock.of(
            SelfAttention(
                D, HEADS, num_kv_heads=2, head_size=SIZE, causal=True, window=window, rotary=turn, bias=False
            ),
            FFN(D, 40, activation="swiglu", bias=False),
            make_norm("rmsnorm", D, 1e-6),
            make_norm("rmsnorm", D, 1e-6),
            place="pre",
        )
        for window in (4, 9)
    ]
    folder = export_module(BlockStack(blocks, make_norm("rmsnorm", D, 1e-6)), Options("stack", tmp_path))
    manifest = read_manifest(folder)
    assert {(v.precision, v.certificate.kind) for v in manifest.variants} == {("fp32", "exact"), ("int8", "exact")}
    facts = manifest.architecture
    assert (facts["heads"], facts["kv_heads"], facts["head_size"], facts["positions"]) == (HEADS, 2, SIZE, "rotary")
    assert "sliding_window" not in facts  # they differ
    assert manifest.max_sequence_tokens == turn.max_positions
    model = ir.load(folder / "fp32-cpu.onnx")
    shapes = [list(value.shape or ()) for value in model.graph.initializers.values()]
    assert shapes.count([turn.max_positions, SIZE // 2]) == 2  # cosines and sines, once for all layers
