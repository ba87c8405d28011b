"""This package's own blocks, packed already: FFN, MixtureOfExperts, TransformerBlock, DecoderBlock and their stacks."""

from __future__ import annotations

from torch import nn

from export.adapters.registry import PackOptions, register_adapter
from export.adapters.row_proof import prove_rows_independent
from export.blocks import FFN, BlockStack, DecoderBlock, DecoderStack, MixtureOfExperts, TransformerBlock
from export.errors import ExportError
from export.packed import Packed, pack_decoder, pack_ffn, pack_moe, pack_stack
from export.precision import float64


def _is_ffn(module: nn.Module) -> bool:
    return type(module) is FFN  # a subclass may compute anything


def _is_moe(module: nn.Module) -> bool:
    return type(module) is MixtureOfExperts


def _is_block(module: nn.Module) -> bool:
    return type(module) in (BlockStack, TransformerBlock)


def _is_decoder(module: nn.Module) -> bool:
    return type(module) in (DecoderStack, DecoderBlock)


@register_adapter(_is_ffn)
def pack_own_ffn(ffn: FFN, options: PackOptions) -> Packed:
    """Describe an FFN of ours; its activation may be the caller's own, so that its rows are proved independent."""
    with float64(ffn):
        error = prove_rows_independent(ffn, ffn.up.in_features, options.seed)
    return pack_ffn(ffn, {"rows are independent": error})


@register_adapter(_is_moe)
def pack_own_moe(moe: MixtureOfExperts, options: PackOptions) -> Packed:
    """Describe a mixture of ours; its experts' activation may be the caller's own, so that rows are proved."""
    with float64(moe):
        error = prove_rows_independent(moe, moe.router.projection.in_features, options.seed)
    return pack_moe(moe, "moe", {"rows are independent": error})


@register_adapter(_is_block, accepts_causal=True)
def pack_own_blocks(module: BlockStack | TransformerBlock, options: PackOptions) -> Packed:
    """Describe a block or stack of ours.

    Raises:
        ExportError: the stack holds something else, or is to be causal and is not.
    """
    stack = module if isinstance(module, BlockStack) else BlockStack([module])
    _check_blocks(stack, TransformerBlock, options)
    return pack_stack(stack, "transformer")


@register_adapter(_is_decoder, accepts_causal=True)
def pack_own_decoder(module: DecoderStack | DecoderBlock, options: PackOptions) -> Packed:
    """Describe a decoder block or stack of ours.

    Raises:
        ExportError: the stack holds something else, or is to be causal and is not.
    """
    stack = module if isinstance(module, DecoderStack) else DecoderStack([module])
    _check_blocks(stack, DecoderBlock, options)
    return pack_decoder(stack, "transformer decoder")


def _check_blocks(
    stack: BlockStack | DecoderStack, kind: type[TransformerBlock | DecoderBlock], options: PackOptions
) -> None:
    blocks = [block for block in stack.blocks if isinstance(block, kind)]
    if not blocks or len(blocks) != len(stack.blocks):
        raise ExportError(f"{type(stack).__name__}: expected one or more {kind.__name__}s and nothing else")
    if options.causal and not all(block.attention.causal for block in blocks):
        raise ExportError("causal: these blocks say for themselves whether they are; make them with causal=True")
