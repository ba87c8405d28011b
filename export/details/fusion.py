"""The fusion contract: what ONNX Runtime should make of a file's patterns, counted in what it does make of them.

A pattern is found in the file as written. The kernels that it should become are those that ONNX Runtime 1.32 has for it
on the provider; where fewer are there, the operators that are left are named, with their share of a run's time.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnxruntime as ort

from export.details.document import Fused
from export.optimized import optimized
from export.quantization.calibration import Feeds
from export.quantization.forms import OPERATORS
from service.session import PROVIDERS, Provider, session_options

RUNS: Final = 5

_NORMS: Final = ("LayerNormalization", "SkipLayerNormalization")
_RMS: Final = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RMSNormalization")
_GELUS: Final = ("BiasGelu", "FastGelu")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """`occurrences` yields the nodes of each: what a run has beside other kernels if it did not fuse."""

    name: str
    kernels: tuple[str, ...]
    occurrences: Callable[[ir.Graph], Iterator[Sequence[ir.Node]]]


def fusions(path: Path, provider: Provider, feeds: Feeds) -> list[Fused]:
    """What became of each pattern that the file has; `feeds` are run where something did not fuse, to time it.

    Raises:
        ProviderError, BundleError: ONNX Runtime does not have the provider, or cannot load the file.
    """
    graph = ir.load(path).graph
    kernels = Counter(node.op_type for node in optimized(path, provider).graph)
    rows: list[Fused] = []
    times: dict[str, float] | None = None
    for pattern in PATTERNS:
        occurrences = list(pattern.occurrences(graph))
        if not occurrences:
            continue
        found = sum(kernels[kernel] for kernel in pattern.kernels)
        share = None
        if found < len(occurrences):
            times = _node_times(path, provider, feeds) if times is None else times
            left = {node.name for nodes in occurrences for node in nodes}
            share = sum(seconds for name, seconds in times.items() if name in left) / max(1e-12, sum(times.values()))
        rows.append(
            Fused(
                pattern=pattern.name,
                kernels=list(pattern.kernels),
                expected=len(occurrences),
                found=found,
                share_of_time=share,
            )
        )
    return rows


def _biased(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    """Weight matmuls with a bias."""
    for node in graph:
        if node.op_type == "MatMul" and _constant(node.inputs[1]):
            add = _sole_user(node.outputs[0], "Add")
            if add is not None and any(_constant(value) for value in add.inputs):
                yield node, add


def _biased_gelu(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    """GELUs of an integer matmul's result with its bias: in float the bias goes into the matmul instead."""
    for node in graph:
        if node.op_type == "Gelu":
            add = _producer(node.inputs[0], "Add")
            before = None if add is None else _producer(add.inputs[0], *OPERATORS)
            if add is not None and before is not None:
                yield add, node


def _integer(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    for node in graph:
        if node.op_type in OPERATORS:
            yield (node,)


def _layer_norm(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    for node in graph:
        if node.op_type == "LayerNormalization":
            yield (node,)


def _rms_norm(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    """x * 1 / sqrt(mean(x^2) + eps), as torch exports it."""
    for node in graph:
        if node.op_type != "Reciprocal":
            continue
        chain = [node]
        for wanted in ("Sqrt", "Add", "ReduceMean", "Pow"):
            before = _producer(chain[-1].inputs[0], wanted)
            if before is None:
                break
            chain.append(before)
        else:
            after = _sole_user(node.outputs[0], "Mul")
            yield [*chain, *([] if after is None else [after])]


def _silu(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    for node in graph:
        if node.op_type == "Sigmoid":
            mul = _sole_user(node.outputs[0], "Mul")
            if mul is not None and node.inputs[0] in mul.inputs:
                yield node, mul


def _rotary(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    for node in graph:
        if node.op_type == "RotaryEmbedding":
            yield (node,)


def _blocks(graph: ir.Graph) -> Iterator[Sequence[ir.Node]]:
    for node in graph:
        if node.op_type == "MatMulNBits":
            yield (node,)


PATTERNS: Final = (
    _Pattern("weight matmul and bias", ("Gemm", "FusedGemm"), _biased),
    _Pattern("integer matmul and scales", ("MatMulIntegerToFloat",), _integer),
    _Pattern("weights in blocks", ("MatMulNBits",), _blocks),
    _Pattern("bias and GELU", _GELUS, _biased_gelu),
    _Pattern("SiLU", ("QuickGelu",), _silu),
    _Pattern("layer norm", _NORMS, _layer_norm),
    _Pattern("RMS norm", _RMS, _rms_norm),
    _Pattern("rotary positions", ("RotaryEmbedding",), _rotary),
)


def _node_times(path: Path, provider: Provider, feeds: Feeds) -> dict[str, float]:
    """Seconds of each node of a run on one thread, the least of RUNS, by ONNX Runtime's own profiler."""
    seen: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(1)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(str(path.resolve()), options, providers=[PROVIDERS[provider]])
        for _ in range(RUNS):
            session.run(None, dict(feeds))
        events = json.loads(Path(session.end_profiling()).read_text())
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            seen[name.removesuffix("_kernel_time")].append(event["dur"] / 1e6)
    return {name: min(seconds) * len(seconds) / RUNS for name, seconds in seen.items()}


def _constant(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()


def _producer(value: ir.Value | None, *wanted: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in wanted else None


def _sole_user(value: ir.Value, wanted: str) -> ir.Node | None:
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == wanted else None


def broken(rows: Iterable[Fused]) -> list[str]:
    """A warning for each pattern that did not fuse everywhere."""
    return [
        f"{row.pattern}: {row.expected - row.found} of {row.expected} did not become {' or '.join(row.kernels)}, "
        f"{row.share_of_time or 0:.1%} of a run's time"
        for row in rows
        if not row.holds
    ]
