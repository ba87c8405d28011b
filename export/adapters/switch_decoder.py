"""Switch Transformers' decoder layers (transformers): T5's decoder blocks, with top-1 mixtures of experts in some.

Hidden states and the encoder's answer in, hidden states out. As in the encoder, no token is dropped for capacity.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from export.adapters.experts import prove_equal_to_experts
from export.adapters.registry import PackOptions, register_adapter
from export.adapters.switch import switch_layer_ff
from export.adapters.t5_decoder import decoder_of, packed_decoder_stack
from export.adapters.transformers_parts import embedding_sampler, last_norm
from export.blocks import FFN, MixtureOfExperts
from export.packed import Packed, pack_decoder

_MODULE: Final = "transformers.models.switch_transformers.modeling_switch_transformers"


# Above the encoder's adapter, which has the same class.
@register_adapter(decoder_of(f"{_MODULE}.SwitchTransformersStack"), priority=1, accepts_causal=True)
def pack_switch_decoder(decoder: Any, options: PackOptions) -> Packed:
    """Put the layers, dense and sparse, and the last norm of a decoder into a stack, proved to compute the same.

    It is causal whether or not that is asked for; its memory is the encoder's last hidden state.

    Raises:
        ExportError: a part has no packed form.
        ProofError: the original computes something else.
    """
    layers = list(decoder.block)
    stack = packed_decoder_stack(decoder, layers, last_norm(decoder.final_layer_norm), _ffn)

    def forward(rows: Tensor, memory: Tensor) -> Tensor:
        hidden: Tensor = decoder(inputs_embeds=rows, encoder_hidden_states=memory, use_cache=False).last_hidden_state
        return hidden

    packed = prove_equal_to_experts(
        decoder,
        pack_decoder(stack, type(decoder).__name__),
        options,
        forward=forward,
        layers=[*layers, decoder.final_layer_norm],
    )
    return replace(packed, sample=embedding_sampler(decoder.embed_tokens.weight))


def _ffn(layer: Any) -> tuple[nn.Module, FFN | MixtureOfExperts]:
    made = switch_layer_ff(layer.layer[-1])
    return made.norm, made.ffn
