"""`tokenslab verify`: what a manifest claims, measured again on this machine from the bundle alone.

Needs ONNX Runtime and numpy, not torch: the reference outputs travel with the bundle. It repeats parity, the
position-wise property and the certificate, tries every awkward shape, hashes the report's files, and owns the verdict;
how they are measured is certify's and shapes'. A recorded check that cannot be repeated here has a line that says so:
nothing recorded is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import onnxruntime as ort
import typer
from rich.table import Table
from rich.text import Text

from export.bundle_folder import bundle_folder
from export.certify import AS_FP32, NO_NUMBERS, Comparison, check_position_wise, compare, conclude, runner
from export.errors import ProofError
from export.recording import parity_errors, record
from export.reference import Case, read_references
from export.report_console import console
from export.shapes import Inputs, torture
from service.cpu import cpu_quota
from service.errors import BundleError, TokenslabError
from service.manifest import MANIFEST, REFERENCE, Certificate, Kind, Manifest, Variant, check_file, read_manifest
from service.session import Provider, open_session, session_facts

# Another processor may round otherwise: twice the recorded error, or what one float32 FFN or block may have.
_SLACK: Final = 2.0
_FP32_ERROR: Final = 2e-6
_MUST_HOLD: Final = frozenset({AS_FP32, NO_NUMBERS})  # whatever kind of certificate is recorded


_PAGES: Final = "report"  # in a variant's place: of what people read, not of what is served


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    precision: str
    check: str
    here: str
    recorded: str
    failure: str | None = None  # the counter-example
    repeated: bool = True  # False: recorded, and not measured here


def register(app: typer.Typer) -> None:
    """Add `tokenslab verify`."""

    @app.command(epilog="Example: tokenslab verify models/demo-ffn")
    def verify(
        bundle: Annotated[Path, typer.Argument(help="models/<name>/<version>, or models/<name> for the latest")],
        provider: Annotated[Provider, typer.Option(help="Execution provider: exactly this one")] = "cpu",
        threads: Annotated[
            int | None, typer.Option(min=1, help="ONNX Runtime threads (default: the CPU quota)")
        ] = None,
        seed: Annotated[int, typer.Option(min=0, help="Seed of the random rows; another one tries others")] = 0,
        write: Annotated[
            bool, typer.Option("--write", help="If its files hold, put what was measured here into the manifest")
        ] = False,
    ) -> None:
        """Measure a bundle again, on this machine, without torch: parity, certificate, windows of awkward shapes."""
        try:
            folder = bundle_folder(bundle)
            findings = list(verify_bundle(folder, provider, threads or cpu_quota(), seed))
        except TokenslabError as error:
            typer.echo(f"tokenslab verify: {error}", err=True)
            raise typer.Exit(1) from None
        console().print(_table(folder, findings))
        if left := sum(not finding.repeated for finding in findings):
            console().print(f"Recorded checks that could not be repeated here, marked open: {left}")
        failed = [finding for finding in findings if finding.failure is not None]
        # Nothing that is written comes from the report's pages: a note in the margin of one keeps no measurement out.
        if write and all(finding.precision == _PAGES for finding in failed):
            try:
                kinds = record(folder, provider, threads or cpu_quota(), seed)
            except TokenslabError as error:
                typer.echo(f"tokenslab verify: {error}", err=True)
                raise typer.Exit(1) from None
            console().print(f"{folder / MANIFEST} states it: {', '.join(f'{p} {kind}' for p, kind in kinds.items())}")
        if failed:
            first = failed[0]
            typer.echo(
                f"tokenslab verify: {len(failed)} of {len(findings)} checks failed; "
                f"first: {first.precision}: {first.check}: {first.failure}",
                err=True,
            )
            raise typer.Exit(1)


def verify_bundle(folder: Path, provider: Provider, threads: int, seed: int) -> Iterator[Finding]:
    """Yield every check of every variant for `provider`, then those of the report's files.

    Raises:
        BundleError: a file is missing, altered, unreadable or does not run; or no variant is for `provider`.
        ProviderError: this ONNX Runtime does not have `provider`.
    """
    manifest = read_manifest(folder)
    check_file(folder / REFERENCE, manifest.reference_sha256)
    cases = read_references(folder / REFERENCE)
    variants = [variant for variant in manifest.variants if variant.provider == provider]
    if not variants:
        there = ", ".join(sorted({variant.provider for variant in manifest.variants}))
        raise BundleError(f"{folder}: no variant is for provider {provider!r}; there are variants for {there}")
    sessions = {v.precision: open_session(folder / v.file, provider, threads) for v in variants}
    for variant in variants:
        path, session = folder / variant.file, sessions[variant.precision]
        try:
            yield from _parity(variant, path, session, manifest.kind, cases)
            if manifest.kind == "position-wise":
                yield _permutation(variant, session, manifest.d_in, seed)
            other = open_session(path, provider, 1 if threads > 1 else 2)
            fp32 = sessions.get("fp32") if variant.precision != "fp32" else None
            yield from _certificate(variant, manifest, session, other, fp32, threads, seed)
            yield from _shapes(variant, manifest, session, seed)
        except TokenslabError:
            raise
        except Exception as cause:
            raise BundleError(f"{path}: it loads but does not run: {cause}") from cause
    yield from _reports(folder, manifest)


def _reports(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Whether the pages that people read are those that the export wrote. A service takes nothing from them."""
    for name, sha256 in manifest.report_sha256.items():
        failure = None
        try:
            check_file(folder / name, sha256)
        except BundleError as cause:
            failure = str(cause)
        here = "as written" if failure is None else "differs"
        yield Finding(_PAGES, name, here, f"SHA-256 {sha256[:16]}", failure)


