"""The reference blocks compute what their papers say, on packed tokens, in float64 too."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from export.blocks import ACTIVATIONS, FFN, BlockStack, TransformerBlock, varlen_attention
from export.graph import to_graph
from service.session import open_session

# The textbook's worked example: d=4, d_ff=8, three tokens, ReLU, bias -0.1 on each hidden unit. Row j feeds unit j.
UP = [
    [0.5, -0.3, 0.2, 0.1],
    [-0.4, 0.6, 0.1, -0.2],
    [0.3, 0.3, -0.5, 0.4],
    [-0.2, -0.1, 0.7, 0.3],
    [0.6, 0.2, 0.1, -0.5],
    [-0.3, 0.4, -0.2, 0.6],
    [0.1, -0.6, 0.3, 0.2],
    [0.2, 0.5, 0.4, -0.3],
]
TOKENS = torch.tensor([[1.0, 0.5, -0.2, 0.3], [-0.5, 1.2, 0.4, -0.1], [0.3, -0.8, 1.0, 0.6]])
Run = Callable[[Tensor], Tensor]


def textbook_ffn(contribution: float | None = None, units: list[int] | None = None) -> FFN:
    """Down is drawn from a seed; `units` contribute `contribution` to every output instead, where given."""
    ffn = FFN(4, 8, activation="relu").requires_grad_(False)
    ffn.up.weight.copy_(torch.tensor(UP))
    ffn.up.bias.fill_(-0.1)
    ffn.down.weight.normal_(generator=torch.Generator().manual_seed(0))
    ffn.down.bias.zero_()
    if contribution is not None:
        ffn.down.weight[:, units] = contribution
    return ffn.eval()


def silent_units() -> list[list[int]]:
    """Hidden units below zero, for each token; every token has active ones too."""
    hidden = F.linear(TOKENS, torch.tensor(UP), torch.full((8,), -0.1))
    assert (hidden.abs() > 1e-3).all()
    silent = [torch.nonzero(row < 0).flatten().tolist() for row in hidden]
    assert all(0 < len(units) < 8 for units in silent)
    return silent


def in_torch(ffn: FFN, _folder: Path) -> Run:
    return ffn


def over_onnx(ffn: FFN, folder: Path) -> Run:
    path = folder / f"{len(list(folder.iterdir()))}.onnx"
    ir.save(to_graph(ffn, "position-wise", 4), path)
    session = open_session(path, "cpu", 1)
    return lambda tokens: torch.from_numpy(session.run(["out"], {"tokens": tokens.numpy()})[0])


@pytest.mark.parametrize("form", [in_torch, over_onnx])
def test_swapping_two_tokens_swaps_their_outputs_and_leaves_the_third_alone(
    tmp_path: Path, form: Callable[[FFN, Path], Run]
) -> None:
    run = form(textbook_ffn(), tmp_path)
    out, swapped = run(TOKENS), run(TOKENS[[2, 1, 0]])
    assert not torch.allclose(out[0], out[2])
    torch.testing.assert_close(swapped, out[[2, 1, 0]], rtol=1e-6, atol=1e-6)
    if form is over_onnx:
        assert swapped.numpy().tobytes() == out[[2, 1, 0]].numpy().tobytes()


@pytest.mark.parametrize("form", [in_torch, over_onnx])
def test_a_hidden_unit_below_zero_contributes_nothing_and_one_above_does(
    tmp_path: Path, form: Callable[[FFN, Path], Run]
) -> None:
    out = form(textbook_ffn(), tmp_path)(TOKENS)
    token, silent = 1, silent_units()[1]
    active = [unit for unit in range(8) if unit not in silent]
    with_silent = form(textbook_ffn(1e9, silent), tmp_path)(TOKENS)
    torch.testing.assert_close(with_silent[token], out[token])
    assert float(with_silent[0].abs().max()) > 1e6, "another token's active units are among them"
    with_active = form(textbook_ffn(1e9, active[:1]), tmp_path)(TOKENS)
    assert float(with_active[token].abs().min()) > 1e6


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_ffn_is_down_of_the_activation_of_up(activation: str, bias: bool) -> None:
    ffn = FFN(5, 7, activation=activation, bias=bias)
    tokens = torch.randn(6, 5)
    weight, up_bias = ffn.up.weight, ffn.up.bias if bias else torch.zeros(len(ffn.up.weight))
    hidden = tokens @ weight.T + up_bias
    formulas = {
        "relu": lambda x: x.clamp_min(0),
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + torch.exp(-x)),
    }
    if activation in formulas:
        hidden = formulas[activation](hidden)
    else:
        plain = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}[activation]
        hidden = formulas[plain](hidden[:, :7]) * hidden[:, 7:]
    expected = hidden @ ffn.down.weight.T + (ffn.down.bias if bias else 0)
    torch.testing.assert_close(ffn(tokens), expected)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, causal: bool, scale: float) -> Tensor:
    out = torch.zeros_like(q)
    size = q.shape[1] // num_heads
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        for row in range(len(q)):
            seen = row + 1 if causal else len(q)
            weights = torch.softmax(scale * (k[:seen, part] @ q[row, part]), dim=0)
            out[row, part] = weights @ v[:seen, part]
    return out


@given(
    seq_lens=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    num_heads=st.integers(1, 3),
    size=st.integers(1, 4),
    causal=st.booleans(),
    scale=st.floats(0.1, 2.0),
    seed=st.integers(0, 2**31),
)
def test_attention_runs_within_each_sequence_alone(
    seq_lens: list[int], num_heads: int, size: int, causal: bool, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, sum(seq_lens), num_heads * size, generator=generator, dtype=torch.float64)
    found = varlen_attention(q, k, v, torch.tensor(seq_lens), num_heads=num_heads, causal=causal, scale=scale)
    start = 0
    for length in seq_lens:
        rows = slice(start, start + length)
        expected = naive_attention(q[rows], k[rows], v[rows], num_heads=num_heads, causal=causal, scale=scale)
        torch.testing.assert_close(found[rows], expected, rtol=1e-10, atol=1e-10)
        start += length


@pytest.mark.parametrize("place", ["post", "pre"])
def test_block_adds_and_norms_in_the_stated_order(place: str) -> None:
    block = TransformerBlock(8, 2, 16, place="post" if place == "post" else "pre", norm="rmsnorm", eps=1e-6)
    tokens, seq_lens = torch.randn(5, 8), torch.tensor([2, 3])

    def norm(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    if place == "post":
        middle = norm(tokens + block.attention(tokens, seq_lens))
        expected = norm(middle + block.ffn(middle))
    else:
        middle = tokens + block.attention(norm(tokens), seq_lens)
        expected = middle + block.ffn(norm(middle))
    torch.testing.assert_close(block(tokens, seq_lens), expected)


def test_causal_block_never_looks_ahead() -> None:
    stack = BlockStack([TransformerBlock(8, 2, 16, causal=True).double() for _ in range(2)])
    tokens, seq_lens = torch.randn(6, 8, dtype=torch.float64), torch.tensor([6])
    before = stack(tokens, seq_lens)
    tokens[4] += 1
    after = stack(tokens, seq_lens)
    torch.testing.assert_close(after[:4], before[:4], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(after[4:], before[4:])


def test_without_bias_no_projection_or_norm_has_one() -> None:
    block = TransformerBlock(8, 2, 16, bias=False)
    assert not [name for name, _ in block.named_parameters() if "bias" in name]


def test_impossible_dimensions_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads 3 does not divide d 8"):
        TransformerBlock(8, 3, 16)
    with pytest.raises(ValueError, match="activation 'tanhh': expected one of relu"):
        FFN(4, 8, activation="tanhh")
