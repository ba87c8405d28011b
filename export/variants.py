"""Makes each variant of a bundle and proves it: graph, file, parity, certificate. Nothing is kept without its proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx_ir as ir
import onnxruntime as ort

from export import parity
from export.blocks import longest_sequence
from export.certify import certify, check_position_wise, runner
from export.errors import ExportError, NoRoutingMargin, ProofError
from export.graph import width_of_output
from export.half import scanned_widths
from export.lowering import lower
from export.lowering.registry import Provider
from export.packed import Packed
from export.places import without_places
from export.precisions import RECIPES, Calibrated, Candidates, Choices
from export.quantization.calibration import LONG, Activations, Calibration, read_calibration, synthetic_calibration
from export.quantization.smoothing import activation_widths
from export.quantize import count_quantized_matmuls, count_weight_matmuls
from export.reference import Case
from export.routing_noise import measure_routing
from export.shapes import Inputs, torture
from export.stand_in import UNMEASURED, check_resolves, stand_in
from export.weights_file import SCRATCH, data_file, forget, save
from service.cpu import cpu_quota
from service.manifest import Certificate, DataFile, Parity, Precision, Routing, Variant, WeightMatmul, file_sha256
from service.session import open_session, session_facts

if TYPE_CHECKING:
    from export.pipeline import Options


_FLOAT: Final[tuple[Precision, Provider]] = ("fp32", "cpu")


@dataclass(frozen=True)
class _Written:
    """A candidate in its file, measured against torch, or its stand-in for the CPU was, and `session` is that one's."""

    path: Path
    beside: list[Path]
    model: ir.Model
    session: ort.InferenceSession
    parity: list[Parity]
    routing: list[Routing]
    matmuls: list[WeightMatmul]


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
        recipe = RECIPES[precision]
        is_calibrated = recipe.is_calibrated(options.weight_method)
        if is_calibrated and calibrated is None and calibration is not None:
            warning = " (WARNING: not what the model meets; --calibrate takes yours)" if calibration.synthetic else ""
            progress(f"Calibrate on {calibration.source}{warning}")
            calibrated = _run_float(graph, calibration, folder, scanned="fp16" in options.precisions)
        proof = (
            "certify" if provider == "cpu" else "on the CPU in its stead; tokenslab verify --write certifies on CUDA"
        )
        progress(f"{precision} for {provider}: write the graph, compare with torch, {proof}")
        try:
            chosen = calibrated if is_calibrated else None
            choices = Choices(chosen, options.calibration_method, options.weight_method)
            candidates = recipe.transform(graph, choices)
            written = _within_budget(precision, provider, graph, candidates, cases, packed.depth or 1, options, folder)
            certificate = without_places(UNMEASURED, written.path)
            if provider == "cpu":
                certificate = certificate_of(precision, written.path, written.session, packed, options, fp32)
                try_shapes(written.session, width_of_output(written.model), packed, certificate, options.seed)
        except ExportError as cause:
            if refused is not None and precision != "fp32":
                refused[precision] = str(cause).removeprefix(f"{precision}: ")
                for path in folder.glob(f"{precision}-{provider}.onnx*"):
                    path.unlink()
                continue
            if isinstance(cause, ProofError):
                raise ProofError(f"{precision}: {cause}") from cause
            raise
        if (precision, provider) == _FLOAT:
            fp32 = written.path
        if (precision, provider) not in wanted:
            del written
            continue  # its file stays until the others have read it
        if kept := [matmul.weight for matmul in written.matmuls if matmul.form == "float32"]:
            why = "beyond float16's range" if precision == "fp16" else "within the budget"
            progress(f"{precision}: {len(kept)} weight matmuls stay float, {why}: {', '.join(kept)}")
        made.append(
            Variant(
                precision=precision,
                provider=provider,
                file=written.path.name,
                sha256=file_sha256(written.path),
                bytes=written.path.stat().st_size,
                data=[
                    DataFile(file=file.name, sha256=file_sha256(file), bytes=file.stat().st_size)
                    for file in written.beside
                ],
                quantized_matmuls=count_quantized_matmuls(written.model),
                float_matmuls=count_weight_matmuls(written.model),
                calibration=calibration.source if is_calibrated and calibration is not None else None,
                matmuls=written.matmuls,
                parity=written.parity if provider == "cpu" else [],
                stand_in=[] if provider == "cpu" else written.parity,
                routing=written.routing,
                certificate=certificate,
            )
        )
        del written  # its session has all weights once more
        (folder / SCRATCH).unlink(missing_ok=True)
    left = [*folder.glob("stand-in.onnx*"), folder / SCRATCH]
    if ("fp32", "cpu") not in wanted:
        left += [folder / "fp32-cpu.onnx", data_file(folder / "fp32-cpu.onnx")]
    for path in left:
        path.unlink(missing_ok=True)
    return made


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


def _within_budget(
    precision: Precision,
    provider: Provider,
    graph: ir.Model,
    candidates: Candidates,
    cases: Sequence[Case],
    depth: int,
    options: Options,
    folder: Path,
) -> _Written:
    """The first candidate that holds its bar, found by halving: closer candidates cost time, not accuracy.

    The bar is an SQNR, and that most tokens have a routing margin. Matmuls stay float only where the user asks for an
    SQNR.
    """
    recipe = RECIPES[precision]
    path = folder / f"{precision}-{provider}.onnx"

    def written(step: int) -> _Written:
        model = candidates.build(step)
        runs = model if provider == "cpu" else stand_in(model)
        lower(model, provider)
        forget(graph)
        beside = save(model, path, external_above=options.external_above)
        if runs is model:
            session = open_session(path, provider, cpu_quota())
        else:
            check_resolves(path)
            session = _open_stand_in(runs, folder, options)
        routing = measure_routing(runs, cases, folder, ir.save)
        rows = parity.measure(session, cases, routing)
        return _Written(path, beside, model, session, rows, routing, candidates.matmuls(step))

    bar = None if recipe.sqnr_db is None else max(recipe.sqnr_db, options.min_sqnr or 0)

    found: _Written | None = None
    refused: NoRoutingMargin | None = None

    def holds(step: int) -> bool:
        nonlocal found, refused
        found = None  # before another session has all weights once more
        try:
            found, refused = written(step), None
        except NoRoutingMargin as fault:
            refused = fault
            return False
        return bar is None or min(row.sqnr_db for row in found.parity) >= bar

    last = candidates.last_quantized if options.min_sqnr is None else candidates.last
    at = 0
    if not holds(0) and last:
        below, above = 0, last
        while above - below > 1:
            at = (below + above) // 2
            below, above = (below, at) if holds(at) else (at, above)
        if at != above:
            at = above
            holds(at)
    if refused is not None:
        raise refused
    assert found is not None
    if at and not count_quantized_matmuls(found.model):
        raise ProofError(f"every weight matmul would have to stay float to hold {bar:g} dB of SQNR")
    parity.check(found.parity, depth, bar)
    return found


def _open_stand_in(runs: ir.Model, folder: Path, options: Options) -> ort.InferenceSession:
    lower(runs, "cpu")
    path = folder / "stand-in.onnx"
    beside = save(runs, path, external_above=options.external_above)
    session = open_session(path, "cpu", cpu_quota())
    if not beside:  # else it is mapped into memory, and named in the copies of routing
        path.unlink()
    return session


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
