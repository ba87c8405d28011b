"""One bundle folder -> models that run: checked against its manifest, warm, its certificate re-tried here and now.

Every precision of a bundle is a model: `<name>` is the default precision, `<name>-<precision>` each one.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

from service.errors import BundleError
from service.manifest import MANIFEST, Manifest, Variant, read_manifest
from service.model import Model
from service.packing import Limits
from service.recheck import holds
from service.session import open_session
from service.settings import Settings

log = logging.getLogger("tokenslab.repository")


def load_bundle(folder: Path, settings: Settings) -> dict[str, Model]:
    """Every precision of the bundle that `settings.provider` can run, by the names it is served under.

    Raises:
        BundleError: names the file that cannot be served and why.
        ProviderError: the execution provider is not the one that was asked for.
    """
    manifest = read_manifest(folder)
    variants = [v for v in manifest.variants if v.provider == settings.provider]
    if manifest.default_precision not in {v.precision for v in variants}:
        raise BundleError(
            f"{folder / MANIFEST}: no variant for provider {settings.provider!r} in the default precision "
            f"{manifest.default_precision!r}"
        )
    named: dict[str, Model] = {}
    for variant in variants:
        model = _load_variant(folder, manifest, variant, settings)
        named[model.label] = model
        if variant.precision == manifest.default_precision:
            named[manifest.name] = model
    return named


def _load_variant(folder: Path, manifest: Manifest, variant: Variant, settings: Settings) -> Model:
    began = time.perf_counter()
    path = folder / variant.file
    session = open_session(path, variant.provider, settings.threads)
    _check_signature(path, session, manifest)
    slab = np.empty((settings.max_window_tokens, manifest.d_in), np.float32)
    limits = _limits(manifest.name, variant, settings)
    label = f"{manifest.name}-{variant.precision}"
    model = Model(label, str(manifest.version), manifest, variant, session, slab, limits)
    _warm_up(path, model, settings.max_sequence_tokens)
    log.info(
        "loaded %s version %s on %s: certificate %s, %.1f MB, %.2f s",
        *(label, manifest.version, variant.provider, variant.certificate.kind),
        *(variant.bytes / 1e6, time.perf_counter() - began),
    )
    return model


def _limits(name: str, variant: Variant, settings: Settings) -> Limits:
    kind = variant.certificate.kind
    packed = settings.windows and (kind == "exact" or (kind == "tolerance" and name in settings.pack_tolerance))
    return Limits(settings.max_window_tokens, requests=None if packed else 1, divisible=packed)


def _check_signature(path: Path, session: ort.InferenceSession, manifest: Manifest) -> None:
    wanted: dict[str, tuple[str, int | None]] = {"tokens": ("tensor(float)", manifest.d_in)}
    if manifest.kind == "sequence":
        wanted["seq_lens"] = ("tensor(int64)", None)
    found = {i.name: (i.type, i.shape[1] if len(i.shape) > 1 else None) for i in session.get_inputs()}
    if found != wanted:
        raise BundleError(f"{path}: its inputs are {found}, the manifest says {wanted}")
    outputs = [(o.name, o.type) for o in session.get_outputs()]
    if outputs != [("out", "tensor(float)")]:
        raise BundleError(f"{path}: its outputs are {outputs}, expected one float tensor 'out'")


def _warm_up(path: Path, model: Model, longest: int) -> None:
    """Run the sizes that traffic will bring, and check the certificate's claim on a sample of rows here and now."""
    window = len(model.slab)
    _run_once(path, model, [1])
    whole, rest = divmod(window, longest)
    _run_once(path, model, [longest] * whole + ([rest] if rest else []))
    if model.has_sequences and longest > window:
        _run_once(path, model, [longest])
    if model.certificate.kind == "exact":
        broken = holds(model.run, model.manifest.kind, model.manifest.d_in)
        if broken is not None:
            raise BundleError(
                f"{path}: its certificate says exact, but not on this machine: {broken}. "
                "Run `tokenslab verify` on the bundle here, or export it again"
            )


def _run_once(path: Path, model: Model, lens: list[int]) -> None:
    rows = sum(lens)
    tokens = np.random.default_rng(0).standard_normal((rows, model.manifest.d_in), dtype=np.float32)
    try:
        model.run(tokens, np.array(lens, np.int64) if model.has_sequences else None)
    except Exception as cause:
        raise BundleError(f"{path}: it loads but does not run at {rows} tokens: {cause}") from cause
