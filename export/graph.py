"""torch module on packed tokens -> ONNX graph whose every weight matmul is `MatMul(activation, weight)`.

Owns the call of torch's exporter, its settings and its quirks. It knows no bundle and no execution provider; what has
no standard operator stays an intent node in the domain `tokenslab`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Final

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from torch import nn

from export.errors import ExportError
from export.experts import share_of
from export.normalise import gemm_to_matmul, parameter_name
from service.manifest import Kind

OPSET: Final = 21
INPUT_TOKENS: Final = "tokens"
INPUT_SEQ_LENS: Final = "seq_lens"
INPUT_MEMORY: Final = "memory"
INPUT_MEMORY_SEQ_LENS: Final = "memory_seq_lens"
OUTPUT: Final = "out"

_SAMPLE_TOKENS: Final = 5  # 0 and 1 would be specialised by torch.export
_SAMPLE_SEQ_LENS: Final = (2, 3)
_SAMPLE_MEMORY_SEQ_LENS: Final = (4, 3)
_MEMORY_ROWS: Final = "memory_rows"  # the dimension
_NO_LIMIT: Final = 1 << 62


def to_graph(module: nn.Module, kind: Kind, d_in: int, d_memory: int | None = None) -> ir.Model:
    """Export `module` (eval, float32, CPU) with a symbolic number of tokens, and of sequences where it takes them.

    Returns:
        A model with inputs `tokens` float32 (tokens, d_in) and, for "sequence", `seq_lens` int64 (sequences,), with
        `d_memory` also `memory` float32 (memory_rows, d_memory) and `memory_seq_lens` int64 (sequences,), and output
        `out` float32 (tokens, d_out). Weights that are computed from constants are folded into initializers.

    Raises:
        ExportError: torch cannot export it, or baked the number of tokens into the graph.
    """
    tokens_dim = torch.export.Dim("tokens", min=1)
    tokens = torch.zeros(_SAMPLE_TOKENS, d_in)
    inputs: tuple[torch.Tensor, ...] = (tokens,)
    shapes: tuple[dict[int, object], ...] = ({0: tokens_dim},)
    if kind == "sequence":
        sequences: dict[int, object] = {0: torch.export.Dim("sequences", min=1)}
        inputs = (tokens, torch.tensor(_SAMPLE_SEQ_LENS, dtype=torch.int64))
        shapes = ({0: tokens_dim}, sequences)
        if d_memory is not None:
            memory_seq_lens = torch.tensor(_SAMPLE_MEMORY_SEQ_LENS, dtype=torch.int64)
            inputs = (*inputs, torch.zeros(sum(_SAMPLE_MEMORY_SEQ_LENS), d_memory), memory_seq_lens)
            rows: dict[int, object] = {0: torch.export.Dim(_MEMORY_ROWS, min=1)}
            shapes = (*shapes, rows, sequences)
    names = [INPUT_TOKENS, INPUT_SEQ_LENS, INPUT_MEMORY, INPUT_MEMORY_SEQ_LENS][: len(inputs)]
    try:
        with _quiet_exporter(), torch.no_grad():
            program = torch.onnx.export(
                module,
                inputs,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=names,
                output_names=[OUTPUT],
                opset_version=OPSET,
                optimize=True,
                verbose=False,
            )
    except Exception as cause:
        raise ExportError(f"torch.onnx.export refused {type(module).__name__}: {_root(cause)}") from cause
    assert program is not None
    model = program.model
    gemm_to_matmul(model)
    # The exporter's own folding stops at small tensors: a weight that is computed from others would stay a subgraph.
    fold_constants(model, input_size_limit=_NO_LIMIT, output_size_limit=_NO_LIMIT)
    ir.passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=False),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)
    _check_signature(model, names, d_in)
    return model


def weight_flops(
    model: ir.Model,
    shares: Mapping[str, Fraction] | None = None,
    *,
    of_memory: bool = False,
    only: Container[str] | None = None,
) -> int:
    """Count 2 x multiply-adds of the weight matmuls for one token, or with `of_memory` for one row of the memory.

    A matmul that runs several times for each token (the token was reshaped into parts) counts that often; one that only
    a share of the tokens meets (`export.experts.expert_shares`) counts for that share. With `only`, those whose weight
    is one of these parameters of the module.
    """
    flops = Fraction(0)
    for node in model.graph:
        if node.op_type != "MatMul" or (weight := node.inputs[1]) is None or not weight.is_initializer():
            continue
        if _reads_memory(node) is not of_memory or not (only is None or parameter_name(weight) in only):
            continue
        share = share_of(node, shares or {})
        flops += 2 * _fixed_size(weight) * _fixed_rows(node.inputs[0]) * (1 if share is None else share)
    return int(flops)


def width_of_output(model: ir.Model) -> int:
    """d_out of a checked model."""
    shape = model.graph.outputs[0].shape
    assert shape is not None
    width = shape[-1]
    assert isinstance(width, int)
    return width


def _fixed_size(value: ir.Value) -> int:
    assert value.shape is not None
    size = 1
    for dim in value.shape:
        size *= int(dim)  # type: ignore[arg-type]
    return size


def _reads_memory(node: ir.Node) -> bool:
    """Whether a matmul has a row for each row of the memory, and not for each token."""
    x = node.inputs[0]
    first = None if x is None or not x.shape else x.shape[0]
    return isinstance(first, ir.SymbolicDim) and first.value == _MEMORY_ROWS


def _fixed_rows(value: ir.Value | None) -> int:
    rows = 1
    for dim in (value.shape if value is not None and value.shape is not None else ())[:-1]:
        rows *= dim if isinstance(dim, int) else 1
    return rows


def _check_signature(model: ir.Model, names: list[str], d_in: int) -> None:
    found = [value.name for value in model.graph.inputs]
    if found != names:
        raise ExportError(f"the exported graph takes {found}, expected {names}: an input is unused or was renamed")
    if len(model.graph.outputs) != 1:
        raise ExportError(f"the module returns {len(model.graph.outputs)} tensors, expected one")
    for value, what in ((model.graph.inputs[0], f"(tokens, {d_in})"), (model.graph.outputs[0], "(tokens, d_out)")):
        shape = value.shape
        if shape is not None and len(shape) == 2 and isinstance(shape[0], int):
            raise ExportError(f"{value.name} always has {shape[0]} rows: the number of tokens is baked into the graph")
        if shape is None or len(shape) != 2 or not isinstance(shape[1], int):
            raise ExportError(f"{value.name} has shape {shape} in the exported graph, expected {what}")
        if value.dtype != ir.DataType.FLOAT:
            raise ExportError(f"{value.name} is {value.dtype} in the exported graph, expected FLOAT")


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = registration.level
    with warnings.catch_warnings():
        # torch's exporter deep-copies a deprecated class of its own; nothing in the user's module causes it.
        warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
        # As many memories as sequences is what is meant.
        warnings.filterwarnings("ignore", message=r"(?s).*axis name: sequences will not be used", category=UserWarning)
        registration.setLevel(logging.ERROR)  # four lines about torchvision, which no module here uses
        try:
            yield
        finally:
            registration.setLevel(before)


def _root(cause: BaseException) -> str:
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {' '.join(lines[:3])}" if lines else type(cause).__name__
