from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from bench.int8_forms import BARS, OTHERS, D, bare_gemms, feeds, graphs, measure, random_ffn, verdicts, with_form
from export.quantization.forms import EIGHT_BIT
from export.quantize import quantize_int8
from service.session import open_session


@pytest.fixture(scope="module")
def quantized() -> ir.Model:
    return quantize_int8(random_ffn(seed=0))


def test_every_form_computes_what_is_shipped_except_the_one_that_says_it_does_not(
    quantized: ir.Model, tmp_path: Path
) -> None:
    tokens = {"tokens": np.random.default_rng(0).standard_normal((3, D), dtype=np.float32)}
    outs = []
    for index, model in enumerate([quantized, *(with_form(quantized, form) for form in OTHERS)]):
        path = tmp_path / f"{index}.onnx"
        ir.save(model, path)
        outs.append(open_session(path, "cpu", 1).run(["out"], tokens)[0])
        path.unlink()
    for form, out in zip(OTHERS, outs[1:], strict=True):
        # Forms that round activations on another grid differ by the noise of 8 bits, 36 dB each.
        close = np.linalg.norm(out - outs[0]) / np.linalg.norm(outs[0]) < 3e-2
        assert close == ("wrong" not in form.name), form.name


def test_every_graph_is_timed(quantized: ir.Model, tmp_path: Path) -> None:
    path = tmp_path / "bare.onnx"
    ir.save(bare_gemms(quantized, EIGHT_BIT), path)
    session = open_session(path, "cpu", 1)
    assert {name: value.shape for name, value in feeds(session, 2, np.random.default_rng(0)).items()} == {
        "tokens": (2, 768),
        "hidden": (2, 3072),
    }
    assert 0 < measure({"bare": session}, 2, seconds=0.05)["bare"] < 1


def test_every_bar_names_graphs_that_are_measured_and_is_a_share_of_speed(tmp_path: Path) -> None:
    names = set(graphs(tmp_path, others=False))
    assert {name for bar in BARS for name in (bar.graph, bar.floor)} <= names
    times = dict.fromkeys(names, 2.0) | {"int8, bare matmuls": 1.0}
    assert [shares[64] for _, shares in verdicts({64: times})] == [0.5, 1.0, 1.0]
