"""Makes each variant of a bundle and proves it: graph, file, parity, certificate. Nothing is kept without its proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx_ir as ir
import onnxruntime as ort

from export.blocks import longest_sequence
from export.budget import within_budget
from export.certify import certify, check_position_wise, runner
from export.errors import ExportError, ProofError
from export.graph import width_of_output
from export.half import scanned_widths
from export.lowering import lower
from export.lowering.registry import Provider
from export.packed import Packed
from export.places import without_places
from export.precisions import RECIPES, Calibrated, Choices
from export.quantization.calibration import LONG, Activations, Calibration, read_calibration, synthetic_calibration
from export.quantization.smoothing import activation_widths
from export.quantize import count_quantized_matmuls, count_weight_matmuls
from export.reference import Case
from export.shapes import Inputs, torture
from export.stand_in import UNMEASURED
from export.weights_file import data_file, provisional
from service.cpu import cpu_quota
from service.manifest import Certificate, DataFile, Precision, Variant, file_sha256
from service.session import open_session, session_facts

if TYPE_CHECKING:
    from export.pipeline import Options


_FLOAT: Final[tuple[Precision, Provider]] = ("fp32", "cpu")


def make_variants(
    graph: ir.Model,
    packed: Packed,
    options: Options,
    cases: Sequence[Case],
    folder: Path,
    progress: Callable[[str], None],
    refused: dict[str, str] | None = None,
) -> list[Variant]:
    """Make and prove each variant in `folder`. The float file is always made: int8 is held against its NaN rows.

    What is for CUDA is held against torch by its stand-in, and gets the certificate `unmeasured`.

    With `refused`, a precision that cannot be made is noted there with the reason, and the others are made.

    Raises:
        ExportError: the calibration's file is no use, or a graph cannot be quantized.
        ProofError: a variant misses its bar.
    """
    made: list[Variant] = []
    fp32: Path | None = None
    calibration = _calibration(packed, options)
    calibrated: Calibrated | None = None
    wanted = options.variants()
    for precision, provider in [*([] if ("fp32", "cpu") in wanted else [_FLOAT]), *wanted]:
        is_calibrated = RECIPES[precision].is_calibrated(options.weight_method)
        if is_calibrated and calibrated is None and calibration is not None:
            warning = " (WARNING: not what the model meets; --calibrate takes yours)" if calibration.synthetic else ""
            progress(f"Calibrate on {calibration.source}{warning}")
            calibrated = _run_float(graph, calibration, folder, scanned="fp16" in options.precisions)
        choices = Choices(calibrated if is_calibrated else None, options.calibration_method, options.weight_method)
        path = folder / f"{precision}-{provider}.onnx"
        try:
            with provisional(path):
                variant = _make(precision, path, provider, graph, packed, options, cases, choices, fp32, progress)
        except ExportError as cause:
            if refused is not None and precision != "fp32":
                refused[precision] = str(cause).removeprefix(f"{precision}: ")
                continue
            if isinstance(cause, ProofError):
                raise ProofError(f"{precision}: {cause}") from cause
            raise
        if (precision, provider) == _FLOAT:
            fp32 = path
        if (precision, provider) in wanted:
            source = calibration.source if is_calibrated and calibration is not None else None
            made.append(variant.model_copy(update={"calibration": source}))
    if _FLOAT not in wanted:  # its file stayed until the others had read it
        for left in (folder / "fp32-cpu.onnx", data_file(folder / "fp32-cpu.onnx")):
            left.unlink(missing_ok=True)
    return made


def _make(
    precision: Precision,
    path: Path,
    provider: Provider,
    graph: ir.Model,
    packed: Packed,
    options: Options,
    cases: Sequence[Case],
    choices: Choices,
    fp32: Path | None,
    progress: Callable[[str], None],
) -> Variant:
    """One variant in its file, `path`. All that has the weights once more is held by this call, and goes with it."""
    proof = "certify" if provider == "cpu" else "on the CPU in its stead; tokenslab verify --write certifies on CUDA"
    progress(f"{precision} for {provider}: write the graph, compare with torch, {proof}")
    candidates = RECIPES[precision].transform(graph, choices)
    written = within_budget(precision, path, provider, graph, candidates, cases, packed.depth or 1, options)
    certificate = without_places(UNMEASURED, path)
    if provider == "cpu":
        certificate = certificate_of(precision, path, written.session, packed, options, fp32)
        try_shapes(written.session, width_of_output(written.model), packed, certificate, options.seed)
    if kept := [matmul.weight for matmul in written.matmuls if matmul.form == "float32"]:
        why = "beyond float16's range" if precision == "fp16" else "within the budget"
        progress(f"{precision}: {len(kept)} weight matmuls stay float, {why}: {', '.join(kept)}")
    return Variant(
        precision=precision,
        provider=provider,
        file=path.name,
        sha256=file_sha256(path),
        bytes=path.stat().st_size,
        data=[DataFile(file=file.name, sha256=file_sha256(file), bytes=file.stat().st_size) for file in written.beside],
        quantized_matmuls=count_quantized_matmuls(written.model),
        float_matmuls=count_weight_matmuls(written.model),
        matmuls=written.matmuls,
        parity=written.parity if provider == "cpu" else [],
        stand_in=[] if provider == "cpu" else written.parity,
        routing=written.routing,
        certificate=certificate,
    )


def _calibration(packed: Packed, options: Options) -> Calibration | None:
    """What to calibrate on, if a precision asks for it; a file that is no use is an error before any work."""
    if not any(RECIPES[precision].is_calibrated(options.weight_method) for precision in options.precisions):
        if options.calibrate is not None:
            raise ExportError(f"{options.calibrate}: none of {', '.join(options.precisions)} is calibrated")
        return None
    if options.calibrate is not None:
        own = read_calibration(options.calibrate, packed.kind, packed.d_in, packed.d_memory)
        return replace(own, beside=synthetic_calibration(packed, seed=options.seed, length=LONG).feeds)
    need_own = [p for p in options.precisions if RECIPES[p].needs_own_tokens(options.weight_method)]
    if need_own and not options.allow_synthetic:
        how = f" with {options.weight_method}" if RECIPES[need_own[0]].calibration == "gptq" else ""
        raise ExportError(
            f"{need_own[0]}{how} is calibrated on tokens that the model meets: pass --calibrate, or --allow-synthetic "
            "to do with random ones, whose range may not be theirs"
        )
    return synthetic_calibration(packed, seed=options.seed)


def tokens_to_measure(packed: Packed, options: Options) -> Calibration:
    """The user's own tokens where there are some, else synthetic ones: for figures that choose nothing."""
    if options.calibrate is not None:
        return read_calibration(options.calibrate, packed.kind, packed.d_in, packed.d_memory)
    return synthetic_calibration(packed, seed=options.seed)


