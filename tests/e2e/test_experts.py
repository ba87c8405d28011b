"""Mixtures of experts from torch to the wire: exported in both precisions, certified, verified and served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralModel, MixtralSparseMoeBlock
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersEncoderModel

from export.pipeline import Options, export_module
from export.verification import verify_bundle
from service.manifest import read_manifest
from tests.e2e.server import Server, serving

D = 32


def mixtral(kind: type[nn.Module] = MixtralModel) -> nn.Module:
    """Attention before each of two mixtures: in int8 its noise reaches the routers."""
    config = MixtralConfig(
        vocab_size=100,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    return kind(config)


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
        num_experts=3,
        expert_capacity=1,
    )
    made: nn.Module = SwitchTransformersEncoderModel(config)
    return made


MODULES = {"mixtral-ffn": lambda: mixtral(MixtralSparseMoeBlock), "mixtral": mixtral, "switch": switch}
LAYERS_OF_EXPERTS = {"mixtral-ffn": 1, "mixtral": 2, "switch": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    torch.set_num_threads(1)
    for name, make in MODULES.items():
        module = make()
        for key, parameter in module.named_parameters():
            nn.init.normal_(parameter, mean=1.0 if "norm" in key else 0.0, std=0.2)
        export_module(module, Options(name, models=root))
    return root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    with serving(models, "--max-wait-ms", "5") as running:
        yield running


@pytest.mark.parametrize("name", list(MODULES))
def test_a_bundle_of_experts_is_exact_and_says_how_they_are_loaded(models: Path, name: str) -> None:
    manifest = read_manifest(models / name / "1")
    layers = LAYERS_OF_EXPERTS[name]
    assert [v.certificate.kind for v in manifest.variants] == ["exact", "exact"]
    assert [len(load.shares) for load in manifest.expert_load] == [3] * layers
    assert all(sum(load.shares) == pytest.approx(1) for load in manifest.expert_load)
    assert manifest.active_parameters is not None
    assert manifest.active_parameters < manifest.parameters
    fp32, int8 = manifest.variants
    assert int8.float_matmuls == layers, "the routers"
    assert int8.quantized_matmuls + layers == fp32.float_matmuls
    assert [router.flipped_with_margin for v in manifest.variants for router in v.routing] == [0] * 2 * layers
    if manifest.kind == "sequence":
        assert all(noisy.noise > 100 * clean.noise for noisy, clean in zip(int8.routing, fp32.routing, strict=True))
    assert "share of the choices, expert by expert" in (models / name / "1" / "report.md").read_text()


@pytest.mark.parametrize("name", list(MODULES))
def test_verify_repeats_parity_over_the_tokens_with_a_margin(models: Path, name: str) -> None:
    findings = list(verify_bundle(models / name / "1", "cpu", 1, seed=1))
    assert [finding.failure for finding in findings if finding.failure is not None] == []


@pytest.mark.parametrize("model", [f"{name}-{precision}" for name in MODULES for precision in ("fp32", "int8")])
def test_an_answer_does_not_depend_on_who_else_is_routed(server: Server, model: str) -> None:
    rng = np.random.default_rng()
    requests = [rng.standard_normal((int(rng.integers(1, 30)), D), dtype=np.float32) for _ in range(30)]
    requests[3][0] *= 1000
    requests[7][0, 5] = np.nan
    alone = [server.infer(model, tokens) for tokens in requests]
    before = server.metric("tokenslab_windows_total", model=model)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda tokens: server.infer(model, tokens), requests))
    assert server.metric("tokenslab_windows_total", model=model) - before < len(requests), "nothing was packed"
    for one, other in zip(alone, together, strict=True):
        assert one.tobytes() == other.tobytes()
