from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.errors import ExportError
from export.quantization.forms import DOMAIN, EIGHT_BIT, FORMS, OPERATORS, SEVEN_BIT, Form
from export.quantize import count_quantized_matmuls, count_weight_matmuls, quantize_int8
from service.packing import Float32
from service.recheck import same_bits
from tests.export.hand_built import ffn, graph, linear, opened, random_ffn, run, saved


def sqnr_db(reference: Float32, out: Float32) -> float:
    reference64 = reference.astype(np.float64)
    return float(10 * np.log10((reference64**2).sum() / ((out - reference64) ** 2).sum()))


def uniform(rng: np.random.Generator, *shape: int, bound: float) -> Float32:
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def normal(rng: np.random.Generator, *shape: int, std: float = 1.0) -> Float32:
    return (std * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("init", ["nn.Linear default", "N(0, 1/fan_in)"])
def test_a_random_ffn_keeps_35_db(tmp_path: Path, init: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    d, d_ff = 768, 3072
    if init == "N(0, 1/fan_in)":
        float_model = random_ffn(d, d_ff, seed)
    else:  # U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights and biases
        float_model = ffn(
            uniform(rng, d, d_ff, bound=d**-0.5),
            uniform(rng, d_ff, bound=d**-0.5),
            uniform(rng, d_ff, d, bound=d_ff**-0.5),
            uniform(rng, d, bound=d_ff**-0.5),
        )
    tokens = normal(rng, 64, d)
    reference = run(opened(float_model, tmp_path / "fp32.onnx"), tokens)
    out = run(opened(quantize_int8(float_model), tmp_path / "int8.onnx"), tokens)
    assert sqnr_db(reference, out) >= 35


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inner", [7, 64, 100, 130, 384, 768, 3072])
def test_a_row_alone_and_in_any_batch_is_the_same_bits(tmp_path: Path, inner: int, threads: int, form: Form) -> None:
    rng = np.random.default_rng(inner)
    for width in (7, 64, 100, 130, 384, 768, 3072):
        model = linear(normal(rng, inner, width, std=inner**-0.5), normal(rng, width))
        session = opened(quantize_int8(model, form), tmp_path / f"{width}.onnx", threads)
        tokens = normal(rng, 257, inner) * rng.choice([1e-3, 1, 30, 1000], (257, 1)).astype(np.float32)
        alone = np.concatenate([run(session, row[None]) for row in tokens[:40]])
        for rows in (2, 3, 8, 17, 64, 129, 257):
            assert same_bits(alone[:rows], run(session, tokens[:rows])[:40]).all(), (width, rows)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 33), st.integers(1, 20), st.sampled_from(FORMS))
@settings(max_examples=40, deadline=None)
def test_the_file_computes_the_stated_formula_in_integers(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, inner: int, width: int, form: Form
) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = normal(rng, inner, width), normal(rng, width)
    tokens = normal(rng, rows, inner, std=float(10.0 ** rng.integers(-3, 4)))
    out = run(opened(quantize_int8(linear(weight, bias), form), tmp_path_factory.mktemp("m") / "m.onnx"), tokens)

    low, high = tokens.min(1, keepdims=True), tokens.max(1, keepdims=True)
    step = np.maximum((high - low) / np.float32(255), np.finfo(np.float32).tiny)
    q = np.rint((tokens - low) / step).astype(np.int64)
    weight_step = np.abs(weight).max(0) / np.float32(form.levels)
    levels = np.clip(np.rint(weight / weight_step), -form.levels, form.levels).astype(np.int64)
    offset = low.astype(np.float64) * levels.sum(0) * weight_step
    expected = (q @ levels) * step.astype(np.float64) * weight_step + offset + bias
    # float32 rounding of the product before the row's minimum is added: |product| <= 255 * 127 * K
    size = 255 * 127 * inner * step * weight_step + np.abs(offset) + np.abs(expected)
    bound = 4 * np.finfo(np.float32).eps * size
    assert (np.abs(out - expected) <= bound).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_no_number_and_leaves_its_neighbours_alone(
    tmp_path: Path, form: Form, poison: float
) -> None:
    rng = np.random.default_rng(5)
    session = opened(quantize_int8(random_ffn(64, 256, 5), form), tmp_path / "m.onnx")
    tokens = normal(rng, 33, 64)
    clean = run(session, tokens)
    tokens[16, 3] = poison
    out = run(session, tokens)
    assert not np.isfinite(out[16]).any()
    others = np.arange(33) != 16
    assert same_bits(clean[others], out[others]).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_a_row_of_zeros_gives_the_bias_to_the_bit(tmp_path: Path, form: Form) -> None:
    rng = np.random.default_rng(6)
    bias = normal(rng, 100)
    session = opened(quantize_int8(linear(normal(rng, 130, 100), bias), form), tmp_path / "m.onnx")
    assert (run(session, np.zeros((3, 130), np.float32)) == bias).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_a_constant_row_far_from_zero_keeps_all_its_digits(tmp_path: Path, form: Form) -> None:
    rng = np.random.default_rng(9)
    weight = rng.integers(-form.levels, form.levels + 1, (130, 100)).astype(np.float32)
    weight[0] = form.levels  # each column's largest: its scale is 1 and rounding loses nothing
    session = opened(quantize_int8(linear(weight, np.zeros(100, np.float32)), form), tmp_path / "m.onnx")
    tokens = np.array([[3.0], [-1000.0]], np.float32) * np.ones((1, 130), np.float32)
    assert np.allclose(run(session, tokens), tokens @ weight, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e33])
