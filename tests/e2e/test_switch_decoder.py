"""A decoder with experts: causal, with a memory, sparse in every other layer; exported, certified, verified, served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import SwitchTransformersModel

from export.pipeline import Options, export_module
from export.relative_error import relative_error
from export.verification import verify_bundle
from service.manifest import read_manifest
from service.recheck import same_bits
from tests.e2e.server import Array, serving
from tests.e2e.test_memory import ask, lens
from tests.export.adapters.families import D, switch

BAR = 1e-5  # float32 against float32
LENGTHS, MEMORY_LENGTHS = [5, 1, 19, 2, 7], [3, 8, 1, 12, 4]

# The exporter takes a second of CPU for each expert: minutes, where many tests share the cores.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def decoder() -> Any:
    torch.manual_seed(0)
    return switch(SwitchTransformersModel, num_experts=2, num_layers=1, num_sparse_encoder_layers=0).decoder


@pytest.fixture(scope="module")
def bundle(decoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_module(decoder, Options("switch", tmp_path_factory.mktemp("models")))


def test_it_is_exact_in_float_and_int8_and_verify_repeats_it(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.d_memory, manifest.architecture["expert_layers"], len(manifest.expert_load)) == (D, 1, 1)
    fp32, int8 = manifest.variants
    assert [fp32.certificate.kind, int8.certificate.kind] == ["exact", "exact"]
    # Two layers of five matmuls of attention, an FFN of two and two experts of two, and the router.
    assert (fp32.float_matmuls, int8.quantized_matmuls, int8.float_matmuls) == (17, 16, 1)
    assert fp32.routing[0].flipped_with_margin == 0
    assert manifest.active_parameters is not None
    assert manifest.active_parameters < manifest.parameters
    assert [finding.failure for finding in verify_bundle(bundle, "cpu", 1, seed=1) if finding.failure] == []


def test_it_answers_as_transformers_does_whoever_is_beside(bundle: Path, decoder: Any) -> None:
    rng = np.random.default_rng()
    requests: list[tuple[Array, Array]] = [
        (rng.standard_normal((n, D), dtype=np.float32), rng.standard_normal((m, D), dtype=np.float32))
        for n, m in zip(LENGTHS, MEMORY_LENGTHS, strict=True)
    ]
    for layer in decoder.block[1::2]:
        layer.layer[-1].mlp.router.expert_capacity = 1 << 62
    with torch.no_grad():
        expected = [
            decoder(
                inputs_embeds=torch.from_numpy(tokens)[None],
                encoder_hidden_states=torch.from_numpy(memory)[None],
                use_cache=False,
            ).last_hidden_state[0]
            for tokens, memory in requests
        ]

    def answer(model: str, tokens: Array, memory: Array) -> Array:
        counts = {"seq_lens": lens([len(tokens)]), "memory_seq_lens": lens([len(memory)])}
        return ask(server, model, tokens=tokens, memory=memory, **counts)

    with serving(bundle.parents[1], "--max-wait-ms", "20") as server, ThreadPoolExecutor(12) as pool:
        for one, wanted in zip(requests, expected, strict=True):
            assert relative_error(answer("switch-fp32", *one), wanted.double().numpy()) <= BAR
        for model in ("switch-fp32", "switch-int8"):
            many = [(tokens, scale * memory) for tokens, memory in requests for scale in (1, 30, np.float32("nan"))]
            alone = [answer(model, *one) for one in many]
            before = server.metric("tokenslab_windows_total", model=model)
            together = list(pool.map(lambda one, model=model: answer(model, *one), many))
            assert server.metric("tokenslab_windows_total", model=model) - before < len(many), "nothing was packed"
            for before_them, beside_them in zip(alone, together, strict=True):
                assert same_bits(before_them, beside_them).all()
