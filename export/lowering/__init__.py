"""Gives each intent node a body for the chosen execution provider, as an ONNX model-local function.

The graph stays readable, and any ONNX Runtime that has the body's operators can run the file. One file for each family
of intents registers its bodies here; this package knows neither torch nor files.
"""

from __future__ import annotations

from export.lowering import attention, cross_attention, cuda_attention, rotary, routing
from export.lowering.registry import Body, BodyMaker, Provider, lower, register_body

attention.register()
cross_attention.register()
cuda_attention.register()
rotary.register()
routing.register()

__all__ = ["Body", "BodyMaker", "Provider", "lower", "register_body"]