def test_quality_does_not_depend_on_the_magnitude_of_a_row(tmp_path: Path, form: Form, magnitude: float) -> None:
    rng = np.random.default_rng(7)
    model = linear(normal(rng, 256, 64, std=1 / 16), np.zeros(64, np.float32))
    tokens = normal(rng, 8, 256, std=magnitude)
    reference = run(opened(model, tmp_path / "fp32.onnx"), tokens)
    out = run(opened(quantize_int8(model, form), tmp_path / "int8.onnx"), tokens)
    assert sqnr_db(reference / np.float32(magnitude), out / np.float32(magnitude)) >= (35 if form is EIGHT_BIT else 32)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_denormal_rows_and_columns_of_zeros_stay_finite(tmp_path: Path, form: Form) -> None:
    rng = np.random.default_rng(8)
    weight, bias = normal(rng, 64, 32), normal(rng, 32)
    weight[:, 5] = 0
    out = run(
        opened(quantize_int8(linear(weight, bias), form), tmp_path / "m.onnx"),
        np.concatenate([np.full((1, 64), 1e-42, np.float32), normal(rng, 2, 64)]),
    )
    assert np.allclose(out[0], bias, rtol=0, atol=1e-30)
    assert (out[:, 5] == bias[5]).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_full_range_weights_and_activations_do_not_saturate(tmp_path: Path, form: Form) -> None:
    """uint8 x int8 kernels add pairs in 16 bits: this input makes every pair as large as it can be."""
    weight = np.where(np.arange(64) % 2, 1, -1).astype(np.float32) * np.ones((512, 1), np.float32)
    session = opened(quantize_int8(linear(weight, np.zeros(64, np.float32)), form), tmp_path / "m.onnx")
    tokens = np.ones((5, 512), np.float32)
    tokens[:, :2] = 0  # the range; every other activation is 255
    assert np.allclose(run(session, tokens), tokens @ weight, rtol=1e-6)


