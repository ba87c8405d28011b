"""Encoders of the families that come from files and from memory, exported and served: what they answer, and to whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaModel, ViTConfig, ViTModel

from export.adapters.random_weights import random_stack
from export.adapters.vit import pack_vit
from export.blocks import BottleneckAdapter, TransformerBlock
from export.factory import load_module
from export.pipeline import Options, export_module, export_packed
from tests.e2e.server import Array, Server, serving

D = 64
FAMILIES = ["roberta", "vit", "adapted", "own"]
SMALL = {"hidden_size": D, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
PAGE = Path(__file__).parents[2] / "docs" / "own-module.md"

Original = tuple[Server, dict[str, torch.nn.Module]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Original]:
    torch.set_num_threads(1)
    root, files = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("files")
    originals: dict[str, torch.nn.Module] = {}
    roberta = RobertaModel(RobertaConfig(**SMALL, vocab_size=50), add_pooling_layer=False).eval()
    originals["roberta"] = roberta.encoder
    export_module(roberta.encoder, Options("roberta", root))

    vit = ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=4), add_pooling_layer=False).eval()
    vit.save_pretrained(files)
    originals["vit"] = torch.nn.Sequential(*vit.layers, vit.layernorm)
    export_packed(pack_vit(files, files / "config.json"), Options("vit", root), source={})

    stack = random_stack(D, 4, 96, layers=2).eval()
    for block in stack.blocks:
        assert isinstance(block, TransformerBlock)
        block.adapter1, block.adapter2 = BottleneckAdapter(D, 16), BottleneckAdapter(D, 16)
    originals["adapted"] = stack
    export_module(stack, Options("adapted", root))

    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (files / "own.py").write_text(code)
    own = load_module(f"{files / 'own.py'}:factory").eval()
    originals["own"] = own
    export_module(own, Options("own", root))
    with serving(root, "--max-wait-ms", "5") as server:
        yield server, originals


def by_torch(original: torch.nn.Module, rows: Array) -> Array:
    tokens = torch.from_numpy(rows)
    with torch.no_grad():
        if hasattr(original, "blocks"):
            out = original(tokens, torch.tensor([len(rows)]))
        else:
            out = original(tokens[None])
            out = (out if isinstance(out, torch.Tensor) else out[0])[0]
    answer: Array = out.numpy()
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_original_s_and_the_same_beside_any_neighbour(served: Original, family: str) -> None:
    server, originals = served
    rng = np.random.default_rng()
    requests = [rng.standard_normal((int(rng.integers(1, 30)), D), dtype=np.float32) for _ in range(12)]
    for precision, bar in (("fp32", 1e-5), ("int8", 0.1)):
        model = f"{family}-{precision}"
        alone = [server.infer(model, rows) for rows in requests]
        for rows, answer in zip(requests, alone, strict=True):
            expected = by_torch(originals[family], rows)
            assert np.linalg.norm(answer - expected) / np.linalg.norm(expected) < bar
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(server.infer, [model] * len(requests), requests))
        for one, other in zip(alone, together, strict=True):
            assert one.tobytes() == other.tobytes()
