"""The real model, exported once: six trained layers over ONNX against transformers, on real sentences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import BertConfig, BertModel

from demo.minilm import MiniLM, files, pooled
from demo.sentences import sentences
from export.adapters.bert import pack_bert
from export.pipeline import Options, export_packed
from export.relative_error import relative_error
from service.manifest import Precision, read_manifest
from service.packing import Float32
from service.session import open_session

SENTENCES = 40


def run(bundle: Path, precision: Precision, parts: list[Float32]) -> list[Float32]:
    """All parts as one window of sequences."""
    session = open_session(bundle / f"{precision}-cpu.onnx", "cpu", 1)
    lengths = np.array([len(part) for part in parts])
    out = session.run(["out"], {"tokens": np.concatenate(parts), "seq_lens": lengths})[0]
    return [out[start:end] for start, end in pairwise([0, *np.cumsum(lengths)])]


def in_float64(parts: list[Float32]) -> list[npt.NDArray[np.float64]]:
    """transformers' own encoder, sentence by sentence."""
    config = BertConfig.from_json_file(files() / "config.json")
    bert = BertModel.from_pretrained(files(), config=config, add_pooling_layer=False).eval().double()
    with torch.inference_mode():
        return [bert.encoder(torch.from_numpy(part).double()[None]).last_hidden_state[0].numpy() for part in parts]


def cosines(found: list[Float32], wanted: list[Float32]) -> npt.NDArray[np.float64]:
    """Of the pooled vectors with transformers' own, which have length one too."""
    vectors = np.array([pooled(states) for states in found], np.float64)
    result: npt.NDArray[np.float64] = np.einsum("sd,sd->s", vectors, np.array(wanted, np.float64))
    return result


@pytest.mark.timeout(600)  # one export, one test: its parts would each make their own in other processes
def test_six_trained_layers_hold_their_bars_in_both_precisions(tmp_path: Path) -> None:
    packed = pack_bert(files() / "model.safetensors", files() / "config.json")
    bundle = export_packed(packed, Options("minilm", tmp_path), source={})
    fp32, int8 = read_manifest(bundle).variants
    assert [fp32.certificate.kind, int8.certificate.kind] == ["exact", "exact"]
    assert (int8.quantized_matmuls, int8.float_matmuls) == (6 * 4, 0)
    assert (fp32.quantized_matmuls, fp32.float_matmuls) == (0, 6 * 4)
    assert max(row.relative_error for row in fp32.parity) <= 1e-5

    minilm = MiniLM()
    ids = [minilm.ids(sentence) for sentence in sentences(SENTENCES)]
    parts = [minilm.embed(sentence) for sentence in ids]
    wanted = [minilm.reference(sentence) for sentence in ids]
    states = run(bundle, "fp32", parts)
    for found, reference in zip(states, in_float64(parts), strict=True):
        assert relative_error(found, reference) <= 1e-5
    assert cosines(states, wanted).min() >= 0.999999

    int8_cosines = cosines(run(bundle, "int8", parts), wanted)
    assert len(int8_cosines) == SENTENCES
    assert int8_cosines.min() >= 0.998
    assert np.median(int8_cosines) >= 0.999
