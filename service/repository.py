"""The model repository on disk, loaded: bundles -> models that can run. Knows nothing of requests.

Every precision of a bundle is a model: `<name>` is the default precision, `<name>-<precision>` each one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from service.errors import BundleError, NotFound
from service.manifest import MANIFEST, NAME, RESERVED, Certificate, Manifest, Variant, read_manifest
from service.packing import Float32, Int64, Limits
from service.recheck import holds
from service.session import open_session
from service.settings import Settings

log = logging.getLogger("tokenslab.repository")


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One variant, warm and ready: `tokens (rows, d_in)` [and `seq_lens (sequences,)`] -> `out (rows, d_out)`."""

    label: str  # <name>-<precision>, in metrics and logs
    version: str
    manifest: Manifest
    variant: Variant
    session: ort.InferenceSession
    slab: Float32
    limits: Limits

    @property
    def has_sequences(self) -> bool:
        return self.manifest.kind == "sequence"

    @property
    def certificate(self) -> Certificate:
        return self.variant.certificate

    def run(self, tokens: Float32, seq_lens: Int64 | None) -> Float32:
        """One `session.run`; raises whatever ONNX Runtime raises."""
        feeds = {"tokens": tokens} if seq_lens is None else {"tokens": tokens, "seq_lens": seq_lens}
        out: Float32 = self.session.run(["out"], feeds)[0]
        if out.shape != (len(tokens), self.manifest.d_out):
            raise RuntimeError(f"{self.label}: out is {out.shape}, expected {(len(tokens), self.manifest.d_out)}")
        return out


class Repository:
    """All models that are served, by name and version; one model may have two names."""

    def __init__(self, models: dict[tuple[str, str], Model]) -> None:
        self._models = models
        self._versions: dict[str, tuple[str, ...]] = {}
        for name, version in sorted(models, key=_order):
            self._versions[name] = (*self._versions.get(name, ()), version)

    def versions(self, name: str) -> tuple[str, ...]:
        """All versions that are served under `name`, oldest first."""
        return self._versions[name]

    def get(self, name: str, version: str | None = None) -> Model:
        """The model, its latest version unless one is named; raises NotFound with what there is."""
        if name not in self._versions:
            raise NotFound(f"unknown model {name[:80]!r}; served: {', '.join(self._versions)}")
        model = self._models.get((name, self._versions[name][-1] if version is None else version))
        if model is None:
            raise NotFound(
                f"model {name!r} has no version {str(version)[:20]!r} here; served: {', '.join(self._versions[name])}"
            )
        return model

    def __iter__(self) -> Iterator[tuple[str, Model]]:
        return iter((name, self._models[name, version]) for name, version in sorted(self._models, key=_order))


def _order(key: tuple[str, str]) -> tuple[str, int]:
    return key[0], int(key[1])


def load_repository(settings: Settings) -> Repository:
    """Load, check and warm up every bundle under `settings.models`.

    Raises:
        BundleError: names the file that cannot be served and why; nothing is served then.
        ProviderError: the execution provider is not the one that was asked for.
    """
    try:
        return _load(settings)
    except OSError as cause:
        raise BundleError(f"{cause.filename}: {cause.strerror}") from cause


def _load(settings: Settings) -> Repository:
    root = settings.models
    if not root.is_dir():
        raise BundleError(f"{root.absolute()}: the model repository is not a folder")
    models: dict[tuple[str, str], Model] = {}
    owners: dict[str, Path] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        versions = _versions(folder)
        for version in versions if settings.versions == "all" else versions[-1:]:
            for name, model in _load_bundle(folder / str(version), settings).items():
                owner = owners.setdefault(name, folder)
                if owner != folder:
                    raise BundleError(f"{folder}: its model {name!r} clashes with one of {owner}: rename one of them")
                models[name, model.version] = model
    if not models:
        raise BundleError(f"{root.absolute()}: no bundle in it (looked for <name>/<version>/{MANIFEST})")
    return Repository(models)


def _versions(folder: Path) -> list[int]:
    if not NAME.fullmatch(folder.name) or folder.name in RESERVED:
        raise BundleError(f"{folder}: not a model name (expected {NAME.pattern}, and not {', '.join(RESERVED)})")
    versions = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue  # an export under way
        if not (path.is_dir() and path.name.isascii() and path.name.isdigit() and str(int(path.name)) == path.name):
            raise BundleError(f"{path}: not a version folder (expected a whole number)")
        versions.append(int(path.name))
    if not versions:
        raise BundleError(f"{folder}: no version folder in it")
    return sorted(versions)


def _load_bundle(folder: Path, settings: Settings) -> dict[str, Model]:
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
