"""What every adapter hands to the pipeline: a module on packed tokens and what is known about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import nn

from export.blocks import (
    FFN,
    BlockStack,
    BottleneckAdapter,
    DecoderBlock,
    DecoderStack,
    MixtureOfExperts,
    ResidualFFN,
    SelfAttention,
    TransformerBlock,
)
from export.blocks.moe import experts_of
from service.manifest import Kind
from service.packing import Float32

Sampler = Callable[[Sequence[int], np.random.Generator], Float32]  # seq_lens -> tokens (sum, d_in)


@dataclass(frozen=True)
class Packed:
    """A module in eval mode, float32, on the CPU, that belongs to the exporter and may be changed in place."""

    module: nn.Module
    kind: Kind
    d_in: int
    layers: Sequence[nn.Module] = field(repr=False)  # upcast to float64 one at a time; together they hold every weight
    depth: int | None  # FFNs or blocks in a row, which scales the error bar; None: derived from the matmuls
    architecture: Mapping[str, str | int | float | bool]
    proofs: Mapping[str, float] = field(default_factory=dict)  # what was proved in float64 -> largest relative error
    sample: Sampler | None = None  # tokens as the module meets them; None: N(0, 1)
    sampled: str = "embedded random token ids"  # what `sample` draws, for the manifest
    source: Mapping[str, str] = field(default_factory=dict)  # where its weights came from, for the manifest
    d_memory: int | None = None  # with it the module is called (tokens, seq_lens, memory, memory_seq_lens)


def pack_ffn(ffn: FFN, proofs: Mapping[str, float]) -> Packed:
    """Describe an FFN of our own."""
    d = ffn.up.in_features
    architecture: dict[str, str | int | float | bool] = {
        "family": "ffn",
        **describe_ffn(ffn),
        "bias": ffn.up.bias is not None,
    }
    return Packed(ffn, "position-wise", d, [ffn], 1, architecture, proofs)


def pack_moe(moe: MixtureOfExperts, family: str, proofs: Mapping[str, float] | None = None) -> Packed:
    """Describe a mixture of experts of our own."""
    bias = experts_of(moe)[0].up.bias is not None
    architecture = {"family": family, **describe_ffn(moe), "bias": bias}
    return Packed(moe, "position-wise", moe.router.projection.in_features, [moe], 1, architecture, proofs or {})


def pack_residual(layer: ResidualFFN, family: str) -> Packed:
    """Describe an FFN or mixture of experts of our own with its norm and residual."""
    inner = pack_ffn(layer.ffn, {}) if isinstance(layer.ffn, FFN) else pack_moe(layer.ffn, family)
    architecture = {**inner.architecture, "family": family, "norm": type(layer.norm).__name__, "norm_place": "pre"}
    return replace(inner, module=layer, layers=[layer], architecture=architecture)


def describe_ffn(ffn: FFN | MixtureOfExperts) -> dict[str, str | int | float | bool]:
    """The facts of an FFN, or of a mixture's experts and their number."""
    if isinstance(ffn, FFN):
        return {"d_ff": ffn.down.in_features, "activation": ffn.activation_name}
    experts = {"experts": ffn.router.num_experts, "experts_per_token": ffn.router.top_k}
    return {**experts, **describe_ffn(experts_of(ffn)[0])}


def pack_stack(stack: BlockStack, family: str, proofs: Mapping[str, float] | None = None) -> Packed:
    """Describe a stack of our own blocks; facts that differ between its blocks are left out."""
    blocks = [block for block in stack.blocks if isinstance(block, TransformerBlock)]
    facts = [_describe(block) for block in blocks]
    common = {key: value for key, value in facts[0].items() if all(fact.get(key) == value for fact in facts)}
    common |= _some_experts(blocks)
    architecture = {"family": family, "layers": len(blocks), **common, "final_norm": stack.norm is not None}
    layers = [*stack.blocks, *([] if stack.norm is None else [stack.norm])]
    d = blocks[0].attention.qkv.in_features
    return Packed(stack, "sequence", d, layers, len(blocks), architecture, proofs or {})


def pack_decoder(stack: DecoderStack, family: str) -> Packed:
    """Describe a stack of our own decoder blocks; facts that differ between its blocks are left out."""
    blocks = [block for block in stack.blocks if isinstance(block, DecoderBlock)]
    facts = [{**_describe(block), "cross_heads": block.cross.num_heads} for block in blocks]
    common = {key: value for key, value in facts[0].items() if all(fact.get(key) == value for fact in facts)}
    common |= _some_experts(blocks)
    architecture = {"family": family, "layers": len(blocks), **common, "final_norm": stack.norm is not None}
    layers = [*stack.blocks, *([] if stack.norm is None else [stack.norm])]
    first = blocks[0]
    d, d_memory = first.attention.qkv.in_features, first.cross.kv.in_features
    return Packed(stack, "sequence", d, layers, len(blocks), architecture, d_memory=d_memory)


def _some_experts(blocks: Sequence[TransformerBlock | DecoderBlock]) -> dict[str, str | int | float | bool]:
    """What there is of experts where only some FFNs are mixtures, as in Switch, where every other one is."""
    sparse = [describe_ffn(block.ffn) for block in blocks if isinstance(block.ffn, MixtureOfExperts)]
    if not 0 < len(sparse) < len(blocks):
        return {}
    return {"expert_layers": len(sparse), **{key: sparse[0][key] for key in ("experts", "experts_per_token")}}


def _describe(block: TransformerBlock | DecoderBlock) -> dict[str, str | int | float | bool]:
    eps = getattr(block.norm1, "eps", None)  # an nn.RMSNorm without one takes its dtype's
    return {
        **describe_ffn(block.ffn),
        "heads": block.attention.num_heads,
        **_describe_attention(block.attention),
        "norm": type(block.norm1).__name__,
        "norm_place": block.place,
        **({} if eps is None else {"eps": float(eps)}),
        "bias": block.attention.qkv.bias is not None,
        "causal": block.attention.causal,
        **(_describe_adapters(block) if isinstance(block, TransformerBlock) else {}),
    }


def _describe_adapters(block: TransformerBlock) -> dict[str, str | int | float | bool]:
    found = {"attention": block.adapter1, "FFN": block.adapter2}
    places = [place for place, adapter in found.items() if adapter is not None]
    if not places:
        return {}
    widths = {a.down.out_features for a in found.values() if isinstance(a, BottleneckAdapter)}
    return {"adapters_after": " and ".join(places), **({"d_bottleneck": widths.pop()} if len(widths) == 1 else {})}


def _describe_attention(attention: SelfAttention) -> dict[str, str | int | float | bool]:
    """What not every attention has."""
    facts: dict[str, str | int | float | bool] = {}
    if attention.num_kv_heads != attention.num_heads:
        facts["kv_heads"] = attention.num_kv_heads
    if attention.head_size * attention.num_heads != attention.qkv.in_features:
        facts["head_size"] = attention.head_size
    if attention.window is not None:
        facts["sliding_window"] = attention.window
    if attention.rotary is not None:
        facts["positions"] = "rotary"
    elif attention.relative_bias is not None:
        facts["positions"] = "relative bias"
    return facts
