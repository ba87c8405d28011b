"""T5 decoders, random and small, are packed blocks that are proved equal to transformers' own, memory and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.adapters.registry import pack
from export.errors import ExportError, ProofError
from export.pipeline import Options, export_module
from service.manifest import read_manifest

PROOF = "equals the original module, per sequence"
transformers = pytest.importorskip("transformers")


def decoder(*, layers: int = 2, act: str = "gated-gelu", **options: Any) -> Any:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Stack

    config = T5Config(
        **{
            "vocab_size": 40,
            "d_model": 16,
            "d_kv": 6,
            "num_heads": 3,
            "d_ff": 24,
            "num_layers": layers,
            "feed_forward_proj": act,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "is_decoder": True,
            "use_cache": False,
            **options,
        }
    )
    torch.manual_seed(0)
    made = T5Stack(config)
    for parameter in made.parameters():  # its own initialisation makes attention all but uniform
        nn.init.normal_(parameter, std=0.5)
    return made


@pytest.mark.parametrize("act", ["relu", "gated-gelu", "gated-silu"])
def test_a_stack_equals_its_packed_form(act: str) -> None:
    packed = pack(decoder(act=act))
    assert packed.proofs[PROOF] < 1e-13
    assert (packed.d_in, packed.d_memory, packed.depth) == (16, 16, 2)
    assert packed.architecture["positions"] == "relative bias"
    assert packed.architecture["causal"] is True
    assert packed.architecture["norm"] == "RMSNorm"
    assert packed.sample is not None
    assert packed.sample([3, 2], np.random.default_rng(0)).shape == (5, 16)


def test_the_first_layer_stands_alone_and_the_others_do_not() -> None:
    stack = decoder()
    assert pack(stack.block[0], causal=True).proofs[PROOF] < 1e-13
    with pytest.raises(ExportError, match="takes its position bias from the first of its stack"):
        pack(stack.block[1])


def test_a_stack_that_computes_something_else_is_refused() -> None:
    from transformers.models.t5.modeling_t5 import T5LayerCrossAttention

    class Louder(T5LayerCrossAttention):  # type: ignore[misc] # transformers has no types here
        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            out, *rest = super().forward(hidden, *args, **kwargs)
            return (out * (1 + 1e-9), *rest)

    stack = decoder()
    stack.block[1].layer[1].__class__ = Louder
    with pytest.raises(ProofError, match="does not compute what its weights say"):
        pack(stack)


def test_it_becomes_an_exact_bundle_in_float_and_int8(tmp_path: Path) -> None:
    folder = export_module(decoder(layers=1), Options("t5-decoder", models=tmp_path))
    manifest = read_manifest(folder)
    assert manifest.d_memory == 16
    assert {v.precision: v.certificate.kind for v in manifest.variants} == {"fp32": "exact", "int8": "exact"}
    assert {v.precision: (v.quantized_matmuls, v.float_matmuls) for v in manifest.variants}["int8"] == (7, 0)
