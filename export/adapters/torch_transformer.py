"""nn.TransformerEncoderLayer and nn.TransformerEncoder -> packed blocks that share their weights.

The proof runs the original's own forward, sequence by sequence in float64: a subclass that computes something else is
refused, whatever its class says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from export.blocks import BlockStack, TransformerBlock
from export.errors import ExportError, ProofError, first_line
from export.packed import Packed, pack_stack
from export.precision import float64_layer_by_layer

_SEQ_LENS: Final = ((3,), (1, 5, 9, 2), (17, 1))
_BAR: Final = 1e-12  # float64 has 2e-16; measured 1e-15


def pack_encoder(original: nn.TransformerEncoder | nn.TransformerEncoderLayer, *, causal: bool, seed: int) -> Packed:
    """Put the weights of `original`, an exportable copy, into packed blocks and prove that they compute the same.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    if isinstance(original, nn.TransformerEncoder):
        layers, norm = list(original.layers), original.norm
    else:
        layers, norm = [original], None
    if not layers:
        raise ExportError(f"{type(original).__name__} has no layers")
    blocks = []
    for index, layer in enumerate(layers):
        try:
            blocks.append(_block(layer, index, causal))
        except (AttributeError, TypeError, ValueError) as cause:  # a part was replaced by something else
            raise ExportError(
                f"layer {index} ({type(layer).__name__}) has no packed form: {first_line(cause)}"
            ) from cause
    stack = BlockStack(blocks, norm).eval()
    packed = pack_stack(stack, type(original).__name__)
    error = _prove(original, packed, [*layers, *([] if norm is None else [norm])], causal=causal, seed=seed)
    return pack_stack(stack, type(original).__name__, {"equals the original module, per sequence": error})


def _block(layer: nn.Module, index: int, causal: bool) -> TransformerBlock:
    where = f"layer {index} ({type(layer).__name__})"
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise ExportError(f"{where}: expected an nn.TransformerEncoderLayer")
    attention = layer.self_attn
    if not isinstance(attention, nn.MultiheadAttention) or attention.in_proj_weight is None:
        raise ExportError(f"{where}: self_attn must be an nn.MultiheadAttention with one in_proj_weight")
    if not isinstance(attention.in_proj_weight, nn.Parameter):
        raise ExportError(
            f"{where}: in_proj_weight is computed from other tensors (a parametrization); remove it first, leaving the "
            "weight in place"
        )
    if attention.bias_k is not None or attention.add_zero_attn:
        raise ExportError(f"{where}: add_bias_kv and add_zero_attn add a key to every sequence and have no packed form")
    with torch.device("meta"):  # every weight is replaced below
        block = TransformerBlock(
            attention.embed_dim,
            attention.num_heads,
            layer.linear1.out_features,
            place="pre" if layer.norm_first else "post",
            activation=layer.activation,
            causal=causal,
        )
    block.attention.qkv.weight = attention.in_proj_weight
    block.attention.qkv.bias = attention.in_proj_bias
    block.attention.out = attention.out_proj
    block.ffn.up, block.ffn.down = layer.linear1, layer.linear2
    block.norm1, block.norm2 = layer.norm1, layer.norm2
    return block


def _prove(original: nn.Module, packed: Packed, original_layers: list[nn.Module], *, causal: bool, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for seq_lens in _SEQ_LENS:
        tokens = torch.randn(sum(seq_lens), packed.d_in, generator=generator, dtype=torch.float64)
        try:
            with float64_layer_by_layer(original_layers), _no_fast_path():
                expected = torch.cat([_run(original, rows, causal) for rows in _split(tokens, seq_lens)])
        except Exception as cause:
            raise ExportError(f"{type(original).__name__} failed in float64: {first_line(cause)}") from cause
        with float64_layer_by_layer(packed.layers):
            found: Tensor = packed.module(tokens, torch.tensor(seq_lens))
        if found.shape != expected.shape:
            raise ProofError(f"{type(original).__name__} gives {tuple(expected.shape)}, expected {tuple(found.shape)}")
        scale = expected.norm().clamp_min(torch.finfo(expected.dtype).tiny)  # a LayerNorm of width 1 gives zeros
        error = float((found - expected).norm() / scale)
        if not error <= _BAR:
            raise ProofError(
                f"{type(original).__name__} does not compute what its weights say: it differs by {error:.1e} "
                f"(relative) from the packed {'causal' if causal else 'bidirectional'} block at sequence lengths "
                f"{list(seq_lens)}, allowed {_BAR:.0e}; a subclass with another forward is not an encoder"
            )
        worst = max(worst, error)
    return worst


def _run(original: nn.Module, rows: Tensor, causal: bool) -> Tensor:
    layer = original.layers[0] if isinstance(original, nn.TransformerEncoder) else original
    assert isinstance(layer, nn.TransformerEncoderLayer)
    axis = 0 if layer.self_attn.batch_first else 1
    mask = nn.Transformer.generate_square_subsequent_mask(len(rows), dtype=rows.dtype) if causal else None
    out: Tensor = original(rows.unsqueeze(axis), mask)
    return out.squeeze(axis)


def _split(tokens: Tensor, seq_lens: tuple[int, ...]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = tokens.split(list(seq_lens))  # type: ignore[no-untyped-call]
    return parts


@contextmanager
def _no_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
