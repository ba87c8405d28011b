"""The fusion contract: what ONNX Runtime should make of a file's patterns, checked at every place where one is.

A pattern is found in the file as written, and named after its weight. At each place the value it ends in must come
from one of the kernels that ONNX Runtime 1.32 has for it: fusions and inlining keep the names of such values. What the
file holds as one kernel already (`written`) cannot fuse, only be lost. Places that missed are named, with their share
of a run's time; how many of a kernel there are in all would let one that is too many hide them.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
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
_PARAMETER: Final = r"\.(weight|bias)(\..+)?$"

Occurrence = Sequence[ir.Node]

_NORMS: Final = ("LayerNormalization", "SkipLayerNormalization")
_RMS: Final = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RMSNormalization")
_GELUS: Final = ("BiasGelu", "FastGelu")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """`occurrences` yields the nodes of each, the one that gives its value last: what a run has if it did not fuse.

    written: it is one operator in the file, which has a kernel of its own.
    """

    name: str
    kernels: tuple[str, ...]
    occurrences: Callable[[ir.Graph], Iterator[Occurrence]]
    written: bool = False


def fusions(path: Path, provider: Provider, feeds: Feeds) -> list[Fused]:
    """What became of each pattern that the file has; `feeds` are run where something did not fuse, to time it.

    Raises:
        ProviderError, BundleError: ONNX Runtime does not have the provider, or cannot load the file.
    """
    graph = ir.load(path).graph
    run = optimized(path, provider).graph
    rows: list[Fused] = []
    times: dict[str, float] | None = None
    for pattern in PATTERNS:
        occurrences = list(pattern.occurrences(graph))
        if not occurrences:
            continue
        missed = [nodes for nodes in occurrences if not _became(nodes, pattern.kernels, graph, run)]
        share = None
        if missed:
            times = _node_times(path, provider, feeds) if times is None else times
            left = {node.name for nodes in missed for node in nodes}
            share = sum(seconds for name, seconds in times.items() if name in left) / max(1e-12, sum(times.values()))
        rows.append(
            Fused(
                pattern=pattern.name,
                kernels=list(pattern.kernels),
                expected=len(occurrences),
                found=len(occurrences) - len(missed),
                written=pattern.written,
                missed=[place(nodes) for nodes in missed],
                share_of_time=share,
            )
        )
    return rows


def _became(nodes: Occurrence, kernels: Sequence[str], graph: ir.Graph, run: ir.Graph) -> bool:
    """Whether one of `kernels` is among what computes the occurrence's value in `run`, back to `graph`'s other values.

    A function that was inlined is several operators there, whose values have names that `graph` has not.
    """
    ends = {value.name for node in graph for value in node.outputs}
    producers = {value.name: node for node in run for value in node.outputs}
    waiting = [producers.get(nodes[-1].outputs[0].name)]
    seen: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in kernels:
            return True
        waiting += [producers.get(v.name) for v in node.inputs if v is not None and v.name not in ends]
    return False


def place(nodes: Occurrence) -> str:
    """Where an occurrence is: the module of its weight, which says layer and stage, and the node."""
    constants = [v.name for node in nodes for v in node.inputs if v is not None and _constant(v) and v.name is not None]
    modules = [re.sub(_PARAMETER, "", name) for name in constants if re.search(_PARAMETER, name)]
    name = nodes[-1].name or nodes[-1].op_type
    return f"{modules[0]} ({name})" if modules else name


def _biased(graph: ir.Graph) -> Iterator[Occurrence]:
    """Weight matmuls with a bias."""
    for node in graph:
        if node.op_type == "MatMul" and _constant(node.inputs[1]):
            add = _user(node.outputs[0], "Add")
            if add is not None and any(_constant(value) for value in add.inputs):
                yield node, add


def _biased_gelu(graph: ir.Graph) -> Iterator[Occurrence]:
    """GELUs of an integer matmul's result with its bias: in float the bias goes into the matmul instead."""
    for node in graph:
        if node.op_type == "Gelu":
            add = _producer(node.inputs[0], "Add")
            before = None if add is None else _producer(add.inputs[0], *OPERATORS)
            if add is not None and before is not None:
                yield add, node


def _integer(graph: ir.Graph) -> Iterator[Occurrence]:
    for node in graph:
        if node.op_type in OPERATORS:
            yield (node,)


def _layer_norm(graph: ir.Graph) -> Iterator[Occurrence]:
    for node in graph:
        if node.op_type == "LayerNormalization":
            yield (node,)


def _rms_norm(graph: ir.Graph) -> Iterator[Occurrence]:
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
            times_x = _user(node.outputs[0], "Mul")
            times_weight = None if times_x is None else _user(times_x.outputs[0], "Mul")
            scaled = times_weight is not None and any(_constant(value) for value in times_weight.inputs)
            after = [times_x, times_weight if scaled else None]
            yield [*reversed(chain), *(mul for mul in after if mul is not None)]


def _silu(graph: ir.Graph) -> Iterator[Occurrence]:
    for node in graph:
        if node.op_type == "Sigmoid":
            mul = _user(node.outputs[0], "Mul")
            if mul is not None and node.inputs[0] in mul.inputs:
                yield node, mul


def _rotary(graph: ir.Graph) -> Iterator[Occurrence]:
    for node in graph:
        if node.op_type == "RotaryEmbedding":
            yield (node,)


def _blocks(graph: ir.Graph) -> Iterator[Occurrence]:
    for node in graph:
        if node.op_type == "MatMulNBits":
            yield (node,)


PATTERNS: Final = (
    _Pattern("weight matmul and bias", ("Gemm", "FusedGemm"), _biased),
    _Pattern("integer matmul and scales", ("MatMulIntegerToFloat",), _integer),
    _Pattern("weights in blocks", ("MatMulNBits",), _blocks, written=True),
    _Pattern("bias and GELU", _GELUS, _biased_gelu),
    _Pattern("SiLU", ("QuickGelu",), _silu),
    _Pattern("layer norm", _NORMS, _layer_norm, written=True),
    _Pattern("RMS norm", _RMS, _rms_norm),
    _Pattern("rotary positions", ("RotaryEmbedding",), _rotary, written=True),
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


def _user(value: ir.Value, wanted: str) -> ir.Node | None:
    """One that takes it; others, which may be what keeps ONNX Runtime from fusing, do not make it another pattern."""
    return next((use.node for use in value.uses() if use.node.op_type == wanted), None)


def broken(rows: Iterable[Fused]) -> list[str]:
    """A warning for each pattern that did not fuse everywhere; it names the places."""
    return [
        f"{row.pattern}: {row.expected - row.found} of {row.expected} did not become {' or '.join(row.kernels)}, "
        f"{row.share_of_time or 0:.1%} of a run's time: {', '.join(row.missed)}"
        for row in rows
        if not row.holds
    ]
