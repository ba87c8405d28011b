"""`tokenslab verify --write`: parity and certificate, measured on this machine, into the manifest.

What was exported without its provider is `unmeasured` until then. It judges nothing: verification does, before. Needs
no torch, like all of verify.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from export.certify import certify, runner
from export.reference import Case, read_references
from export.relative_error import relative_error, sqnr_db
from export.routed import with_margin
from service.errors import BundleError
from service.manifest import (
    MANIFEST,
    REFERENCE,
    Certificate,
    CertificateKind,
    Kind,
    Manifest,
    Parity,
    Variant,
    read_manifest,
)
from service.session import Provider, open_session, session_facts


def parity_errors(
    variant: Variant, path: Path, session: ort.InferenceSession, kind: Kind, cases: Sequence[Case]
) -> Iterator[tuple[Case, float]]:
    """Each case of which tokens count for parity, with ||out - ref|| / ||ref|| over these, of `session` on `path`.

    Raises:
        BundleError: the file, its manifest and the references do not belong together.
    """
    run = runner(session)
    for case in cases:
        if len(case.routed) != len(variant.routing):
            raise BundleError(
                f"{path}: the manifest describes {len(variant.routing)} routers, {REFERENCE} has {len(case.routed)}"
            )
        kept = with_margin(case.routed, variant.routing, len(case.tokens))
        if not kept.any():  # no token of these has a routing margin: nothing was recorded
            continue
        out = run(case.tokens, np.array(case.seq_lens, np.int64) if kind == "sequence" else None, case.memory)
        if out.shape != case.reference.shape:
            lengths = ", ".join(map(str, case.seq_lens))
            raise BundleError(f"{path}: out is {out.shape} for {lengths} tokens, expected {case.reference.shape}")
        yield case, relative_error(out[kept], case.reference[kept])


def record(folder: Path, provider: Provider, threads: int, seed: int) -> dict[str, CertificateKind]:
    """Measure every variant for `provider` and write the manifest anew, all at once.

    Returns:
        Precision -> the kind of its certificate.

    Raises:
        BundleError: `provider` is the CPU; a file is missing, altered or unreadable, or the manifest cannot be written.
        ProofError: a variant gives plausible numbers for NaN or Inf.
        ProviderError: this ONNX Runtime does not have `provider`.
    """
    if provider == "cpu":
        raise BundleError(
            f"{folder}: its files for the CPU were measured when they were exported; --write is for others"
        )
    manifest = read_manifest(folder)
    cases = read_references(folder / REFERENCE)
    fp32: ort.InferenceSession | None = None
    measured: dict[str, Variant] = {}
    for variant in sorted(manifest.variants, key=lambda variant: variant.precision != "fp32"):
        if variant.provider != provider:
            continue
        session = open_session(folder / variant.file, provider, threads)
        measured[variant.file] = _measured(variant, manifest, folder, session, fp32, cases, threads, seed)
        if variant.precision == "fp32":
            fp32 = session
    update = {"variants": [measured.get(variant.file, variant) for variant in manifest.variants]}
    # Through the schema once more: a copy alone is not validated.
    _replace(folder / MANIFEST, Manifest.model_validate(manifest.model_copy(update=update).model_dump()))
    return {variant.precision: variant.certificate.kind for variant in measured.values()}


def _measured(
    variant: Variant,
    manifest: Manifest,
    folder: Path,
    session: ort.InferenceSession,
    fp32: ort.InferenceSession | None,
    cases: Sequence[Case],
    threads: int,
    seed: int,
) -> Variant:
    path = folder / variant.file
    parity = [
        Parity(
            seq_lens=list(case.seq_lens),
            memory_seq_lens=None if case.memory is None else case.memory.seq_lens.tolist(),
            relative_error=error,
            sqnr_db=sqnr_db(error),
        )
        for case, error in parity_errors(variant, path, session, manifest.kind, cases)
    ]
    certificate = certify(
        session,
        manifest.kind,
        manifest.d_in,
        d_memory=manifest.d_memory,
        seed=seed,
        facts=session_facts(threads),
        quantized=variant.precision != "fp32",
        fp32=fp32,
        other_threads=open_session(path, variant.provider, 1 if threads > 1 else 2),
    )
    return variant.model_copy(
        update={"parity": parity, "certificate": _kept_findings(certificate, variant.certificate)}
    )


def _kept_findings(measured: Certificate, before: Certificate) -> Certificate:
    """`measured`, with what the export found in the graph itself, which no sample of windows can refute."""
    found = {name: held for name, held in before.checks.items() if not held and name not in measured.checks}
    if not found:
        return measured
    kind = "tolerance" if measured.kind == "exact" else measured.kind
    return measured.model_copy(update={"kind": kind, "checks": {**measured.checks, **found}})


def _replace(path: Path, manifest: Manifest) -> None:
    """Write beside `path` and rename: a reader finds the old manifest or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as cause:
        raise BundleError(f"{path}: {cause.strerror or cause}") from cause
    finally:
        temporary.unlink(missing_ok=True)
