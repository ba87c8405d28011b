"""A decoder from torch over HTTP: Triton's client sends tokens and memory, and gets what torch gives each sequence."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from torch import nn
from tritonclient.utils import InferenceServerException

from export.pipeline import Options, export_module
from service.recheck import same_bits
from tests.e2e.server import Array, Server, serving

D = 16
RNG = np.random.default_rng()


@pytest.fixture(scope="module")
def decoder() -> nn.TransformerDecoder:
    torch.manual_seed(0)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 24, batch_first=True, dropout=0.0), 1).eval()


@pytest.fixture(scope="module")
def server(decoder: nn.TransformerDecoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    export_module(decoder, Options("decoder", models=models), causal=True)
    with serving(models, "--max-wait-ms", "5", "--max-window-tokens", "256") as running:
        yield running


def rows(count: int) -> Array:
    return RNG.standard_normal((count, D), dtype=np.float32)


def tensors(**arrays: np.ndarray[Any, Any]) -> list[triton.InferInput]:
    made = []
    for name, array in arrays.items():
        one = triton.InferInput(name, list(array.shape), "FP32" if array.dtype == np.float32 else "INT64")
        one.set_data_from_numpy(array)
        made.append(one)
    return made


def ask(server: Server, model: str, **arrays: np.ndarray[Any, Any]) -> Array:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        out: Array = client.infer(model, tensors(**arrays)).as_numpy("out")
        return out


def lens(values: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def in_torch(decoder: nn.TransformerDecoder, tokens: Array, memory: Array) -> Array:
    mask = nn.Transformer.generate_square_subsequent_mask(len(tokens))
    with torch.no_grad():
        out: Array = decoder(torch.from_numpy(tokens)[None], torch.from_numpy(memory)[None], mask)[0].numpy()
        return out


def test_tritons_client_gets_what_torch_gives_each_sequence(server: Server, decoder: nn.TransformerDecoder) -> None:
    parts = [(rows(n), rows(m)) for n, m in ((1, 9), (12, 1), (30, 17))]
    tokens, memory = (np.concatenate(column) for column in zip(*parts, strict=True))
    out = ask(
        server,
        "decoder-fp32",
        tokens=tokens,
        seq_lens=lens([1, 12, 30]),
        memory=memory,
        memory_seq_lens=lens([9, 1, 17]),
    )
    expected = np.concatenate([in_torch(decoder, *part) for part in parts])
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_a_padded_batch_brings_padded_memory(server: Server, decoder: nn.TransformerDecoder) -> None:
    tokens, memory = RNG.standard_normal((2, 5, D), dtype=np.float32), RNG.standard_normal((2, 7, D), dtype=np.float32)
    memory[0, 4:] = np.nan
    out = ask(server, "decoder-fp32", tokens=tokens, seq_lens=lens([5, 2]), memory=memory, memory_seq_lens=lens([4, 7]))
    np.testing.assert_allclose(out[0], in_torch(decoder, tokens[0], memory[0, :4]), atol=2e-5)
    np.testing.assert_allclose(out[1, :2], in_torch(decoder, tokens[1, :2], memory[1]), atol=2e-5)
    assert not out[1, 2:].any()


@pytest.mark.parametrize("model", ["decoder-fp32", "decoder-int8"])
def test_an_answer_is_bit_identical_to_the_request_alone(server: Server, model: str) -> None:
    requests: list[dict[str, np.ndarray[Any, Any]]] = []
    for i in range(40):
        sequences = RNG.integers(1, 40, (int(RNG.integers(1, 5)), 2))
        tokens, memory = rows(int(sequences[:, 0].sum())), rows(int(sequences[:, 1].sum()))
        memory[RNG.integers(len(memory))] *= [1, 30, 1000, np.nan, np.inf][i % 5]
        requests.append(
            {
                "tokens": tokens,
                "seq_lens": sequences[:, 0].copy(),
                "memory": memory,
                "memory_seq_lens": sequences[:, 1].copy(),
            }
        )
    alone = [ask(server, model, **one) for one in requests]
    before = server.metric("tokenslab_windows_total", model=model)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda one: ask(server, model, **one), requests))
    assert server.metric("tokenslab_windows_total", model=model) - before < len(requests), "nothing was packed"
    for one, other in zip(alone, together, strict=True):
        assert same_bits(one, other).all()


def test_metadata_names_the_inputs(server: Server) -> None:
    metadata = json.loads(server.ask("/v2/models/decoder")[2])
    assert metadata["inputs"] == [
        {"name": "tokens", "datatype": "FP32", "shape": [-1, D]},
        {"name": "seq_lens", "datatype": "INT64", "shape": [-1]},
        {"name": "memory", "datatype": "FP32", "shape": [-1, D]},
        {"name": "memory_seq_lens", "datatype": "INT64", "shape": [-1]},
    ]
    schema = json.loads(server.ask("/openapi.json")[2])["components"]["schemas"]["InferInput"]
    assert schema["properties"]["name"]["enum"] == ["tokens", "seq_lens", "memory", "memory_seq_lens"]


def test_faults_are_told_and_harm_nobody(server: Server) -> None:
    npy = io.BytesIO()
    np.save(npy, rows(2))
    lone = {"name": "tokens", "datatype": "FP32", "shape": [1, D], "data": [0.0] * D}
    for body, headers, said in (
        (npy.getvalue(), {"Content-Type": "application/x-npy"}, "memory: missing, an npy body"),
        (json.dumps({"inputs": [lone]}).encode(), {}, "'memory' is missing"),
    ):
        status, _, data = server.ask("/v2/models/decoder/infer", body, headers)
        assert (status, said in data.decode()) == (400, True), data
    with pytest.raises(InferenceServerException, match="memory_seq_lens: 1 entries for 2 sequences"):
        ask(server, "decoder", tokens=rows(3), seq_lens=lens([1, 2]), memory=rows(4), memory_seq_lens=lens([4]))
    assert ask(server, "decoder", tokens=rows(3), memory=rows(4)).shape == (3, D)
