"""Weights of 8 and 4 bits in blocks: accuracy, independence of neighbours, and NaN that stays NaN."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from export.errors import ExportError
from export.quantization.block_forms import BlockForm, WeightMethod
from export.quantization.weight_only import WeightOnly
from export.quantize import count_quantized_matmuls
from export.relative_error import relative_error, sqnr_db
from tests.export.hand_built import opened, random_ffn, run
from tests.export.quantization.graphs import activations

W8, W4 = BlockForm(8, level=4), BlockForm(4, level=0)


@pytest.mark.parametrize(("form", "least_db"), [(W8, 36), (W4, 17)], ids=["w8", "w4"])
def test_weights_in_blocks_hold_their_bar_for_inner_dimensions_that_blocks_do_not_divide(
    form: BlockForm, least_db: float, tmp_path: Path
) -> None:
    graph = random_ffn(100, 70, seed=int(np.random.default_rng().integers(1 << 30)))
    quantizer = WeightOnly(graph, form, "w")
    made = quantizer.build()
    assert count_quantized_matmuls(made) == 2
    tokens = np.random.default_rng().standard_normal((64, 100), dtype=np.float32)
    exact = run(opened(graph, tmp_path / "fp32.onnx"), tokens)
    session = opened(made, tmp_path / "w.onnx")
    assert sqnr_db(relative_error(run(session, tokens), exact.astype(np.float64))) > least_db
    alone = np.concatenate([run(session, tokens[[i]]) for i in range(len(tokens))])
    if form is W8:
        np.testing.assert_array_equal(alone, run(session, tokens))
    tokens[5, 3], tokens[9, 0] = np.nan, np.inf
    assert np.isnan(run(session, tokens)[[5, 9]]).all()


def test_gptq_gains_where_activations_are_not_white(tmp_path: Path) -> None:
    graph = random_ffn(64, 96, seed=3)
    rows = np.random.default_rng(0).standard_normal((1024, 64), dtype=np.float32)
    met = activations(graph, rows, tmp_path)
    found: dict[WeightMethod, list[float]] = {}
    methods: tuple[WeightMethod, ...] = ("rtn", "hqq", "gptq")
    for method in methods:
        measured = WeightOnly(graph, W4, "w4", method, met).matmuls()
        found[method] = [matmul.sqnr_db or 0 for matmul in measured]
    # After GELU activations share a mean; the first matmul's are white, where no error can be fed back.
    assert found["gptq"][1] > found["rtn"][1] + 2
    assert found["hqq"][1] > found["rtn"][1] + 0.5
    assert abs(found["gptq"][0] - found["rtn"][0]) < 1


def test_gptq_of_8_bits_keeps_integers_within_their_bounds(tmp_path: Path) -> None:
    graph = random_ffn(40, 33, seed=5)
    rows = np.random.default_rng(0).standard_normal((300, 40), dtype=np.float32)
    rows[:, 7] *= 100
    quantizer = WeightOnly(graph, W8, "w8", "gptq", activations(graph, rows, tmp_path))
    assert all((matmul.sqnr_db or 0) > 34 for matmul in quantizer.matmuls())


@pytest.mark.parametrize(
    ("form", "method", "message"),
    [(W8, "hqq", "w: HQQ's zero points are floats"), (W4, "gptq", "w: GPTQ chooses by the tokens")],
    ids=["hqq", "gptq"],
)
def test_methods_that_do_not_go_are_refused(form: BlockForm, method: WeightMethod, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        WeightOnly(random_ffn(8, 8, seed=0), form, "w", method)


def test_the_library_leaves_logging_and_stdout_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    WeightOnly(random_ffn(8, 8, seed=0), W4, "w", "hqq").build()
    assert (list(root.handlers), root.level) == before
    assert capsys.readouterr() == ("", "")
