from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from bench.int8_forms import FORMS, D, bare_gemms, feeds, measure, random_ffn, with_form
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
    for index, form in enumerate(FORMS):
        path = tmp_path / f"{index}.onnx"
        ir.save(with_form(quantized, form), path)
        outs.append(open_session(path, "cpu", 1).run(["out"], tokens)[0])
        path.unlink()
    for form, out in zip(FORMS, outs, strict=True):
        # A last bit in the hidden layer can move one activation by a step: 1/255 of a range, one of 3072 terms.
        close = np.linalg.norm(out - outs[0]) / np.linalg.norm(outs[0]) < 2e-3
        assert close == ("wrong" not in form.name), form.name


def test_every_graph_is_timed(quantized: ir.Model, tmp_path: Path) -> None:
    path = tmp_path / "bare.onnx"
    ir.save(bare_gemms(quantized, "uint8"), path)
    session = open_session(path, "cpu", 1)
    assert {name: value.shape for name, value in feeds(session, 2, np.random.default_rng(0)).items()} == {
        "tokens": (2, 768),
        "hidden": (2, 3072),
    }
    assert 0 < measure({"bare": session}, 2, seconds=0.05)["bare"] < 1
