"""Intent name and execution provider -> body, and the pass that puts the bodies into a model.

requires: a graph whose operators in the domain `tokenslab` are intents, or calls of functions that the model has.
ensures: each of them calls a function of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import onnx.parser
import onnx_ir as ir

from export.errors import ExportError
from export.quantize import DOMAIN

Provider = Literal["cpu", "cuda"]
PROVIDERS: Final[tuple[Provider, ...]] = get_args(Provider)


@dataclass(frozen=True, slots=True)
class Body:
    """A model-local function in ONNX's text syntax.

    name: of the function. An intent whose nodes need different bodies (another input, another attribute) has one name
        for each; nodes that get the same name must get the same text.
    text: from the attributes or inputs on, `<attributes> (inputs) => (outputs) { ... }`. Standard operators, those of
        com.microsoft, and attribute references (`@scale`) in nested bodies too.
    """

    name: str
    text: str


BodyMaker = Callable[[ir.Node], Body]

_BODIES: Final[dict[tuple[str, Provider], Body | BodyMaker]] = {}


def register_body(intent: str, provider: Provider, body: Body | BodyMaker) -> None:
    """Lower `tokenslab::<intent>` on `provider` to `body`, or to what `body` makes of the node.

    Raises:
        ValueError: the intent has a body for that provider.
    """
    if (intent, provider) in _BODIES:
        raise ValueError(f"the intent {intent} already has a body for {provider}")
    _BODIES[intent, provider] = body


def lower(model: ir.Model, provider: Provider) -> None:
    """Add to `model`, in place, the body of every intent that its main graph uses.

    Raises:
        ExportError: an intent has no body for `provider`.
    """
    known = {name for domain, name, _overload in model.functions if domain == DOMAIN}
    added: dict[str, str] = {}
    for node in model.graph:
        if node.domain != DOMAIN or node.op_type in known:
            continue
        if (registered := _BODIES.get((node.op_type, provider))) is None:
            raise ExportError(f"{node.op_type} (node {node.name!r}) has no form for {provider}")
        body = registered if isinstance(registered, Body) else registered(node)
        assert added.setdefault(body.name, body.text) == body.text, f"two bodies are called {body.name}"
        node.op_type = body.name
    for name, text in added.items():
        _add_function(model, name, text)


def _add_function(model: ir.Model, name: str, text: str) -> None:
    # ONNX Runtime wants one version of the standard operators in a file.
    opsets = f'"": {model.opset_imports[""]}, "com.microsoft": 1'
    source = f'<opset_import: [{opsets}], domain: "{DOMAIN}">\n{name} {text}'
    function = ir.serde.deserialize_function(onnx.parser.parse_function(source))
    model.functions[function.identifier()] = function
    for domain in (DOMAIN, "com.microsoft"):
        model.opset_imports.setdefault(domain, 1)
