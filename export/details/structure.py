"""What a file for CUDA must hold for that provider's kernels, place by place: read in the file, without the provider.

Structural evidence alone: an operator that is there has a kernel to run on, and nobody here has seen it run.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from service.manifest import Variant

_CONTRIB: Final = "com.microsoft"


def structure(path: Path, in_blocks: int) -> list[Fused]:
    """The calls of attention and of rotary positions in the file, and its weights in blocks, against what each needs.

    Args:
        path: of a file for CUDA.
        in_blocks: matmuls that the export says are `MatMulNBits`.
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
    if in_blocks:
        found = sum(_is(node, "MatMulNBits") or _has(model, node, "MatMulNBits") for node in model.graph.all_nodes())
        missed = [f"{in_blocks - found} of them"] if found < in_blocks else []
        rows.append(_row("weights in blocks", "MatMulNBits", in_blocks, missed, found=min(found, in_blocks)))
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
        in_blocks = variant.quantized_matmuls if variant.precision in ("w8", "w4") else 0
        for row in structure(folder / variant.file, in_blocks):
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


def _row(pattern: str, kernel: str, expected: int, missed: list[str], *, found: int | None = None) -> Fused:
    found = expected - len(missed) if found is None else found
    return Fused(
        pattern=pattern,
        kernels=[kernel],
        expected=expected,
        found=found,
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
