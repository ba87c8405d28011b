"""Models of transformers with a part replaced by something else: the part is named, and what was missed in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from export import ExportError, pack
from tests.export.adapters.families import D, gpt2, llama, mixtral, switch, t5

LAST_NORM, LAYER = r"the last norm \(Linear\)", r"layer 1 \(\w+\)"
# A family, the part that is replaced, and how the message names it.
PARTS: list[tuple[Callable[[], Any], str, str]] = [
    (gpt2, "ln_f", LAST_NORM),
    (gpt2, "h.1.mlp", LAYER),
    (llama, "norm", LAST_NORM),
    (llama, "layers.1.input_layernorm", LAYER),
    (mixtral, "norm", LAST_NORM),
    (mixtral, "layers.1.input_layernorm", LAYER),
    (t5, "encoder.final_layer_norm", LAST_NORM),
    (t5, "encoder.block.1.layer.0.layer_norm", LAYER),
    (switch, "encoder.final_layer_norm", LAST_NORM),
    (switch, "encoder.block.1.layer.0.layer_norm", LAYER),
]


@pytest.mark.parametrize(("make", "part", "named"), PARTS, ids=[f"{make.__name__}: {part}" for make, part, _ in PARTS])
def test_a_part_that_is_another_is_named(make: Callable[[], Any], part: str, named: str) -> None:
    model = make()
    model.set_submodule(part, nn.Linear(D, D))
    with pytest.raises(ExportError, match=f"{named} has no packed form: AttributeError"):
        pack(model)
