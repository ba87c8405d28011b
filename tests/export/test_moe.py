"""Mixture of experts: routed over the window, no token dropped, ties by index, every expert in the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import nn

from export.blocks import FFN, MixtureOfExperts, Router
from export.blocks.moe import experts_of, route
from export.errors import ExportError
from export.experts import active_parameters, check_experts, expert_shares
from export.graph import to_graph, weight_flops
from export.lowering import lower
from export.quantize import DOMAIN, count_quantized_matmuls, count_weight_matmuls, quantize_int8
from service.packing import Float32
from tests.export.hand_built import opened, run

D = 16

# The exporter takes a second of CPU for each expert: minutes, where many tests share the cores.
pytestmark = pytest.mark.timeout(400)


def mixture(
    experts: int = 4, top_k: int = 2, *, normalise: bool = True, activation: str = "swiglu", bias: bool = False
) -> MixtureOfExperts:
    router = Router(D, experts, top_k, normalise=normalise, bias=bias)
    return MixtureOfExperts(router, [FFN(D, 24, activation=activation, bias=bias) for _ in range(experts)]).eval()


def tokens(rows: int) -> Float32:
    return np.random.default_rng().standard_normal((rows, D), dtype=np.float32)


def in_float64(moe: MixtureOfExperts, rows: Float32) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        out: np.ndarray[Any, Any] = copy.deepcopy(moe).double()(torch.from_numpy(rows).double()).numpy()
    return out


def token_by_token(moe: MixtureOfExperts, rows: Float32) -> torch.Tensor:
    """The definition, without gathering."""
    moe = copy.deepcopy(moe).double()
    experts, answers = experts_of(moe), []
    for row in torch.from_numpy(rows).double():
        logits = moe.router.projection(row)
        best = sorted(range(len(experts)), key=lambda e: (-float(logits[e]), e))[: moe.router.top_k]
        weights = logits.softmax(0)[best]
        if moe.router.normalise:
            weights = weights / weights.sum()
        answers.append(sum(w * experts[e](row) for w, e in zip(weights, best, strict=True)))
    return torch.stack(answers)


@pytest.mark.parametrize(("experts", "top_k", "normalise"), [(4, 2, True), (5, 1, False), (3, 3, True), (1, 1, True)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_block_is_the_weighted_sum_of_each_tokens_experts(
    experts: int, top_k: int, normalise: bool, bias: bool
) -> None:
    moe = mixture(experts, top_k, normalise=normalise, bias=bias)
    rows = tokens(33)
    with torch.no_grad():
        expected = token_by_token(moe, rows)
    assert np.linalg.norm(in_float64(moe, rows) - expected.numpy()) < 1e-14 * expected.norm()


@pytest.fixture(scope="module")
def exported() -> tuple[MixtureOfExperts, ir.Model]:
    """Four experts, two for each token, and their graph: the exporter takes a second for each expert."""
    moe = mixture(bias=True)
    return moe, to_graph(moe, "position-wise", D)


def rerouted(
    exported: tuple[MixtureOfExperts, ir.Model], weight: Float32, bias: Float32
) -> tuple[MixtureOfExperts, ir.Model]:
    """The same experts behind another router: `weight` (experts, D) and `bias` (experts,)."""
    moe, graph = copy.deepcopy(exported[0]), exported[1].clone()
    for name, array in {"weight.T": weight.T, "bias": bias}.items():
        value = graph.graph.initializers[f"router.projection.{name}"]
        value.const_value = ir.tensor(np.ascontiguousarray(array))
    with torch.no_grad():
        moe.router.projection.weight.copy_(torch.from_numpy(weight))
        moe.router.projection.bias.copy_(torch.from_numpy(bias))
    return moe, graph


def session(graph: ir.Model, path: Path) -> ort.InferenceSession:
    graph = graph.clone()
    lower(graph, "cpu")
    return opened(graph, path)


@pytest.fixture(scope="module")
def top2(
    exported: tuple[MixtureOfExperts, ir.Model], tmp_path_factory: pytest.TempPathFactory
) -> tuple[MixtureOfExperts, ort.InferenceSession]:
    return exported[0], session(exported[1], tmp_path_factory.mktemp("moe") / "top2.onnx")


def test_the_file_equals_torch_and_a_row_has_the_same_bits_alone(
    top2: tuple[MixtureOfExperts, ort.InferenceSession],
) -> None:
    moe, file = top2
    for count in (1, 2, 7, 64):
        rows = tokens(count)
        out, expected = run(file, rows), in_float64(moe, rows)
        assert np.linalg.norm(out - expected) < 1e-6 * np.linalg.norm(expected)
        assert out.tobytes() == b"".join(run(file, row[None]).tobytes() for row in rows)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_experts_that_no_token_is_routed_to_change_nothing(
    exported: tuple[MixtureOfExperts, ir.Model], tmp_path: Path, precision: str
) -> None:
    """Every token goes to expert 1 and then to 3: the other two have none."""
    moe, graph = rerouted(exported, np.zeros((4, D), np.float32), np.array([0, 3, -1, 2], np.float32))
    rows = tokens(40)
    out = run(session(quantize_int8(graph) if precision == "int8" else graph, tmp_path / "out.onnx"), rows)
    error = np.linalg.norm(out - in_float64(moe, rows)) / np.linalg.norm(out)
    assert error < (0.05 if precision == "int8" else 1e-6)


def test_equal_logits_go_to_the_experts_of_the_lowest_indices(
    exported: tuple[MixtureOfExperts, ir.Model], tmp_path: Path
) -> None:
    moe, graph = rerouted(exported, np.zeros((4, D), np.float32), np.zeros(4, np.float32))
    rows = tokens(9)
    first, second = experts_of(copy.deepcopy(moe).double())[:2]
    with torch.no_grad():
        x = torch.from_numpy(rows).double()
        expected = (first(x) + second(x)).numpy() / 2
    assert np.linalg.norm(in_float64(moe, rows) - expected) < 1e-14 * np.linalg.norm(expected)
    assert np.linalg.norm(run(session(graph, tmp_path / "ties.onnx"), rows) - expected) < 1e-6 * np.linalg.norm(
        expected
    )


def route_session(folder: Path, experts: int, top_k: int, normalise: bool) -> ort.InferenceSession:
    logits = ir.val("logits", ir.DataType.FLOAT, ["tokens", experts])
    node = ir.node("Route", [logits], {"top_k": top_k, "normalise": int(normalise)}, domain=DOMAIN, num_outputs=2)
    for value, name, dtype in zip(
        node.outputs, ("chosen", "weights"), (ir.DataType.INT64, ir.DataType.FLOAT), strict=True
    ):
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(["tokens", top_k])
    graph = ir.Graph([logits], node.outputs, nodes=[node], opset_imports={"": 21, DOMAIN: 1}, name="g")
    model = ir.Model(graph, ir_version=10)
    lower(model, "cpu")
    return opened(model, folder / f"route-{experts}-{top_k}-{normalise}.onnx")


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], ort.InferenceSession]:
    folder = tmp_path_factory.mktemp("routers")
    return {(k, normalise): route_session(folder, 7, k, normalise) for k in (1, 2, 5) for normalise in (True, False)}


# Few values, so that most rows have ties; and logits so far apart that probabilities underflow.
LOGITS = npst.arrays(
    np.float32, st.tuples(st.integers(1, 40), st.just(7)), elements=st.sampled_from([-300, -1, 0, 0.5, 1, 300])
)


@given(logits=LOGITS, top_k=st.sampled_from([1, 2, 5]), normalise=st.booleans())
def test_onnx_and_torch_choose_the_same_experts_for_all_logits_ties_and_all(
    routers: dict[tuple[int, bool], ort.InferenceSession], logits: Float32, top_k: int, normalise: bool
) -> None:
    chosen, weights = routers[top_k, normalise].run(None, {"logits": logits})
    expected, expected_weights = route(torch.from_numpy(logits), top_k=top_k, normalise=normalise)
    assert np.array_equal(chosen, expected.numpy())
    assert np.allclose(weights, expected_weights.numpy(), rtol=1e-6, atol=0)
    for row, experts in zip(logits, chosen, strict=True):
        assert list(experts) == sorted(range(7), key=lambda e: (-row[e], e))[:top_k]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_without_a_number_gets_no_number_and_leaves_the_others_alone(
    top2: tuple[MixtureOfExperts, ort.InferenceSession], value: float
) -> None:
    rows = tokens(20)
    expected = run(top2[1], rows)
    rows[7, 3] = value
    out = run(top2[1], rows)
    assert np.isnan(out[7]).all()
    assert np.delete(out, 7, 0).tobytes() == np.delete(expected, 7, 0).tobytes()


def test_int8_quantizes_every_expert_and_leaves_the_router_in_float(
    exported: tuple[MixtureOfExperts, ir.Model],
) -> None:
    model = quantize_int8(exported[1])
    assert (count_quantized_matmuls(model), count_weight_matmuls(model)) == (8, 1)
    assert "router.projection.weight.T" in model.graph.initializers
    assert not [name for name in model.graph.initializers if name.startswith("experts") and name.endswith("weight.T")]


def test_a_graph_that_lost_an_expert_is_refused(exported: tuple[MixtureOfExperts, ir.Model]) -> None:
    moe, graph = exported
    check_experts(graph, moe)
    lost = copy.deepcopy(moe)
    lost.experts.append(FFN(D, 24, activation="swiglu"))
    with pytest.raises(ExportError, match=r"has 8 matmuls of experts, the 1 mixture-of-experts layers .* have 10"):
        check_experts(graph, lost)


def test_experts_that_start_out_equal_are_all_counted() -> None:
    """The exporter gives equal weights one initializer."""
    moe = mixture(2, 1, activation="relu")
    moe = MixtureOfExperts(moe.router, [copy.deepcopy(experts_of(moe)[0]) for _ in range(2)]).eval()
    check_experts(to_graph(moe, "position-wise", D), moe)


def test_flops_and_parameters_of_one_token_are_those_of_its_experts(
    exported: tuple[MixtureOfExperts, ir.Model],
) -> None:
    moe, graph = exported
    assert active_parameters(moe) == 4 * D + 4 + 2 * (3 * D * 24 + 2 * 24 + D)
    shares = expert_shares(moe)
    assert set(shares.values()) == {Fraction(1, 2)}
    assert len(shares) == 8
    assert weight_flops(graph, shares) == 2 * (4 * D + 2 * 3 * D * 24)
    assert active_parameters(FFN(D, 24)) == sum(parameter.numel() for parameter in FFN(D, 24).parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Router(D, 4, 5, normalise=True), "top_k 5: expected 1 to 4"),
        (lambda: MixtureOfExperts(Router(D, 2, 1, normalise=True), [FFN(D, 8)]), "1 experts, but the router has 2"),
        (
            lambda: MixtureOfExperts(Router(D, 2, 1, normalise=True), [FFN(D, 8), FFN(D, 9)]),
            "must be FFNs of one shape, 16 wide",
        ),
        (lambda: MixtureOfExperts(Router(8, 1, 1, normalise=True), [FFN(D, 8)]), "of one shape, 8 wide"),
    ],
    ids=["top-k", "count", "hidden units", "width"],
)
def test_a_mixture_that_does_not_fit_together_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
