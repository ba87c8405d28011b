"""An intent becomes a call of the function that its provider has for it, or the export stops."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from export.errors import ExportError
from export.lowering import Body, lower, register_body, registry
from export.quantize import DOMAIN

DOUBLE = Body("Twice", "(x) => (y) { y = Add (x, x) }")


@pytest.fixture(autouse=True)
def _own_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BODIES", dict(registry._BODIES))


def model_of(*intents: str) -> ir.Model:
    value = x = ir.val("x", ir.DataType.FLOAT, ["tokens", 4])
    nodes = []
    for intent in intents:
        nodes.append(ir.node(intent, [value], {"factor": 2.0}, domain=DOMAIN))
        value = nodes[-1].outputs[0]
    graph = ir.Graph([x], [value], nodes=nodes, opset_imports={"": 21, DOMAIN: 1}, name="g")
    return ir.Model(graph, ir_version=10)


def test_nodes_that_need_different_bodies_call_different_functions() -> None:
    register_body("Scaled", "cpu", lambda node: Body(f"Scaled{node.attributes.get_float('factor'):.0f}", DOUBLE.text))
    register_body("Twice", "cpu", DOUBLE)
    model = model_of("Scaled", "Twice", "Twice")
    lower(model, "cpu")
    assert [node.op_type for node in model.graph] == ["Scaled2", "Twice", "Twice"]
    assert {name for _, name, _ in model.functions} == {"Scaled2", "Twice"}


def test_an_intent_without_a_body_for_the_provider_stops_the_export() -> None:
    register_body("Twice", "cpu", DOUBLE)
    with pytest.raises(ExportError, match=r"Twice .* has no form for cuda"):
        lower(model_of("Twice"), "cuda")


def test_a_second_body_for_the_same_intent_and_provider_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="VarlenAttention already has a body for cpu"):
        register_body("VarlenAttention", "cpu", DOUBLE)


def test_calls_of_functions_that_the_model_has_are_left_alone() -> None:
    register_body("Twice", "cpu", DOUBLE)
    model = model_of("Twice")
    lower(model, "cpu")
    before = dict(model.functions)
    lower(model, "cuda")
    assert model.functions == before
