"""Models of transformers with a part replaced by something else: the part is named, and what was missed in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from export import ExportError, pack
from tests.export.adapters.families import D, gpt2, llama, mixtral, switch, t5

# A family: its model, its last norm, and a part of its second layer.
PARTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "gpt2": (gpt2, "ln_f", "h.1.mlp"),
    "llama": (llama, "norm", "layers.1.input_layernorm"),
    "mixtral": (mixtral, "norm", "layers.1.input_layernorm"),
    "t5": (t5, "encoder.final_layer_norm", "encoder.block.1.layer.0.layer_norm"),
    "switch": (switch, "encoder.final_layer_norm", "encoder.block.1.layer.0.layer_norm"),
}


@pytest.mark.parametrize("family", PARTS)
def test_a_last_norm_that_is_none_is_named(family: str) -> None:
    make, last, _ = PARTS[family]
    model = make()
    model.set_submodule(last, nn.Linear(D, D))
    with pytest.raises(ExportError, match=r"the last norm \(Linear\) has no packed form: AttributeError"):
        pack(model)


@pytest.mark.parametrize("family", PARTS)
def test_a_layer_with_another_part_in_it_is_named(family: str) -> None:
    make, _, part = PARTS[family]
    model = make()
    model.set_submodule(part, nn.Linear(D, D))
    with pytest.raises(ExportError, match=r"layer 1 \(\w+\) has no packed form: AttributeError"):
        pack(model)
