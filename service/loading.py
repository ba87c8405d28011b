"""Bundle folders -> models that run: checked against their manifests, warm, the certificate re-tried here and now.

Every precision of a bundle is a model: `<name>` is the default precision, `<name>-<precision>` each one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort

from service.arena import ArenaUse
from service.errors import BundleError, RoomError
from service.manifest import MANIFEST, Manifest, Variant, read_manifest
from service.memory import Memory
from service.model import Model
from service.packing import Float32, Limits
from service.process_memory import resident_bytes, return_free_memory
from service.recheck import holds
from service.repository import Loaded, Repository
from service.request import Timing
from service.session import open_session
from service.settings import MIB, Settings
from service.versions import Found, bundle_folders, chosen, scan_bundle

log = logging.getLogger("tokenslab.repository")

TIMED_TOKENS = 64  # beside the smallest and the largest window: what a chunk may look like

# Runs one warm-up window now, or when the engine that serves others has a gap for it.
Between = Callable[[Callable[[], Float32]], Float32]


# Measured on files of 19 MB (fp32) and less: ONNX Runtime keeps the weights and a copy in its kernels' own layout, and
# needs the parsed file beside them while it loads.
KEPT, LOADING = 2.0, 3.2


def _at_once(run: Callable[[], Float32]) -> Float32:
    return run()


def load_repository(settings: Settings) -> Repository:
    """Load, check and warm up every bundle under `settings.models`.

    Raises:
        BundleError: names the file that cannot be served and why; nothing is served then.
        ProviderError: the execution provider is not the one that was asked for.
    """
    repository = Repository()
    for folder in bundle_folders(settings.models):
        versions = scan_bundle(folder)
        if not versions:
            raise BundleError(f"{folder}: no version folder in it")
        wanted = chosen(settings.versions, versions)
        if not wanted:
            raise BundleError(f"{folder}: has versions {', '.join(map(str, versions))}, none of {settings.versions}")
        for found in wanted.values():
            try:
                fresh = load_bundle(found, settings, in_use=repository.memory_bytes)
            except OSError as cause:
                raise BundleError(f"{cause.filename}: {cause.strerror}") from cause
            clash = repository.clashes(fresh)
            if clash is not None:
                raise BundleError(f"{folder}: {clash}")
            repository.swap([fresh], ())
    if not repository.bundles():
        raise BundleError(f"{settings.models.absolute()}: no bundle in it (looked for <name>/<version>/{MANIFEST})")
    return repository


def load_bundle(
    found: Found, settings: Settings, between: Between = _at_once, in_use: Callable[[], int] = lambda: 0
) -> Loaded:
    """Every precision of the bundle that `settings.provider` can run, by the names it is served under.

    `between` is given each warm-up run, so that a model which is loaded beside others takes its turn; `in_use` tells
    the bytes that all models take already.

    Raises:
        BundleError: names the file that cannot be served and why.
        ProviderError: the execution provider is not the one that was asked for.
    """
    folder = found.folder
    manifest = read_manifest(folder)
    variants = [v for v in manifest.variants if v.provider == settings.provider]
    if manifest.default_precision not in {v.precision for v in variants}:
        raise BundleError(
            f"{folder / MANIFEST}: no variant for provider {settings.provider!r} in the default precision "
            f"{manifest.default_precision!r}"
        )
    named: dict[str, Model] = {}
    for variant in variants:
        taken = in_use() + sum({model.label: model.memory_bytes for model in named.values()}.values())
        _check_room(folder / variant.file, LOADING * variant.total_bytes, taken, settings)
        model = _load_variant(folder, manifest, variant, settings, between)
        # No RoomError, which polling tries again: whoever has been loaded once is not loaded at every look.
        _check_room(folder / variant.file, model.memory_bytes, taken, settings, BundleError)
        named[model.label] = model
        if variant.precision == manifest.default_precision:
            named[manifest.name] = model
    return Loaded(found, named)


def _load_variant(folder: Path, manifest: Manifest, variant: Variant, settings: Settings, between: Between) -> Model:
    began, before = time.perf_counter(), resident_bytes()
    path = folder / variant.file
    session = open_session(path, variant.provider, settings.threads)
    _check_signature(path, session, manifest)
    slab = np.empty((settings.max_window_tokens, manifest.d_in), np.float32)
    limits = _limits(manifest, variant, settings)
    label = f"{manifest.name}-{variant.precision}"
    # The budget counts memory rows as tokens, so a window within it has room for them here.
    memory_slab = None if manifest.d_memory is None else np.empty((len(slab), manifest.d_memory), np.float32)
    model = Model(label, str(manifest.version), manifest, variant, session, slab, limits, memory_slab)
    longest = _longest(manifest, settings)
    timings = _warm_up(path, model, lambda *inputs: between(partial(model.run, *inputs)), longest)
    return_free_memory()
    after = resident_bytes()
    grown = 0 if before is None or after is None else after - before
    slabs = slab.nbytes + (0 if memory_slab is None else memory_slab.nbytes)
    size = max(int(KEPT * variant.total_bytes), grown) + slabs
    model = replace(model, memory_bytes=size, arena=ArenaUse(), timings=timings)
    log.info(
        "loaded %s version %s on %s: certificate %s, %.1f MB, %.1f MB in memory, %.2f s",
        *(label, manifest.version, variant.provider, variant.certificate.kind),
        *(variant.total_bytes / 1e6, model.memory_bytes / 1e6, time.perf_counter() - began),
    )
    return model


def _check_room(
    path: Path, needed: float, taken: int, settings: Settings, error: type[BundleError] = RoomError
) -> None:
    budget = settings.max_memory_mib * MIB
    if budget and taken + needed > budget:
        raise error(
            f"{path}: needs {needed / MIB:.1f} MiB, {taken / MIB:.1f} MiB are taken by other models, "
            f"max_memory_mib is {settings.max_memory_mib:g}"
        )


def _limits(manifest: Manifest, variant: Variant, settings: Settings) -> Limits:
    kind = variant.certificate.kind
    # Nobody can accept what nobody has measured.
    accepted = {"tolerance": settings.pack_tolerance, "dependent": settings.pack_dependent}.get(kind, frozenset())
    packed = settings.windows and (kind == "exact" or manifest.name in accepted)
    return Limits(
        settings.max_window_tokens,
        requests=None if packed else 1,
        # Who accepts that neighbours change an answer has not accepted that a request's own rows are torn apart.
        divisible=packed and kind != "dependent",
        sequence_tokens=manifest.max_sequence_tokens,
    )


def _longest(manifest: Manifest, settings: Settings) -> int:
    return min(settings.max_sequence_tokens, manifest.max_sequence_tokens or settings.max_sequence_tokens)


def _check_signature(path: Path, session: ort.InferenceSession, manifest: Manifest) -> None:
    wanted: dict[str, tuple[str, int | None]] = {"tokens": ("tensor(float)", manifest.d_in)}
    if manifest.kind == "sequence":
        wanted["seq_lens"] = ("tensor(int64)", None)
    if manifest.d_memory is not None:
        wanted["memory"] = ("tensor(float)", manifest.d_memory)
        wanted["memory_seq_lens"] = ("tensor(int64)", None)
    found = {i.name: (i.type, i.shape[1] if len(i.shape) > 1 else None) for i in session.get_inputs()}
    if found != wanted:
        raise BundleError(f"{path}: its inputs are {found}, the manifest says {wanted}")
    outputs = [(o.name, o.type) for o in session.get_outputs()]
    if outputs != [("out", "tensor(float)")]:
        raise BundleError(f"{path}: its outputs are {outputs}, expected one float tensor 'out'")


def _warm_up(path: Path, model: Model, run: Callable[..., Float32], longest: int) -> tuple[Timing, ...]:
    """Run the sizes that traffic will bring, and check the certificate's claim on a sample of rows here and now.

    Returns how long the sizes took once they were warm; predictions start from it.
    """
    # Memory rows take room too, and a run gives each sequence as many as it has tokens.
    window = len(model.slab) if model.manifest.d_memory is None else max(1, len(model.slab) // 2)
    whole, rest = divmod(window, longest)
    sizes = [[1], [longest] * whole + ([rest] if rest else []), [1], [min(longest, window, TIMED_TOKENS)]]
    timings = [_run_once(path, model, run, lens) for lens in sizes]
    if model.has_sequences and longest > window:
        timings.append(_run_once(path, model, run, [longest]))
    if model.certificate.kind == "exact":
        broken = holds(run, model.manifest.kind, model.manifest.d_in, d_memory=model.manifest.d_memory)
        if broken is not None:
            raise BundleError(
                f"{path}: its certificate says exact, but not on this machine: {broken}. "
                "Run `tokenslab verify` on the bundle here, or export it again"
            )
    return tuple(timings[1:])  # the very first run pays for what no other does


def _run_once(path: Path, model: Model, run: Callable[..., Float32], lens: list[int]) -> Timing:
    """One window of `lens` tokens; a memory is as long as its sequence."""
    rows, rng, memory = sum(lens), np.random.default_rng(0), None
    tokens = rng.standard_normal((rows, model.manifest.d_in), dtype=np.float32)
    if model.manifest.d_memory is not None:
        memory = Memory(rng.standard_normal((rows, model.manifest.d_memory), dtype=np.float32), np.cumsum(lens))
    began = time.perf_counter()
    try:
        run(tokens, np.array(lens, np.int64) if model.has_sequences else None, memory)
    except Exception as cause:
        raise BundleError(f"{path}: it loads but does not run at {rows} tokens: {cause}") from cause
    seconds = time.perf_counter() - began
    squares = sum(length * length for length in lens) if model.has_sequences else 0
    kinds = 1 if memory is None else 2
    return Timing(kinds * rows, kinds * squares, seconds)
