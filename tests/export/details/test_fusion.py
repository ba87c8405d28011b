"""What should fuse is found in real files, counted in what ONNX Runtime makes of them, and missed where it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from transformers import LlamaConfig, LlamaModel

from export.adapters.registry import pack
from export.details.document import Fused
from export.details.fusion import broken, fusions
from export.graph import to_graph
from export.lowering import lower
from service.errors import ProviderError

ROOT = Path(__file__).parents[3]
FEEDS = {"tokens": np.ones((8, 64), np.float32), "seq_lens": np.array([5, 3])}


def rows(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, Fused]:
    return {row.pattern: row for row in fusions(path, "cpu", feeds)}


def test_the_shipped_block_fuses_all_that_it_should_in_both_precisions() -> None:
    folder = ROOT / "models" / "demo-block" / "1"
    fp32, int8 = (rows(folder / f"{precision}-cpu.onnx", FEEDS) for precision in ("fp32", "int8"))
    assert {name: row.expected for name, row in fp32.items()} == {"weight matmul and bias": 8, "layer norm": 4}
    assert {name: row.expected for name, row in int8.items()} == {
        "integer matmul and scales": 8,
        "bias and GELU": 2,
        "layer norm": 4,
    }
    for row in (*fp32.values(), *int8.values()):
        assert row.holds
        assert row.share_of_time is None
    assert broken(fp32.values()) == []


def test_what_does_not_fuse_is_named_with_its_share_of_a_run(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    packed = pack(LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=8)).eval())
    path = tmp_path / "llama.onnx"
    graph = to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)
    lower(graph, "cpu")
    ir.save(graph, path)
    found = rows(path, {"tokens": np.ones((8, 16), np.float32), "seq_lens": np.array([5, 3])})
    norm = found["RMS norm"]
    assert (norm.expected, norm.found, norm.holds) == (3, 0, False)
    assert norm.share_of_time is not None
    assert 0 < norm.share_of_time < 1
    (warning,) = broken(found.values())
    assert warning.startswith("RMS norm: 3 of 3 did not become SimplifiedLayerNormalization")
    assert found["SiLU"].holds


def test_a_provider_that_is_not_there_is_said() -> None:
    with pytest.raises(ProviderError, match="CUDA"):
        fusions(ROOT / "models" / "demo-ffn" / "1" / "fp32-cpu.onnx", "cuda", FEEDS)
