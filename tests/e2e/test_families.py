"""A model of each family, exported in both precisions and served: transformers' answers, whoever is beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from export.pipeline import Options, export_module
from export.relative_error import relative_error, sqnr_db
from service.manifest import read_manifest
from tests.e2e.server import Array, serving
from tests.export.adapters.families import LLAMA3_ROPE, D, gpt2, llama, mistral, t5


def positions_of_gpt2(model: Any, rows: Tensor) -> Tensor:
    """Hidden states are what the model makes of its embeddings: take off what it would add again."""
    added: Tensor = model.wpe.weight[: rows.shape[1]]
    return rows - added


FAMILIES: dict[str, Any] = {
    "llama": (lambda: llama(rope_parameters=LLAMA3_ROPE), lambda model: model, lambda _model, rows: rows),
    "mistral": (mistral, lambda model: model, lambda _model, rows: rows),
    "gpt2": (gpt2, lambda model: model, positions_of_gpt2),
    "t5": (lambda: t5(feed_forward_proj="gated-gelu"), lambda model: model.encoder, lambda _model, rows: rows),
}
BAR = 1e-5  # float32 against float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_served_model_answers_as_transformers_does(tmp_path: Path, family: str) -> None:
    make, stack, prepared = FAMILIES[family]
    model = make()
    folder = export_module(model, Options(family, tmp_path))
    fp32, int8 = read_manifest(folder).variants
    depth = 3 if family == "t5" else 2
    assert [fp32.certificate.kind, int8.certificate.kind] == ["exact", "exact"]
    assert (int8.quantized_matmuls, int8.float_matmuls) == (4 * depth, 0)
    assert (fp32.quantized_matmuls, fp32.float_matmuls) == (0, 4 * depth)

    seq_lens = [5, 1, 19, 2, 7]
    tokens: Array = np.random.default_rng().standard_normal((sum(seq_lens), D), dtype=np.float32)
    ends = np.cumsum(seq_lens)
    spans = [slice(end - length, end) for end, length in zip(ends, seq_lens, strict=True)]
    inner = stack(model)
    with torch.no_grad():
        expected = np.concatenate(
            [
                inner(inputs_embeds=prepared(inner, torch.from_numpy(tokens[span])[None])).last_hidden_state[0].numpy()
                for span in spans
            ]
        )
    with serving(tmp_path) as server:
        exact = server.infer(f"{family}-fp32", tokens, seq_lens)
        assert relative_error(exact, expected.astype(np.float64)) <= BAR
        assert sqnr_db(relative_error(server.infer(f"{family}-int8", tokens, seq_lens), exact.astype(np.float64))) > 20
        for precision in ("fp32", "int8"):
            poisoned = tokens.copy()
            poisoned[spans[2]] = np.nan
            beside = server.infer(f"{family}-{precision}", poisoned, seq_lens)
            assert np.isnan(beside[spans[2]]).all()
            for span, length in zip(spans, seq_lens, strict=True):
                alone = server.infer(f"{family}-{precision}", poisoned[span], [length])
                assert alone.tobytes() == beside[span].tobytes() or span == spans[2]
