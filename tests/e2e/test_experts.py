"""Mixtures of experts from torch to the wire: exported in both precisions, certified, verified and served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralModel
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersEncoderModel,
    SwitchTransformersLayerFF,
)

from export.pipeline import Options, export_module
from export.verification import verify_bundle
from service.manifest import read_manifest
from tests.e2e.server import serving

D = 32

# The exporter takes a second of CPU for each expert: minutes, where many tests share the cores.
pytestmark = pytest.mark.timeout(400)


def mixtral() -> nn.Module:
    """Attention before the mixture: in int8 its noise reaches the router."""
    config = MixtralConfig(
        vocab_size=100,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    made: nn.Module = MixtralModel(config)
    return made


def switch() -> nn.Module:
    """A dense layer and a sparse one, as in Switch's encoders."""
    config = SwitchTransformersConfig(
        vocab_size=100,
        d_model=D,
        d_ff=48,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_experts=2,
        expert_capacity=1,
    )
    made: nn.Module = SwitchTransformersEncoderModel(config)
    return made


def switch_ffn() -> nn.Module:
    made: nn.Module = SwitchTransformersLayerFF(
        SwitchTransformersConfig(d_model=D, d_ff=48, num_experts=2, expert_capacity=1), is_sparse=True
    )
    return made


MODULES = {"mixtral": mixtral, "switch": switch, "switch-ffn": switch_ffn}


@pytest.fixture(scope="module", params=list(MODULES))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    module = MODULES[request.param]()
    for key, parameter in module.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in key else 0.0, std=0.2)
    return export_module(module, Options(request.param, models=tmp_path_factory.mktemp("experts")))


def test_it_is_exact_and_says_how_its_experts_are_loaded(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert [v.certificate.kind for v in manifest.variants] == ["exact", "exact"]
    (load,) = manifest.expert_load
    assert len(load.shares) == (3 if manifest.name == "mixtral" else 2)
    assert sum(load.shares) == pytest.approx(1)
    assert manifest.active_parameters is not None
    assert manifest.active_parameters < manifest.parameters
    fp32, int8 = manifest.variants
    assert int8.float_matmuls == 1, "the router"
    assert int8.quantized_matmuls + 1 == fp32.float_matmuls
    assert fp32.routing[0].flipped_with_margin == 0
    # What int8 adds before the router has longer tails than the normal noise of the margin.
    assert int8.routing[0].flipped_with_margin <= 0.01 * int8.routing[0].tokens
    if manifest.kind == "sequence":
        assert int8.routing[0].noise > 100 * fp32.routing[0].noise
    assert "share of the choices, expert by expert" in (bundle / "report.md").read_text()


def test_verify_repeats_parity_over_the_tokens_with_a_margin(bundle: Path) -> None:
    findings = list(verify_bundle(bundle, "cpu", 1, seed=1))
    assert [finding.failure for finding in findings if finding.failure is not None] == []


def test_an_answer_does_not_depend_on_who_else_is_routed(bundle: Path) -> None:
    rng = np.random.default_rng()
    requests = [rng.standard_normal((int(rng.integers(1, 30)), D), dtype=np.float32) for _ in range(30)]
    requests[3][0] *= 1000
    requests[7][0, 5] = np.nan
    name = bundle.parent.name
    with serving(bundle.parents[1], "--max-wait-ms", "5") as server, ThreadPoolExecutor(12) as pool:
        for model in (f"{name}-fp32", f"{name}-int8"):
            alone = [server.infer(model, tokens) for tokens in requests]
            before = server.metric("tokenslab_windows_total", model=model)
            together = list(pool.map(lambda tokens, model=model: server.infer(model, tokens), requests))
            windows = server.metric("tokenslab_windows_total", model=model) - before
            assert windows < len(requests), "nothing was packed"
            for one, other in zip(alone, together, strict=True):
                assert one.tobytes() == other.tobytes()
