"""torch's own decoders become packed blocks with cross-attention that are proved equal to them, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from export.adapters.registry import pack
from export.blocks import CrossAttention, DecoderBlock, DecoderStack, TransformerBlock
from export.errors import ExportError, ProofError

D = 16
PROOF = "equals the original module, per sequence"


def layer(**options: Any) -> nn.TransformerDecoderLayer:
    made = nn.TransformerDecoderLayer(D, 4, 24, **{"batch_first": True, **options})
    for name, parameter in made.named_parameters():  # norms that do nothing prove nothing, nor do biases of zero
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_layer_equals_its_packed_block(norm_first: bool, bias: bool, batch_first: bool, causal: bool) -> None:
    module = layer(norm_first=norm_first, bias=bias, batch_first=batch_first, activation=F.gelu)
    packed = pack(module, causal=causal)
    assert packed.kind == "sequence"
    assert packed.d_memory == D
    assert packed.proofs[PROOF] < 1e-14
    assert packed.architecture["norm_place"] == ("pre" if norm_first else "post")
    assert packed.architecture["causal"] is causal
    assert packed.architecture["cross_heads"] == 4


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(D)], ids=["no norm", "norm"])
def test_decoder_with_and_without_a_final_norm(norm: nn.Module | None) -> None:
    packed = pack(nn.TransformerDecoder(layer(), 3, norm=norm).train(), causal=True)
    assert packed.depth == 3
    assert packed.architecture["final_norm"] is (norm is not None)
    assert packed.proofs[PROOF] < 1e-14


class Forgetful(nn.TransformerDecoderLayer):
    """Says that it is a decoder layer and looks at the start of its memory only."""

    def forward(self, tgt: Tensor, memory: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(tgt, memory[:, :3], *args, **kwargs)


def test_a_layer_with_another_forward_is_refused() -> None:
    with pytest.raises(ProofError, match=r"does not compute what its weights say.*is not a decoder"):
        pack(Forgetful(D, 4, 24, batch_first=True))


def test_parts_without_a_packed_form_are_named() -> None:
    odd = layer()
    odd.multihead_attn = nn.MultiheadAttention(D, 4, kdim=8, vdim=8)
    with pytest.raises(ExportError, match=r"layer 0 .*multihead_attn must be an nn.MultiheadAttention with one in_pro"):
        pack(odd)


def test_our_own_decoder_may_read_a_memory_of_another_width() -> None:
    stack = DecoderStack([DecoderBlock(D, 4, 24, d_memory=6)])
    packed = pack(stack, causal=True)
    assert (packed.d_in, packed.d_memory) == (D, 6)
    with pytest.raises(ExportError, match="make them with causal=True"):
        pack(DecoderStack([DecoderBlock(D, 4, 24, causal=False)]), causal=True)
    with pytest.raises(ExportError, match="one or more DecoderBlocks and nothing else"):
        pack(DecoderStack([TransformerBlock(D, 4, 24)]))  # type: ignore[list-item]


def test_only_a_sequences_own_memory_reaches_it() -> None:
    torch.manual_seed(0)
    block = DecoderBlock(D, 4, 24, d_memory=6).eval()
    tokens, memory = torch.randn(7, D), torch.randn(9, 6)
    seq_lens, memory_seq_lens = torch.tensor([3, 4]), torch.tensor([7, 2])
    with torch.no_grad():
        before = block(tokens, seq_lens, memory, memory_seq_lens)
        memory[7:] = torch.nan
        after = block(tokens, seq_lens, memory, memory_seq_lens)
    assert torch.equal(before[:3], after[:3])
    assert after[3:].isnan().all()


def test_cross_attention_refuses_heads_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="num_heads 3 does not divide d 16"):
        CrossAttention(D, 3)
