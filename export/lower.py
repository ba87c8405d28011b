"""Gives each intent node a body for the chosen execution provider, as an ONNX model-local function.

The graph stays readable, and any ONNX Runtime that has the body's operators can run the file. CPU: attention runs
sequence by sequence, the only form that is bit for bit the same alone and beside others (padded and masked forms
differ by about 1e-6), and the fastest on skewed lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import onnx_ir as ir

from export.graph import DOMAIN, OPSET

CONTRIB: Final = "com.microsoft"
_ATTRIBUTES: Final = {
    "num_heads": ("num_heads", ir.AttributeType.INT),
    "causal": ("unidirectional", ir.AttributeType.INT),
    "scale": ("scale", ir.AttributeType.FLOAT),
}


def lower_cpu(model: ir.Model) -> None:
    """Add to `model`, in place, the CPU body of every intent that it uses."""
    if not any((node.domain, node.op_type) == (DOMAIN, "VarlenAttention") for node in model.graph):
        return
    function = varlen_attention_cpu()
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = 1
    model.opset_imports[CONTRIB] = 1


def varlen_attention_cpu() -> ir.Function:
    """`tokenslab::VarlenAttention(q, k, v, seq_lens)` by SplitToSequence, MultiHeadAttention on each, and Concat.

    q, k, v and the result are float32 (N, heads * head_size), seq_lens int64 (S,) with entries >= 1 and sum N.
    SequenceMap fails on zero sequences and on empty ones: callers drop those.
    """
    names = ("q", "k", "v")
    inputs = [ir.Value(name=name) for name in (*names, "seq_lens")]
    axis = _node("Constant", [], "axis", value_ints=[0])
    splits = [_node("SplitToSequence", [rows, inputs[3]], f"{rows.name}_sequences", axis=0) for rows in inputs[:3]]

    one = [ir.Value(name=f"{name}_rows", type=ir.TensorType(ir.DataType.FLOAT)) for name in names]
    batches = [_node("Unsqueeze", [rows, axis.outputs[0]], f"{rows.name}_batch") for rows in one]
    attention = _node("MultiHeadAttention", [batch.outputs[0] for batch in batches], "attended_batch", domain=CONTRIB)
    for ours, (theirs, kind) in _ATTRIBUTES.items():
        attention.attributes.add(ir.RefAttr(theirs, ours, kind))
    squeezed = _node("Squeeze", [attention.outputs[0], axis.outputs[0]], "attended_rows")
    squeezed.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    body = ir.Graph(one, squeezed.outputs, nodes=[*batches, attention, squeezed], name="one_sequence")

    mapped = _node("SequenceMap", [split.outputs[0] for split in splits], "attended_sequences", body=body)
    joined = _node("ConcatFromSequence", list(mapped.outputs), "attended", axis=0)
    opsets = {"": OPSET, CONTRIB: 1}
    graph = ir.Graph(inputs, joined.outputs, nodes=[axis, *splits, mapped, joined], opset_imports=opsets)
    return ir.Function(
        DOMAIN,
        "VarlenAttention",
        graph=graph,
        attributes=[ir.Attr(ours, kind, None) for ours, (_, kind) in _ATTRIBUTES.items()],
    )


def _node(op_type: str, inputs: Sequence[ir.Value], output: str, *, domain: str = "", **attributes: Any) -> ir.Node:
    # Names are explicit: the ones ir makes up repeat between a function and the graph nested in it.
    made = ir.node(op_type, inputs, attributes, domain=domain, name=f"{output}.{op_type}")
    made.outputs[0].name = output
    return made
