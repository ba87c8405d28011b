"""The export from end to end: block, graph, quantize, lower, prove, write. One direction, no way around a proof.

`export_module` is the door for programs; the command line and the demo use it and `export_packed`, like anyone else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path

from torch import nn

from export import parity
from export.adapters.registry import pack
from export.blocks import longest_sequence
from export.bundle import check_free, check_name, new_bundle, report_hashes
from export.composition import composition
from export.details.document import REPORT_JSON
from export.details.fusion import broken
from export.details.measure import measure_details
from export.details.page import sections
from export.details.plots import draw
from export.details.structure import check_structure
from export.errors import ExportError
from export.experts import active_parameters, check_experts, expert_layers, expert_shares
from export.floor import measure_speed
from export.graph import to_graph, weight_flops, width_of_output
from export.lowering.registry import Provider
from export.packed import Packed
from export.planner import SECONDS_A_WINDOW, Request, candidates, choose
from export.precision import parameter_count
from export.precisions import RECIPES, bars_db, unsuited
from export.quantization.block_forms import WeightMethod
from export.quantization.static import CalibrationMethod
from export.quantize import count_weight_matmuls
from export.reference import write_reference
from export.report import report
from export.routed import expert_loads
from export.scan import check_weights
from export.stages import check_stages_free, plan_parts, write_stages
from export.variants import make_variants, tokens_to_measure
from export.weights_file import PROTOBUF_LIMIT, empty_weights, move_out, release_weights, weight_bytes
from service.manifest import MANIFEST, REFERENCE, REPORT, Manifest, Precision, file_sha256

Progress = Callable[[str], None]

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
_TOOLS = ("tokenslab", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Options:
    """What an export is asked for, apart from the module.

    name: of the model, `[A-Za-z0-9][A-Za-z0-9._-]*`.
    models: the repository; the bundle is `<models>/<name>/<version>/`.
    precisions: variants to make, each for those of `providers` that it goes with.
    providers: that the files are for.
    default_precision: what `<name>` serves; None: int8 if it is made.
    overwrite: replace the version if it exists.
    allow_inexact: write variants whose certificate is not exact; the service will not pack those by default.
    calibrate: tokens to choose scales on (`export.quantization.calibration`); None: synthetic ones.
    min_sqnr: in dB; quantized variants that miss it get more exact matmuls, the worst first, until they hold it.
    allow_synthetic: calibrate int8-static and GPTQ on random tokens, if there are no others.
    calibration_method: how int8-static chooses the range of an activation.
    weight_method: how w8 and w4 round weights.
    plan: measure all precisions of its target, and keep the fastest within its bounds, with fp32; None: make
        `precisions`.
    seed: of every random input.
    details: measure each layer's stages, what fused, and speed, for the report; takes seconds.
    stages: parts between layers that the stack is cut into, each a bundle of its own beside the whole; 1: none.
    external_above: bytes of weights beyond which they go into a file beside the ONNX file, and torch's copy is freed.
    """

    name: str
    models: Path = Path("models")
    version: int = 1
    precisions: Sequence[Precision] = PRECISIONS
    providers: Sequence[Provider] = ("cpu",)
    default_precision: Precision | None = None
    overwrite: bool = False
    allow_inexact: bool = False
    calibrate: Path | None = None
    min_sqnr: float | None = None
    allow_synthetic: bool = False
    calibration_method: CalibrationMethod = "minmax"
    weight_method: WeightMethod = "rtn"
    plan: Request | None = None
    seed: int = 0
    details: bool = False
    stages: int = 1
    external_above: int = PROTOBUF_LIMIT

    def default(self) -> Precision:
        """The precision that the bare name serves."""
        return self.default_precision or ("int8" if "int8" in self.precisions else self.precisions[0])

    def variants(self) -> list[tuple[Precision, Provider]]:
        """What is made, in the order of making."""
        return [
            (precision, provider)
            for precision in sorted(self.precisions, key=list(RECIPES).index)
            for provider in self.providers
            if provider in RECIPES[precision].providers
        ]

    def check(self) -> None:
        """Raise ExportError for what can be refused before any work."""
        check_name(self.name)
        if self.plan is not None:
            self.plan.check()
            if self.default_precision is not None:
                raise ExportError("default precision: --precision auto chooses it")
        if not self.precisions or len(set(self.precisions)) != len(self.precisions):
            raise ExportError(f"precisions {list(self.precisions)}: expected one or more, each once")
        if self.default() not in self.precisions:
            raise ExportError(f"default precision {self.default()} is not among {', '.join(self.precisions)}")
        if not self.providers or len(set(self.providers)) != len(self.providers):
            raise ExportError(f"providers {list(self.providers)}: expected one or more, each once")
        made = self.variants()
        for precision in self.precisions:
            if precision not in {made_precision for made_precision, _ in made}:
                reasons = "; ".join(str(unsuited(precision, provider)) for provider in self.providers)
                raise ExportError(f"{precision} is not made for {' or '.join(self.providers)}: {reasons}")
        if "cuda" in self.providers and (self.plan is not None or self.stages > 1):
            raise ExportError("provider cuda: neither plans nor stages are measured without CUDA")
        if not 0 <= self.external_above <= PROTOBUF_LIMIT:
            raise ExportError(f"external_above {self.external_above}: expected 0 to {PROTOBUF_LIMIT}, protobuf's limit")
        if self.min_sqnr is not None and not 0 < self.min_sqnr < math.inf:
            raise ExportError(f"min_sqnr {self.min_sqnr}: expected a positive number of dB")
        if self.stages < 1:
            raise ExportError(f"stages {self.stages}: expected at least 1")
        check_free(self.models, self.name, self.version, overwrite=self.overwrite)
        if self.stages > 1:
            check_stages_free(self)


def export_module(
    module: nn.Module,
    options: Options,
    *,
    d: int | None = None,
    causal: bool = False,
    source: Mapping[str, str] | None = None,
    progress: Progress = lambda step: None,
    consume: bool = False,
) -> Path:
    """Export any module; it is not changed unless it is consumed, and may be in any mode, dtype and device.

    Modules with an adapter (`export.register_adapter`) become packed; anything else is exported as position-wise if it
    proves to be.

    Args:
        module: what to export.
        options: name, place and precisions of the bundle.
        d: width of a token; needed where the module has no nn.Linear or nn.Conv1d to take it from.
        causal: whether an encoder's tokens attend to earlier ones only.
        source: where the weights came from, for the manifest.
        progress: called with one line before each step.
        consume: the caller does not need the module any more: its parameters are emptied once they are taken over, so
            that a large module is not held through the whole export.

    Returns:
        The bundle's folder.

    Raises:
        ExportError: why nothing was written.
    """
    options.check()
    progress(f"Read {type(module).__name__} and prove its packed form in float64")
    packed = pack(module, d=d, causal=causal, seed=options.seed)
    if consume:
        empty_weights(module)
    source = source or {"class": _qualified_name(module)}
    return export_packed(packed, options, source=source, progress=progress)


def export_packed(
    packed: Packed,
    options: Options,
    *,
    source: Mapping[str, str],
    progress: Progress = lambda step: None,
) -> Path:
    """Export what an adapter made; see `export_module`."""
    options.check()
    progress("Export the graph")
    graph = to_graph(packed.module, packed.kind, packed.d_in, packed.d_memory)
    check_weights(graph)
    check_experts(graph, packed.module)
    matmuls = count_weight_matmuls(graph)
    if packed.depth is None:  # an FFN is two matmuls
        packed = replace(packed, depth=max(1, (matmuls + 1) // 2))
    parameters = parameter_count(packed.module)
    if not parameters:
        raise ExportError(f"{type(packed.module).__name__} has no weights: there is nothing to serve")

    composed = composition(packed.module, graph)
    progress("Compute the float64 reference, one layer at a time")
    cases = parity.reference_cases(packed, seed=options.seed)
    parts = plan_parts(graph, packed, cases, options.stages) if options.stages > 1 else []
    final = options.models / options.name / str(options.version)
    with new_bundle(options.models, options.name, options.version, overwrite=options.overwrite) as folder:
        if weight_bytes(graph) > options.external_above:
            progress("Write the weights into a file of their own, and free torch's")
            move_out(graph, folder / "fp32-cpu.onnx")
            release_weights(packed.module)
        refused: dict[str, str] | None = None
        if options.plan is not None:
            known = options.calibrate is not None or options.allow_synthetic
            precisions, refused = candidates(options.plan, calibrated=known)
            inexact = options.allow_inexact or options.plan.max_drift > 0
            options = replace(options, precisions=precisions, allow_inexact=inexact)
        variants = make_variants(graph, packed, options, cases, folder, progress, refused)
        progress("Write the reference")
        write_reference(folder / REFERENCE, cases)
        manifest = Manifest(
            name=options.name,
            version=options.version,
            kind=packed.kind,
            d_in=packed.d_in,
            d_out=width_of_output(graph),
            d_memory=packed.d_memory,
            max_sequence_tokens=longest_sequence(packed.module),
            default_precision="fp32" if options.plan is not None else options.default(),
            parameters=parameters,
            active_parameters=active_parameters(packed.module) if expert_layers(packed.module) else None,
            expert_load=expert_loads([case.routed for case in cases]),
            flops_per_token=weight_flops(graph, expert_shares(packed.module)),
            flops_per_memory_row=None if packed.d_memory is None else weight_flops(graph, of_memory=True),
            composition=composed,
            architecture={**packed.architecture, "weight_matmuls": matmuls},
            source={
                **source,
                **packed.source,
                "parity_tokens": "N(0, 1)" if packed.sample is None else packed.sampled,
                "parity_seed": str(options.seed),
            },
            tools={name: package_version(name) for name in _TOOLS},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            reference_sha256=file_sha256(folder / REFERENCE),
            variants=variants,
        )
        if options.plan is not None:
            progress("Plan: time every precision within reach")
            manifest = _planned(folder, manifest, options.plan, options.min_sqnr, refused or {})
        bar = parity.fp32_bar(packed.depth or 1)
        pages = check_structure(folder, variants)
        if options.details and "cpu" in {variant.provider for variant in variants}:
            progress("Measure layers, fusions and speed")
            pages += _write_details(folder, manifest, packed, options, progress)
        progress("Write the report and the manifest")
        text = report(manifest, packed.proofs, fp32_bar=bar, bars_db=bars_db(options.min_sqnr), details=pages)
        (folder / REPORT).write_text(text, encoding="utf-8")
        manifest = manifest.model_copy(update={"report_sha256": report_hashes(folder)})
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if parts:
            write_stages(folder, manifest, parts, options, progress)
    return final


def _planned(
    folder: Path, manifest: Manifest, request: Request, min_sqnr: float | None, refused: Mapping[str, str]
) -> Manifest:
    """The manifest with the plan, the chosen variant and fp32; the files of the others go."""
    speeds = measure_speed(folder, manifest, request.tokens, SECONDS_A_WINDOW)
    plan = choose(request, manifest.variants, speeds, refused, min_sqnr)
    kept = [variant for variant in manifest.variants if variant.precision in ("fp32", plan.chosen)]
    for variant in manifest.variants:
        if variant not in kept:
            for name in (variant.file, *(data.file for data in variant.data)):
                (folder / name).unlink()
    return manifest.model_copy(update={"plan": plan, "variants": kept, "default_precision": plan.chosen})


def _write_details(folder: Path, manifest: Manifest, packed: Packed, options: Options, progress: Progress) -> list[str]:
    """`report.json` and the plots; the sections for `report.md`."""
    here = [variant for variant in manifest.variants if variant.provider == "cpu"]
    manifest, made = manifest.model_copy(update={"variants": here}), [variant.precision for variant in here]
    details = measure_details(folder, manifest, tokens_to_measure(packed, options), made)
    for variant in details.variants:
        for warning in broken(variant.fusions):
            progress(f"{variant.precision}: WARNING: not fused by ONNX Runtime: {warning}")
    (folder / REPORT_JSON).write_text(details.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return list(sections(details, draw(details, folder)))


def _qualified_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
