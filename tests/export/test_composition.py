"""What a model is made of, counted from its module and graph, is what the textbook's formulas give."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from export.adapters.random_weights import random_stack
from export.adapters.registry import pack
from export.arithmetic import (
    attended_pairs,
    attention_flops,
    ffn_flops,
    hidden_bytes,
    overtakes_at,
    score_bytes,
    score_flops,
)
from export.blocks import FFN, DecoderBlock, DecoderStack, MixtureOfExperts, Router
from export.composition import composition
from export.graph import to_graph, weight_flops
from export.inspection import register
from service.manifest import AttentionLayers, Composition, Manifest, read_manifest
from tests.export.hand_built import random_ffn, write_bundle, write_manifest

D, HEADS, LAYERS = 24, 3, 1  # the exporter takes seconds for each layer


def of(module: nn.Module) -> tuple[Composition, int]:
    """Its composition, and the FLOPs per token of all its weight matmuls."""
    packed = pack(module)
    graph = to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)
    return composition(packed.module, graph), weight_flops(graph)


def manifest(made: Composition, *, memory_flops: int | None = None) -> Manifest:
    width = None if memory_flops is None else D
    values: dict[str, Any] = {"composition": made, "flops_per_memory_row": memory_flops, "d_memory": width}
    return Manifest.model_construct(**values)


def test_an_encoder_s_parts_are_the_textbook_s() -> None:
    made, total = of(random_stack(D, HEADS, 4 * D, layers=LAYERS))
    assert made.attention_parameters == LAYERS * (4 * D * D + 4 * D)
    assert made.ffn_parameters == LAYERS * (8 * D * D + 5 * D)
    assert made.other_parameters == LAYERS * 4 * D
    assert made.ffn_parameters / (made.attention_parameters + made.ffn_parameters) == pytest.approx(2 / 3, abs=0.01)
    assert made.ffn_flops_per_token == LAYERS * 2 * 8 * D * D
    assert made.attention_flops_per_token == LAYERS * 2 * 4 * D * D
    assert total == made.ffn_flops_per_token + made.attention_flops_per_token
    assert made.hidden_units == 4 * D
    assert made.attention == [AttentionLayers(layers=LAYERS, heads=HEADS, head_size=D // HEADS)]
    assert score_flops(made, 100) == LAYERS * 4 * D * 100 * 100
    assert overtakes_at(manifest(made)) == 2 * D + 1
    assert hidden_bytes(made, 10) == 4 * 10 * 4 * D
    assert score_bytes(made, 10) == 4 * 10 * 10 * HEADS


def test_a_decoder_s_cross_attention_is_attention_and_its_memory_has_flops_of_its_own() -> None:
    module = DecoderStack([DecoderBlock(D, HEADS, 4 * D, d_memory=16, bias=False, causal=True)])
    packed = pack(module)
    graph = to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)
    made = composition(packed.module, graph)
    assert made.attention_parameters == 4 * D * D + 2 * D * D + 2 * D * 16
    assert made.attention_flops_per_token == 2 * (4 * D * D + 2 * D * D)
    assert {a.of_memory: a.causal for a in made.attention} == {False: True, True: False}
    memory_flops = weight_flops(graph, of_memory=True)
    assert memory_flops == 2 * 2 * D * 16
    n = 50
    assert attention_flops(manifest(made, memory_flops=memory_flops), n) == (
        n * (made.attention_flops_per_token + memory_flops) + 4 * D * n * (n + 1) // 2 + 4 * D * n * n
    )


def test_experts_count_as_ffn_for_the_tokens_they_get_and_the_router_as_neither() -> None:
    moe = MixtureOfExperts(
        Router(D, 3, 2, normalise=True), [FFN(D, 40, activation="swiglu", bias=False) for _ in "abc"]
    )
    made, _ = of(moe)
    assert made.ffn_parameters == 3 * 3 * D * 40
    assert made.other_parameters == 3 * D
    assert made.ffn_flops_per_token == 2 * 2 * 3 * D * 40
    assert made.hidden_units == 80, "gate and up side by side"
    assert (made.attention, overtakes_at(manifest(made))) == ([], None)


@given(tokens=st.integers(1, 60), window=st.none() | st.integers(1, 70))
def test_pairs_are_those_that_a_loop_counts(tokens: int, window: int | None) -> None:
    shape: dict[str, Any] = {"layers": 1, "heads": 1, "head_size": 1}
    causal = AttentionLayers(**shape, causal=True, window=window)
    counted = sum(1 for i in range(tokens) for j in range(i + 1) if window is None or i - j < window)
    assert attended_pairs(causal, tokens) == counted
    assert attended_pairs(AttentionLayers(**shape), tokens) == tokens**2
    assert attended_pairs(AttentionLayers(**shape, of_memory=True), tokens) == tokens**2


@given(d=st.integers(1, 2000), d_ff=st.integers(1, 9000), causal=st.booleans(), window=st.none() | st.integers(1, 9000))
def test_attention_overtakes_at_the_first_length_where_it_costs_more(
    d: int, d_ff: int, causal: bool, window: int | None
) -> None:
    made = Composition(
        attention_parameters=4 * d * d,
        ffn_parameters=2 * d * d_ff,
        other_parameters=0,
        attention_flops_per_token=8 * d * d,
        ffn_flops_per_token=4 * d * d_ff,
        hidden_units=d_ff,
        attention=[AttentionLayers(layers=1, heads=1, head_size=d, causal=causal, window=window if causal else None)],
    )
    m = manifest(made)
    at = overtakes_at(m)
    if at is None:
        assert causal
        assert window is not None
        assert attention_flops(m, 10**9) <= ffn_flops(m, 10**9)
    else:
        assert attention_flops(m, at) > ffn_flops(m, at)
        assert at == 1 or attention_flops(m, at - 1) <= ffn_flops(m, at - 1)
        if not causal:
            assert at == max(1, d_ff - 2 * d + 1)


def test_inspect_shows_it_and_gives_it_as_json(tmp_path: Any) -> None:
    folder = write_bundle(tmp_path, {"fp32": random_ffn(16, 64, 0)}, d=16)
    plain = read_manifest(folder)
    made = Composition(
        attention_parameters=plain.parameters - 600,
        ffn_parameters=500,
        other_parameters=100,
        attention_flops_per_token=8 * 16 * 16,
        ffn_flops_per_token=16 * 16 * 16,
        hidden_units=64,
        attention=[AttentionLayers(layers=1, heads=4, head_size=4)],
    )
    update = {"composition": made, "flops_per_token": 24 * 16 * 16}
    write_manifest(folder, plain.model_copy(update=update))
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(folder)]).stdout.split())
    assert "Attention costs more than the FFN from 33 tokens a sequence on." in shown
    assert "66.7%" in shown
    printed = json.loads(CliRunner().invoke(app, ["inspect", str(folder), "--json"]).stdout)["arithmetic"]
    assert printed["attention_overtakes_ffn_at_tokens"] == 33
    assert printed["by_sequence_tokens"]["512"]["score_flops"] == 4 * 16 * 512 * 512
    assert printed["by_sequence_tokens"]["512"]["ffn_hidden_bytes"] == 4 * 512 * 64
