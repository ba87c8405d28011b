"""Cuts a stack that was exported whole into stages: bundles whose files in a row give the whole's bits.

Each stage's file is cut out of the whole's file, so that no choice of quantization is made twice, and is then proved
like any other: parity with its own layers in torch, certificate, shapes. Last, all stages in a row are compared with
the whole bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from export import parity
from export.blocks import BlockStack
from export.bundle import check_free, new_bundle, report_hashes
from export.composition import composition
from export.cutting import Cut, cut_out, find_cuts, layer_of
from export.errors import ExportError, ProofError
from export.experts import active_parameters, expert_layers, expert_shares, recorded_routing
from export.graph import weight_flops, width_of_output
from export.packed import Packed
from export.precision import float64_layer_by_layer, parameter_count
from export.precisions import RECIPES, bars_db
from export.quantize import count_quantized_matmuls, count_weight_matmuls
from export.reference import Case, write_reference
from export.report import report
from export.routed import expert_loads
from export.routing_noise import measure_routing
from export.variants import certificate_of, try_shapes
from export.weights_file import provisional, save
from service.cpu import cpu_quota
from service.manifest import MANIFEST, REFERENCE, REPORT, DataFile, Manifest, Stage, Variant, file_sha256
from service.packing import Float32, Int64
from service.recheck import same_bits
from service.session import open_session, run_packed

if TYPE_CHECKING:
    from export.pipeline import Options

_RANDOM_WINDOWS = 8  # compared beside the shapes of the parity cases
_LONGEST = 40  # tokens of a sequence in them


def stage_name(name: str, index: int, count: int) -> str:
    """The name of a stage's bundle; `index` counts from 1."""
    return f"{name}-stage{index}of{count}"


def check_stages_free(options: Options) -> None:
    """Raise ExportError if the bundle of a stage exists and is not to be replaced."""
    for index in range(1, options.stages + 1):
        name = stage_name(options.name, index, options.stages)
        check_free(options.models, name, options.version, overwrite=options.overwrite)


@dataclass(frozen=True)
class Part:
    """A stage before its files exist: what torch and the float graph say of it."""

    cut: Cut
    packed: Packed
    cases: list[Case]
    facts: Mapping[str, object]  # of its manifest


class _Layers(nn.Module):
    """Consecutive blocks of a stack, under the names they have there."""

    def __init__(self, stack: BlockStack, first: int, last: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(at): stack.blocks[at] for at in range(first, last + 1)})
        self.norm = stack.norm if last == len(stack.blocks) - 1 else None

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        for block in self.blocks.values():
            tokens = block(tokens, seq_lens)
        return tokens if self.norm is None else self.norm(tokens)


def plan_parts(graph: ir.Model, packed: Packed, cases: Sequence[Case], count: int) -> list[Part]:
    """What each of `count` stages is to compute, from the float graph and the module, while it has its weights.

    A stage's references are its own layers in float64 on what the stage before gave, rounded to float32.

    Raises:
        ExportError: it is no stack of blocks, or cannot be cut into so many.
    """
    stack = packed.module
    if not isinstance(stack, BlockStack):
        raise ExportError(f"stages: only a stack of Transformer blocks is cut, not {type(stack).__name__}")
    parts: list[Part] = []
    tokens = [case.tokens for case in cases]
    for cut in find_cuts(graph, len(stack.blocks), count):
        module = _Layers(stack, cut.first, cut.last)
        layers = [*module.blocks.values(), *([] if module.norm is None else [module.norm])]
        depth = cut.last - cut.first + 1
        part = replace(packed, module=module, layers=layers, depth=depth, sample=None)
        own = [_case(part, rows, case.seq_lens) for rows, case in zip(tokens, cases, strict=True)]
        parts.append(Part(cut, part, own, _facts(cut_out(graph, cut), part, own)))
        tokens = [case.reference.astype(np.float32) for case in own]
    return parts


def write_stages(
    folder: Path, whole: Manifest, parts: Sequence[Part], options: Options, progress: Callable[[str], None]
) -> None:
    """Cut the files of the bundle `whole`, in `folder`, write a bundle for each of `parts`, and compare their bits.

    Raises:
        ProofError: a stage misses its bar, or the stages in a row give other bits than the whole.
    """
    with ExitStack() as stack:
        folders: list[Path] = []
        made: list[list[Variant]] = []
        for index, part in enumerate(parts, 1):
            name = stage_name(options.name, index, len(parts))
            progress(f"{name}: cut out layers {part.cut.first} to {part.cut.last}, compare with torch, certify")
            kept = new_bundle(options.models, name, options.version, overwrite=options.overwrite)
            folders.append(stack.enter_context(kept))
            made.append(_variants(folder, folders[-1], whole, part, options))
        progress("Compare the stages in a row with the whole, bit for bit")
        for at, variant in enumerate(whole.variants):
            files = [place / variants[at].file for place, variants in zip(folders, made, strict=True)]
            windows = _compare(folder / variant.file, files, variant, parts[0], options.seed)
        hashes = {variant.file: variant.sha256 for variant in whole.variants}
        for index, (place, part, variants) in enumerate(zip(folders, parts, made, strict=True), 1):
            stage = Stage(
                of=options.name,
                index=index,
                count=len(parts),
                first_layer=part.cut.first,
                last_layer=part.cut.last,
                whole=hashes,
                windows_compared=windows,
            )
            _write(place, whole, part, variants, stage, options)