def test_activations_of_rank_three_keep_their_leading_dimensions(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    weight = normal(rng, 16, 24)
    body = "h = MatMul(tokens, w)\n s = Constant<value_ints=[-1, 24]>()\n out = Reshape(h, s)"
    model = graph(body, {"w": weight}, inputs="float[batch, length, 16] tokens")
    tokens = normal(rng, 3, 5, 16)
    stacked = run(opened(quantize_int8(model), tmp_path / "three.onnx"), tokens)
    flat = run(
        opened(quantize_int8(linear(weight, np.zeros(24, np.float32))), tmp_path / "two.onnx"), tokens.reshape(15, 16)
    )
    assert stacked.shape == (15, 24)
    assert same_bits(stacked + np.float32(0), flat).all()


def test_a_shared_weight_is_stored_once_and_float_weights_are_dropped(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    model = graph("h = MatMul(tokens, w)\n r = Relu(h)\n out = MatMul(r, w)", {"w": normal(rng, 256, 256)})
    quantized = quantize_int8(model)
    assert count_quantized_matmuls(quantized) == 2
    assert sorted(quantized.graph.initializers) == ["w.column_sums", "w.int8", "w.scales"]
    size = {m: saved(m, tmp_path / f"{i}.onnx").stat().st_size for i, m in enumerate((model, quantized))}
    assert size[quantized] < 0.3 * size[model]


def test_a_weight_with_another_use_stays() -> None:
    model = graph("h = MatMul(tokens, w)\n out = Add(h, w)", {"w": np.ones((8, 8), np.float32)})
    assert "w" in quantize_int8(model).graph.initializers


def test_the_given_model_is_left_as_it_was() -> None:
    model = random_ffn(8, 16, 0)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert count_weight_matmuls(quantize_int8(model)) == 0
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert count_weight_matmuls(model) == 2


@pytest.mark.parametrize("opset", [21, 22, 23, 24])
def test_the_file_loads_at_every_opset_from_21(tmp_path: Path, opset: int) -> None:
    model = graph("out = MatMul(tokens, w)", {"w": np.eye(8, dtype=np.float32)}, opset=opset)
    out = run(opened(quantize_int8(model), tmp_path / "m.onnx"), np.ones((2, 8), np.float32))
    assert np.allclose(out, 1, rtol=1e-5)


def test_onnx_runtime_keeps_the_bias_out_of_the_row_scale_and_fuses_it_with_gelu(tmp_path: Path) -> None:
    """MatMulIntegerToFloatFusion can absorb a bias and scale it per row: look at the graph that really runs."""
    import onnx
    import onnxruntime as ort

    from service.session import session_options

    path = saved(quantize_int8(random_ffn(32, 64, 0)), tmp_path / "m.onnx")
    options = session_options(1)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    integer = [node for node in nodes if node.op_type == "MatMulIntegerToFloat"]
    assert [len(node.input) for node in integer] == [6, 6]  # a seventh would be the bias
    assert [node.op_type for node in nodes].count("BiasGelu") == 1
    assert not any(node.op_type in {"MatMul", "Gemm", *OPERATORS} for node in nodes)


def test_nothing_to_quantize_is_an_error() -> None:
    with pytest.raises(ExportError, match="no weight matmul"):
        quantize_int8(graph("out = Relu(tokens)", {}))


@pytest.mark.parametrize(
    "left",
    [
        "o = Gemm(h, v)",
        "t = Transpose<perm=[1, 0]>(v)\n o = MatMul(h, t)",
        'o = Einsum<equation="ij,jk->ik">(h, v)',
        "o = MatMul(v, h)",
    ],
)
def test_a_weight_operator_that_would_stay_in_float_is_an_error_that_names_it(left: str) -> None:
    eight = np.ones((8, 8), np.float32)
    model = graph(f"h = MatMul(tokens, w)\n {left}\n out = Relu(o)", {"w": eight, "v": eight})
    assert count_weight_matmuls(model) == 2
    with pytest.raises(ExportError, match=r"1 weight operators would stay in float: (Gemm|MatMul|Einsum)"):
        quantize_int8(model)


def test_a_matmul_of_two_activations_is_not_a_weight_matmul() -> None:
    model = graph("t = Transpose<perm=[1, 0]>(tokens)\n h = MatMul(tokens, t)\n out = Relu(h)", {})
    assert count_weight_matmuls(model) == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_an_error_that_names_it(poison: float) -> None:
    weight = np.ones((8, 4), np.float32)
    weight[2, 1] = poison
    with pytest.raises(ExportError, match="'w' has 1 values that are not finite"):
        quantize_int8(linear(weight, np.zeros(4, np.float32)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_the_inner_dimension_is_bounded_by_the_accumulator(form: Form) -> None:
    largest = 255 * (form.zero + form.levels)
    assert form.max_inner * largest < 2**31 <= (form.max_inner + 1) * largest
    long = linear(np.ones((form.max_inner + 1, 1), np.float32), np.zeros(1, np.float32))
    with pytest.raises(ExportError, match=f"'w' has {form.max_inner + 1} rows; {form.name} .* allow {form.max_inner}"):
        quantize_int8(long, form)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.dtype)
def test_the_longest_inner_dimension_is_still_exact(tmp_path: Path, form: Form) -> None:
    model = linear(np.ones((form.max_inner, 2), np.float32), np.zeros(2, np.float32))
    out = run(opened(quantize_int8(model, form), tmp_path / "m.onnx"), np.ones((2, form.max_inner), np.float32))
    assert np.allclose(out, form.max_inner, rtol=1e-6)


def test_no_two_products_of_the_seven_bit_form_saturate_16_bits() -> None:
    assert 2 * 255 * SEVEN_BIT.levels <= 2**15 - 1
    assert 2 * 255 * (SEVEN_BIT.levels + 1) > 2**15 - 1


def test_the_function_is_in_the_file_under_its_domain() -> None:
    for form in FORMS:
        functions = quantize_int8(random_ffn(8, 16, 0), form).functions.values()
        assert [(f.domain, f.name) for f in functions] == [(DOMAIN, form.operator)]
