"""Reference torch modules on packed tokens: what an adapter fills with weights and what a graph is exported from.

Position-wise modules are called `forward(tokens)`, the others `forward(tokens, seq_lens)`, decoders
`forward(tokens, seq_lens, memory, memory_seq_lens)`; `tokens` is (N, d) and `seq_lens` (S,) int64 with sum N, and so
with the memory. They know neither files nor ONNX, only their intent nodes.
"""

from __future__ import annotations

from export.blocks.attention import SelfAttention, varlen_attention
from export.blocks.bottleneck import BottleneckAdapter
from export.blocks.cross_attention import CrossAttention, varlen_cross_attention
from export.blocks.decoder import DecoderBlock, DecoderStack
from export.blocks.ffn import ACTIVATIONS, FFN, Activation
from export.blocks.moe import MixtureOfExperts, Router
from export.blocks.relative_bias import RelativeBias
from export.blocks.residual import ResidualFFN
from export.blocks.rotary import Rotary, longest_sequence, sequence_positions
from export.blocks.transformer import BlockStack, TransformerBlock, make_norm

__all__ = [
    "ACTIVATIONS",
    "FFN",
    "Activation",
    "BlockStack",
    "BottleneckAdapter",
    "CrossAttention",
    "DecoderBlock",
    "DecoderStack",
    "MixtureOfExperts",
    "RelativeBias",
    "ResidualFFN",
    "Rotary",
    "Router",
    "SelfAttention",
    "TransformerBlock",
    "longest_sequence",
    "make_norm",
    "sequence_positions",
    "varlen_attention",
    "varlen_cross_attention",
]