def _case(part: Packed, tokens: Float32, seq_lens: tuple[int, ...]) -> Case:
    with float64_layer_by_layer(part.layers), recorded_routing(part.module) as routed:
        reference = part.module(torch.from_numpy(tokens).double(), torch.tensor(seq_lens)).numpy()
    return Case(tokens, seq_lens, reference, None, tuple(routed))


def _facts(graph: ir.Model, part: Packed, cases: Sequence[Case]) -> dict[str, object]:
    module, experts = part.module, expert_layers(part.module)
    architecture = {
        **part.architecture,
        "layers": part.depth or 1,
        "final_norm": any(name == "norm" for name, _ in module.named_children()),
        "weight_matmuls": count_weight_matmuls(graph),
    }
    if "expert_layers" in architecture:
        architecture["expert_layers"] = len(experts)
    return {
        "d_out": width_of_output(graph),
        "parameters": parameter_count(module),
        "active_parameters": active_parameters(module) if experts else None,
        "expert_load": expert_loads([case.routed for case in cases]),
        "flops_per_token": weight_flops(graph, expert_shares(module)),
        "composition": composition(module, graph),
        "architecture": architecture,
    }


def _variants(source: Path, folder: Path, whole: Manifest, part: Part, options: Options) -> list[Variant]:
    made: list[Variant] = []
    fp32: Path | None = None
    for variant in sorted(whole.variants, key=lambda variant: variant.precision != "fp32"):
        path = folder / variant.file
        with provisional(path):
            made.append(_make(source, path, variant, part, options, fp32))
        if variant.precision == "fp32":
            fp32 = path
    return [next(v for v in made if v.file == variant.file) for variant in whole.variants]


def _make(source: Path, path: Path, variant: Variant, part: Part, options: Options, fp32: Path | None) -> Variant:
    """The stage's file of one variant. All that has its weights once more is held by this call, and goes with it."""
    model = cut_out(ir.load(source / variant.file), part.cut)
    beside = save(model, path, external_above=options.external_above)
    session = open_session(path, variant.provider, cpu_quota())
    routing = measure_routing(model, part.cases, path.parent, ir.save)
    rows = parity.measure(session, part.cases, routing)
    parity.check(rows, part.packed.depth or 1, RECIPES[variant.precision].sqnr_db)
    certificate = certificate_of(variant.precision, path, session, part.packed, options, fp32)
    try_shapes(session, width_of_output(model), part.packed, certificate, options.seed)
    own = range(part.cut.first, part.cut.last + 1)
    update = {
        "sha256": file_sha256(path),
        "bytes": path.stat().st_size,
        "data": [DataFile(file=file.name, sha256=file_sha256(file), bytes=file.stat().st_size) for file in beside],
        "quantized_matmuls": count_quantized_matmuls(model),
        "float_matmuls": count_weight_matmuls(model),
        "matmuls": [matmul for matmul in variant.matmuls if layer_of(matmul.weight) in own],
        "parity": rows,
        "routing": routing,
        "certificate": certificate,
        "speed": [],
    }
    return variant.model_copy(update=update)


def _compare(whole: Path, stages: Sequence[Path], variant: Variant, first: Part, seed: int) -> int:
    """Raise ProofError unless the files in a row give the whole's bits; returns how many windows were compared."""
    rng = np.random.default_rng(seed)
    windows = [(case.tokens, case.seq_lens) for case in first.cases]
    for _ in range(_RANDOM_WINDOWS):
        random = rng.integers(1, _LONGEST, rng.integers(1, 12))
        tokens = rng.standard_normal((random.sum(), first.packed.d_in), dtype=np.float32)
        windows.append((tokens, tuple(random.tolist())))
    lens = [np.array(seq_lens, np.int64) for _, seq_lens in windows]
    passed = [tokens for tokens, _ in windows]
    outs = _run_all(whole, variant, passed, lens)
    for path in stages:
        passed = _run_all(path, variant, passed, lens)
    for (_, seq_lens), out, given in zip(windows, outs, passed, strict=True):
        if not same_bits(out, given).all():
            raise ProofError(f"{variant.precision}: the stages in a row give other bits than the whole at {seq_lens}")
    return len(windows)


def _run_all(path: Path, variant: Variant, windows: Sequence[Float32], lens: Sequence[Int64]) -> list[Float32]:
    """Every window through one file, whose session is gone afterwards: all stages together are the whole again."""
    session = open_session(path, variant.provider, cpu_quota())
    return [run_packed(session, tokens, each) for tokens, each in zip(windows, lens, strict=True)]


def _write(
    folder: Path, whole: Manifest, part: Part, variants: Sequence[Variant], stage: Stage, options: Options
) -> None:
    write_reference(folder / REFERENCE, part.cases)
    update = {
        **part.facts,
        "name": stage_name(options.name, stage.index, stage.count),
        "reference_sha256": file_sha256(folder / REFERENCE),
        "plan": None,
        "stage": stage,
        "variants": list(variants),
    }
    # Through the schema once more: a copy alone is not validated.
    manifest = Manifest.model_validate(whole.model_copy(update=update).model_dump())
    bar = parity.fp32_bar(part.packed.depth or 1)
    (folder / REPORT).write_text(report(manifest, {}, fp32_bar=bar, bars_db=bars_db(None)), encoding="utf-8")
    manifest = manifest.model_copy(update={"report_sha256": report_hashes(folder)})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