def _run_float(graph: ir.Model, calibration: Calibration, folder: Path, *, scanned: bool) -> Calibrated:
    lowered = graph.clone()
    lower(lowered, "cpu")
    widths, path = dict(activation_widths(graph.graph)), folder / "calibration.onnx"
    if scanned:
        widths |= scanned_widths(graph)
    activations = Activations(lowered, widths, calibration.feeds, path, calibration.beside)
    return Calibrated(activations, trusted=not calibration.synthetic)


def try_shapes(session: ort.InferenceSession, d_out: int, packed: Packed, certificate: Certificate, seed: int) -> None:
    """Try every awkward shape of a window; raises ProofError with the first that `session` does not answer rightly."""
    inputs = Inputs(packed.kind, packed.d_in, d_out, packed.d_memory, longest_sequence(packed.module))
    for tried in torture(runner(session), inputs, certificate.kind, seed):
        if tried.counter_example is not None:
            raise ProofError(f"{tried.shape.name}: {tried.counter_example}")


def certificate_of(
    precision: Precision,
    path: Path,
    session: ort.InferenceSession,
    packed: Packed,
    options: Options,
    fp32: Path | None,
) -> Certificate:
    """Measure `session`, opened from `path`; `fp32` is the float variant's file, where there is one.

    Raises:
        ProofError: results depend on neighbours and `options` do not allow that.
    """
    threads = cpu_quota()
    if packed.kind == "position-wise":
        check_position_wise(session, packed.d_in, seed=options.seed, exact=not options.allow_inexact)
    certificate = certify(
        session,
        packed.kind,
        packed.d_in,
        d_memory=packed.d_memory,
        seed=options.seed,
        facts=session_facts(threads),
        quantized=precision != "fp32",
        fp32=None if fp32 is None else open_session(fp32, "cpu", threads),
        other_threads=open_session(path, "cpu", 1 if threads > 1 else 2),
    )
    certificate = without_places(certificate, path)
    if certificate.kind != "exact" and not options.allow_inexact:
        failed = ", ".join(name for name, same in certificate.checks.items() if not same)
        raise ProofError(
            f"the certificate is {certificate.kind!r}, not 'exact': results differ by up to "
            f"{certificate.max_drift:.1e} in: {failed}; --allow-inexact writes it all the same"
        )
    return certificate
