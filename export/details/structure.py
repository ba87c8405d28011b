"""What a file for CUDA must hold for that provider's kernels, place by place: read in the file, without the provider.

Structural evidence alone: an operator that is there has a kernel to run on, and nobody here has seen it run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir

from export.details.document import Fused
from export.details.fusion import place
from export.errors import ProofError
from export.lowering.attention import VARLEN_ATTENTION
from export.lowering.cross_attention import VARLEN_CROSS_ATTENTION
from export.lowering.rotary import ROTARY_EMBEDDING
from export.markdown import table
from service.manifest import MatmulForm, Variant, WeightMatmul

_CONTRIB: Final = "com.microsoft"
_BITS: Final[Mapping[MatmulForm, int]] = {"8-bit weights": 8, "4-bit weights": 4}


def structure(path: Path, matmuls: Sequence[WeightMatmul]) -> list[Fused]:
    """The calls of attention and of rotary positions in the file, and its weights in blocks, against what each needs.

    Args:
        path: of a file for CUDA.
        matmuls: what the export says became of each weight; those in blocks are a `MatMulNBits` each.
    """
    model = ir.load(path)
    rows = []
    for pattern, kernel, calls in (
        ("attention, packed", "PackedMultiHeadAttention", _calls(model, f"Packed{VARLEN_ATTENTION}")),
        ("attention, padded", "MultiHeadAttention", _calls(model, f"Padded{VARLEN_ATTENTION}")),
        ("attention to a memory", "MultiHeadAttention", _calls(model, f"Padded{VARLEN_CROSS_ATTENTION}")),
        ("rotary positions", "RotaryEmbedding", _calls(model, ROTARY_EMBEDDING)),
    ):
        missed = [place(_from_weight(node)) for node in calls if not _has(model, node, kernel)]
        if calls:
            rows.append(_row(pattern, kernel, len(calls), missed))
    in_blocks = {matmul.weight: _BITS[matmul.form] for matmul in matmuls if matmul.form in _BITS}
    missed = [weight for weight, bits in in_blocks.items() if not _in_blocks(model, weight, bits)]
    if in_blocks:
        rows.append(_row("weights in blocks", "MatMulNBits", len(in_blocks), missed))
    return rows


def check_structure(folder: Path, variants: Sequence[Variant]) -> list[str]:
    """Sections for the report on the variants for CUDA, if there are any.

    Raises:
        ProofError: a file lacks an operator that it is meant to have; names the place.
    """
    lines = []
    for variant in variants:
        if variant.provider != "cuda":
            continue
        for row in structure(folder / variant.file, variant.matmuls):
            if not row.holds:
                raise ProofError(
                    f"{variant.file}: {row.pattern}: {row.expected - row.found} of {row.expected} have no "
                    f"{row.kernels[0]}: {', '.join(row.missed)}"
                )
            lines.append((variant.precision, row.pattern, row.kernels[0], f"{row.found} of {row.expected}"))
    if not lines:
        return []
    return [
        "## Structure of the files for CUDA",
        "Structural: the operators of that provider are in the file wherever they should be; none has been run here.",
        table(("precision", "place", "operator", "found"), lines),
    ]


def _row(pattern: str, kernel: str, expected: int, missed: list[str]) -> Fused:
    return Fused(
        pattern=pattern,
        kernels=[kernel],
        expected=expected,
        found=expected - len(missed),
        written=True,
        missed=missed,
        share_of_time=None,
    )


def _calls(model: ir.Model, function: str) -> list[ir.Node]:
    """Calls of a function, or of one of its forms, whose names go on after an underscore."""
    return [n for n in model.graph if n.op_type == function or n.op_type.startswith(f"{function}_")]


def _has(model: ir.Model, call: ir.Node, kernel: str) -> bool:
    body = model.functions.get(call.op_identifier())
    return body is not None and any(_is(node, kernel) for node in body.all_nodes())


def _in_blocks(model: ir.Model, weight: str, bits: int) -> bool:
    """Whether all that multiplies by `weight` is a `MatMulNBits` of its integers, and nothing by its floats."""
    floats, packed = (model.graph.initializers.get(name) for name in (weight, f"{weight}.packed"))
    if packed is None or not packed.uses() or (floats is not None and floats.uses()):
        return False
    return all(_multiplies(model, use.node, use.idx, bits) for use in packed.uses())


def _multiplies(model: ir.Model, node: ir.Node, position: int, bits: int) -> bool:
    """Whether the node's input at `position` is the `bits`-bit integers of a `MatMulNBits`: itself, or in its body."""
    if _is(node, "MatMulNBits"):
        return position == 1 and node.attributes.get_int("bits", 4) == bits
    body = model.functions.get(node.op_identifier())
    if body is None or position >= len(body.inputs) or not (uses := body.inputs[position].uses()):
        return False
    return all(_multiplies(model, use.node, use.idx, bits) for use in uses)


def _is(node: ir.Node, kernel: str) -> bool:
    return node.op_type == kernel and node.domain == _CONTRIB


def _from_weight(node: ir.Node) -> list[ir.Node]:
    """The matmul that the call's first input comes from, which names the layer, and the call."""
    before = node.inputs[0]
    while before is not None and (producer := before.producer()) is not None:
        if any(
            value is not None and value.is_initializer() and len(value.shape or ()) == 2 for value in producer.inputs
        ):
            return [producer, node]
        before = producer.inputs[0] if producer.inputs else None
    return [node]
