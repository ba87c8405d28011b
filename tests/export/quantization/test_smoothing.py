"""Smoothing on small graphs: where it goes, that the float function stays, and that outliers cost less after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.quantization.calibration import Activations
from export.quantization.forms import EIGHT_BIT, FORMS, Form
from export.quantization.smoothing import Smoothed, activation_widths, channel_scales, smooth
from export.quantize import Quantizer, quantize_int8
from service.packing import Float32
from tests.export.hand_built import graph, opened, run

K, HIDDEN = 48, 96


def normal(rng: np.random.Generator, *shape: int) -> Float32:
    return rng.standard_normal(shape, dtype=np.float32)


def outliers(rng: np.random.Generator, rows: int = 200, width: int = K) -> Float32:
    """Tokens with three loud channels."""
    tokens = normal(rng, rows, width)
    tokens[:, [1, 7, 20]] *= np.float32(40)
    return tokens


def smoothed(model: ir.Model, tokens: Float32, tmp_path: Path, form: Form = EIGHT_BIT) -> Mapping[str, Smoothed]:
    """Smooth `model` in place."""
    widths = activation_widths(model.graph)
    return smooth(model, Activations(model, widths, [{"tokens": tokens}], tmp_path / "float.onnx"), form)


def sqnr_db(reference: Float32, out: Float32) -> float:
    return float(10 * np.log10((reference.astype(np.float64) ** 2).sum() / ((out - reference) ** 2).sum()))


LOUD = np.ones(K, np.float32)
LOUD[[3, 9, 30]] = 40


def weights(rng: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    return {
        "g": LOUD * rng.uniform(0.5, 1.5, K).astype(np.float32),
        "gb": normal(rng, K),
        "w": normal(rng, K, HIDDEN),
        "v": normal(rng, HIDDEN, 8),
        "up": normal(rng, 8, K) * LOUD,
        "ub": normal(rng, K),
        "two": normal(rng, 8, 2 * K) * np.concatenate([LOUD, LOUD]),
        "eps": np.array(1e-6, np.float32),
        "axes": np.array([-1], np.int64),
        "width": np.array([K, K], np.int64),
    }


WIDE = f"float[tokens, {K}] tokens"
NARROW = "float[tokens, 8] tokens"
NORM = "x = LayerNormalization(tokens, g, gb)\n"
RMS = (
    "s = Mul(tokens, tokens)\n m = ReduceMean(s, axes)\n e = Add(m, eps)\n r = Sqrt(e)\n n = Div(tokens, r)\n"
    "x = Mul(n, g)\n"
)
GATED = "b = MatMul(tokens, two)\n one, other = Split<axis=-1>(b, width)\n a = Sigmoid(one)\n x = Mul(a, other)\n"
CASES = {
    "LayerNorm": (WIDE, f"{NORM} out = MatMul(x, w)", {"x": "norm"}),
    "RMSNorm": (WIDE, f"{RMS} out = MatMul(x, w)", {"x": "norm"}),
    "LayerNorm for two matmuls": (
        WIDE,
        f"{NORM} a = MatMul(x, w)\n b = MatMul(x, w2)\n out = Add(a, b)",
        {"x": "norm"},
    ),
    "LayerNorm before a residual": (
        WIDE,
        f"{NORM} h = MatMul(x, w)\n r = ReduceSum<keepdims=1>(x, axes)\n out = Add(h, r)",
        {"x.smoothed": "multiply"},
    ),
    "the graph's input": (WIDE, "out = MatMul(tokens, w)", {"tokens.smoothed": "multiply"}),
    "ReLU after a bias": (
        NARROW,
        "p = MatMul(tokens, up)\n i = Add(p, ub)\n x = Relu(i)\n out = MatMul(x, w)",
        {"x": "weights"},
    ),
    "GELU": (
        NARROW,
        "p = MatMul(tokens, up)\n i = Add(p, ub)\n x = Gelu(i)\n out = MatMul(x, w)",
        {"x.smoothed": "multiply"},
    ),
    "the ungated half of a gated FFN": (NARROW, f"{GATED} out = MatMul(x, w)", {"x": "weights"}),
}


@pytest.mark.parametrize("name", CASES)
def test_scales_go_where_they_cost_nothing_and_the_float_function_stays(tmp_path: Path, name: str) -> None:
    inputs, body, places = CASES[name]
    rng = np.random.default_rng(len(name))
    arrays = weights(rng)
    arrays["w2"] = normal(rng, K, HIDDEN)
    used = {key: array for key, array in arrays.items() if re.search(rf"\b{key}[,)]", body)}
    model = graph(body, used, inputs=inputs)
    tokens = outliers(rng) if inputs == WIDE else normal(rng, 200, 8)
    before = run(opened(model, tmp_path / "before.onnx"), tokens)
    quantized_before = run(opened(quantize_int8(model), tmp_path / "q.onnx"), tokens)
    found = smoothed(model, tokens, tmp_path)
    assert places.items() <= {x: how.place for x, how in found.items()}.items()
    after = run(opened(model, tmp_path / "after.onnx"), tokens)
    assert np.abs(after - before).max() <= 1e-4 * np.abs(before).max()
    quantized_after = run(opened(quantize_int8(model), tmp_path / "q2.onnx"), tokens)
    assert sqnr_db(before, quantized_after) >= sqnr_db(before, quantized_before) + (1 if inputs == WIDE else 0)


def test_a_value_that_others_see_is_not_changed_under_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {key: weights(rng)[key] for key in ("up", "w", "axes")}
    body = "x = MatMul(tokens, up)\n h = MatMul(x, w)\n r = ReduceSum<keepdims=1>(x, axes)\n out = Add(h, r)"
    model = graph(body, arrays, inputs=NARROW)
    tokens = normal(rng, 100, 8)
    before = run(opened(model, tmp_path / "before.onnx"), tokens)
    found = smoothed(model, tokens, tmp_path)
    assert found["x.smoothed"].place == "multiply"
    after = run(opened(model, tmp_path / "after.onnx"), tokens)
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()


def test_a_weight_that_two_activations_meet_is_left_alone_and_stored_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    model = graph("h = MatMul(tokens, w)\n r = Relu(h)\n out = MatMul(r, w)", {"w": normal(rng, K, K)}, inputs=WIDE)
    assert smoothed(model, outliers(rng), tmp_path) == {}
    assert list(model.graph.initializers) == ["w"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_error_feedback_beats_rounding_to_nearest_on_what_it_was_calibrated_for(tmp_path: Path, form: Form) -> None:
    rng = np.random.default_rng(5)
    mixing = normal(rng, 6, K)  # tokens that span few directions, as real ones do
    calibration, held_out = (normal(rng, 300, 6) @ mixing + 0.1 * normal(rng, 300, K) for _ in range(2))
    model = graph("out = MatMul(tokens, w)", {"w": normal(rng, K, HIDDEN)}, inputs=WIDE)
    activations = Activations(model, {"tokens": K}, [{"tokens": calibration}], tmp_path / "float.onnx")
    reference = run(opened(model, tmp_path / "fp32.onnx"), held_out)
    found = {}
    for feedback in (False, True):
        quantizer = Quantizer(model, form, activations, feedback=feedback)
        out = run(opened(quantizer.build(), tmp_path / f"{feedback}.onnx"), held_out)
        found[feedback] = sqnr_db(reference, out)
        (matmul,) = quantizer.matmuls()
        assert matmul.sqnr_db == pytest.approx(found[feedback], abs=1)
    assert found[True] >= found[False] + 0.5


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_tokens_beside_are_not_given_up_for_what_the_calibration_holds(tmp_path: Path, form: Form) -> None:
    rng = np.random.default_rng(6)
    mixing = normal(rng, 6, K)
    own = normal(rng, 300, 6) @ mixing + 0.01 * normal(rng, 300, K)
    own[:, 3] *= 0.01  # quiet here, loud elsewhere
    beside, elsewhere = (normal(rng, 300, K) * np.where(np.arange(K) == 3, 20, 1).astype(np.float32) for _ in range(2))
    model = graph("out = MatMul(tokens, w)", {"w": normal(rng, K, HIDDEN)}, inputs=WIDE)
    session = opened(model, tmp_path / "fp32.onnx")
    found = {}
    for name, feeds in (("alone", []), ("with", [{"tokens": beside}])):
        activations = Activations(model, {"tokens": K}, [{"tokens": own}], tmp_path / "float.onnx", feeds)
        quantized = opened(Quantizer(model, form, activations, feedback=True).build(), tmp_path / f"{name}.onnx")
        found[name] = [sqnr_db(run(session, rows), run(quantized, rows)) for rows in (own, elsewhere)]
    assert found["with"][1] >= found["alone"][1] + 3
    assert found["with"][0] >= found["alone"][0] - 3


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_channel_scales_are_positive_and_finite_and_leave_dead_channels(seed: int, alpha: float, width: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = (np.abs(normal(rng, width)) * (rng.random(width) < 0.8) * 10.0 ** rng.integers(-30, 30) for _ in range(2))
    scales = channel_scales(x.astype(np.float32), w.astype(np.float32), alpha)
    assert (scales > 0).all()
    assert np.isfinite(scales).all()
    assert (scales[(x == 0) | (w == 0)] == 1).all()