def _parity(
    variant: Variant, path: Path, session: ort.InferenceSession, kind: Kind, cases: list[Case]
) -> Iterator[Finding]:
    recorded = {tuple(parity.seq_lens): parity.relative_error for parity in variant.stated_parity}
    errors, claims, failure = [], [], None
    for case, error in parity_errors(variant, path, session, kind, cases):
        lengths = ", ".join(map(str, case.seq_lens))
        if case.seq_lens not in recorded:
            raise BundleError(
                f"{path}: the manifest has no parity figure for {REFERENCE}'s sequences of {lengths} tokens"
            )
        claim = recorded[case.seq_lens]
        limit = max(_SLACK * claim, _FP32_ERROR)
        errors.append(error)
        claims.append(claim)
        if failure is None and not error <= limit:  # a NaN is no pass
            failure = f"{lengths} tokens: relative error {error:.2e}, recorded {claim:.2e}, allowed {limit:.2e}"
    if not errors:
        raise BundleError(f"{path}: no token of {REFERENCE} has a routing margin")
    check = f"relative error, worst of {len(errors)} inputs"
    yield Finding(variant.precision, check, f"{max(errors):.2e}", f"{max(claims):.2e}", failure)
    for seq_lens in recorded.keys() - {case.seq_lens for case in cases}:
        check = f"relative error, {', '.join(map(str, seq_lens))} tokens (not in {REFERENCE})"
        yield Finding(variant.precision, check, "not repeated", f"{recorded[seq_lens]:.2e}", repeated=False)


def _permutation(variant: Variant, session: ort.InferenceSession, d_in: int, seed: int) -> Finding:
    failure = None
    try:
        check_position_wise(session, d_in, seed=seed, exact=variant.certificate.kind == "exact")
    except ProofError as error:
        failure = str(error)
    return Finding(variant.precision, "rows permuted", "holds" if failure is None else "differs", "", failure)


def _certificate(
    variant: Variant,
    manifest: Manifest,
    session: ort.InferenceSession,
    other: ort.InferenceSession,
    fp32: ort.InferenceSession | None,
    threads: int,
    seed: int,
) -> Iterator[Finding]:
    """Every comparison, then the verdict: the kind measured here must be at least as good as the recorded one."""
    recorded = variant.certificate
    comparisons = compare(
        session,
        manifest.kind,
        manifest.d_in,
        d_memory=manifest.d_memory,
        seed=seed,
        quantized=variant.precision != "fp32",
        fp32=fp32,
        other_threads=other,
    )
    comparisons = [comparison for comparison in comparisons if not _is_by_design(comparison, recorded)]
    for comparison in comparisons:
        held = comparison.counter_example is None
        claimed = recorded.checks.get(comparison.name)
        yield Finding(
            precision=variant.precision,
            check=f"{comparison.name} ({comparison.rows} rows)",
            here="holds" if held else "numbers" if comparison.name in _MUST_HOLD else f"drift {comparison.drift:.2e}",
            recorded="" if claimed is None else "holds" if claimed else "differs",
            failure=comparison.counter_example if recorded.kind == "exact" or comparison.name in _MUST_HOLD else None,
        )
    for name in recorded.checks.keys() - {comparison.name for comparison in comparisons}:
        why = " (no fp32 variant here)" if name == AS_FP32 and fp32 is None else ""
        before = "holds" if recorded.checks[name] else "differs"
        yield Finding(variant.precision, f"{name}{why}", "not repeated", before, repeated=False)
    found = conclude(comparisons, session_facts(threads))
    order = ["exact", "tolerance", "dependent", "unmeasured"]
    worse = order.index(found.kind) > order.index(recorded.kind)
    yield Finding(
        precision=variant.precision,
        check="certificate",
        here=found.kind if found.kind == "exact" else f"{found.kind}, drift {found.max_drift:.2e}",
        recorded=recorded.kind
        if recorded.kind in ("exact", "unmeasured")
        else f"{recorded.kind}, drift {recorded.max_drift:.2e}",
        failure=f"recorded as {recorded.kind}, {found.kind} on {found.machine}" if worse else None,
    )


def _shapes(variant: Variant, manifest: Manifest, session: ort.InferenceSession, seed: int) -> Iterator[Finding]:
    """Every shape that could break a file."""
    kind = variant.certificate.kind
    for tried in torture(runner(session), Inputs.of(manifest), "dependent" if kind == "unmeasured" else kind, seed):
        failed = tried.counter_example
        check = f"shape: {tried.shape.name} ({tried.shape.tokens} tokens)"
        yield Finding(variant.precision, check, "holds" if failed is None else "differs", "", failed)


def _is_by_design(comparison: Comparison, recorded: Certificate) -> bool:
    """Whether numbers for rows with NaN or Inf are what fp32 gives too, as the export saw, though fp32 is not here."""
    given = comparison.name == NO_NUMBERS and comparison.counter_example is not None
    return given and recorded.checks.get(AS_FP32, False) and NO_NUMBERS not in recorded.checks


def _table(folder: Path, findings: list[Finding]) -> Table:
    title = f"{folder.parent.name}/{folder.name} on ONNX Runtime {ort.__version__}"
    table = Table("variant", "check", "here", "recorded", "", title=title)
    for before, finding in zip([None, *findings], findings, strict=False):
        if before is not None and before.precision != finding.precision:
            table.add_section()
        verdict = Text("holds", "green") if finding.failure is None else Text("FAILS", "bold red")
        if not finding.repeated:
            verdict = Text("open", "yellow")
        table.add_row(finding.precision, finding.check, finding.here, finding.recorded, verdict)
    return table
