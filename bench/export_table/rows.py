"""One architecture -> its rows: exported in every precision, measured, and held against the bars.

Parity and certificate are what the export proved, or the row is the reason why it refused; speed and sentences are
measured here. A row without a figure that it should have is a row that misses its bar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np

from bench.export_table.architectures import Architecture
from bench.export_table.sentences import Sentences
from export.errors import ExportError
from export.floor import measure_speed
from export.packed import Packed
from export.pipeline import Options, export_packed
from export.precisions import RECIPES
from export.quantization.block_forms import BlockForm
from export.quantization.forms import EIGHT_BIT, SEVEN_BIT
from export.quantization.static_form import STATIC
from service.manifest import MatmulForm, Precision, Speed, Variant, read_manifest

PRECISIONS: Final[tuple[Precision, ...]] = tuple(
    name for name in get_args(Precision) if "cpu" in RECIPES[name].providers
)

# Speed over that of the precision's own bare matmuls, at every window, where `Architecture.held_to_floor`.
FLOOR_BARS: Final[Mapping[str, float]] = {"int8": 0.85, "int8-fast": 0.8}
# What a certificate may be, if not exact: no kernel for 4-bit weights gives the same bits alone and in a window.
CERTIFICATES: Final[Mapping[str, str]] = {"w4": "tolerance"}
# The form of a precision's matmuls, unless its bar asks for a closer one.
FORMS: Final[Mapping[str, MatmulForm]] = {
    "int8": EIGHT_BIT.name,
    "int8-fast": SEVEN_BIT.name,
    "int8-static": STATIC.name,
    "w8": BlockForm(8, 4).name,
    "w4": BlockForm(4, 0).name,
}
# Cosine of 64 sentence embeddings with float32's: least and median.
COSINE_BARS: Final[Mapping[str, tuple[float, float]]] = {
    "fp32": (0.999999, 0.999999),
    "int8": (0.998, 0.999),
    "int8-fast": (0.997, 0.998),
}
# What a precision may be certified as, if not exact: kernels of some change with the number of rows, by their nature.
INEXACT: Final[Mapping[str, Sequence[str]]] = {"w4": ("tolerance",)}


@dataclass(frozen=True)
class Row:
    """What came of one architecture in one precision."""

    architecture: str
    precision: Precision
    variant: Variant | None  # None: the export refused, and `missed` says why
    speed: Sequence[Speed]
    cosine: tuple[float, float] | None  # least and median, where sentences are embedded
    missed: Sequence[str]
    closer: str = ""  # matmuls that got more bits, or stayed float, to hold the bar


def rows(
    architecture: Architecture,
    folder: Path,
    *,
    precisions: Sequence[Precision] = PRECISIONS,
    seconds: float,
    progress: Callable[[str], None],
) -> list[Row]:
    """Export `architecture` into `folder`, time its files for about `seconds` a window, and judge each precision."""
    files = folder / "files"
    files.mkdir(parents=True)
    bundles, refused = _exported(architecture.make(files), architecture.slug, folder, precisions, progress)
    made: dict[Precision, Row] = {}
    sentences = Sentences() if architecture.sentences and bundles else None
    for bundle in bundles:
        manifest = read_manifest(bundle)
        progress(f"{architecture.slug}: time {', '.join(v.precision for v in manifest.variants)} over their floors")
        speeds = measure_speed(bundle, manifest, architecture.windows, seconds)
        for variant in manifest.variants:
            cosine = None
            if sentences is not None and variant.provider == "cpu":
                cosines = sentences.cosines(bundle / variant.file)
                cosine = float(cosines.min()), float(np.median(cosines))
            speed = speeds.get(variant.precision, [])
            missed = list(_missed(architecture, variant, speed, cosine))
            made[variant.precision] = Row(
                architecture.name, variant.precision, variant, speed, cosine, missed, _closer(variant)
            )
    for precision, reason in refused.items():
        made[precision] = Row(architecture.name, precision, None, [], None, [reason])
    return [made[precision] for precision in precisions]


def _exported(
    packed: Packed, slug: str, folder: Path, precisions: Sequence[Precision], progress: Callable[[str], None]
) -> tuple[list[Path], dict[Precision, str]]:
    """All precisions in one bundle; where that is refused each in one of its own, and why some cannot be made.

    What does not hold its bar as it is gets the error budget of that bar: matmuls in float, which the row names.
    """
    try:
        return [_export(packed, slug, folder, precisions, progress)], {}
    except ExportError as refusal:
        if len(precisions) == 1:
            return [], {precisions[0]: str(refusal)}
    bundles, refused = [], {}
    for precision in precisions:
        bar = RECIPES[precision].sqnr_db
        for budget in [None] if bar is None else [None, bar]:
            name = f"{slug}-alone-in-{precision}{'-within-its-budget' if budget else ''}."
            try:
                bundles.append(_export(packed, name, folder, (precision,), progress, budget))
            except ExportError as refusal:
                refused[precision] = str(refusal)
            else:
                refused.pop(precision, None)
                break
    return bundles, refused


def _export(
    packed: Packed,
    slug: str,
    folder: Path,
    precisions: Sequence[Precision],
    progress: Callable[[str], None],
    min_sqnr: float | None = None,
) -> Path:
    # The table judges certificates itself; and random ranges do where the weights are random too.
    options = Options(
        slug,
        folder / "models",
        precisions=precisions,
        allow_synthetic=True,
        allow_inexact=True,
        min_sqnr=min_sqnr,
    )
    return export_packed(
        packed, options, source={"made by": "make export-table"}, progress=lambda step: progress(f"{slug}: {step}")
    )


def _closer(variant: Variant) -> str:
    """How many matmuls are not in the precision's own form, by what they are instead."""
    own = FORMS.get(variant.precision)
    others = Counter(matmul.form for matmul in variant.matmuls if own is not None and matmul.form != own)
    return ", ".join(f"{count} of {len(variant.matmuls)} matmuls {form}" for form, count in others.items())


def _missed(
    architecture: Architecture, variant: Variant, speed: Sequence[Speed], cosine: tuple[float, float] | None
) -> list[str]:
    """The bars that a variant does not reach, in words."""
    missed = []
    if variant.certificate.kind not in ("exact", CERTIFICATES.get(variant.precision)):
        missed.append(f"certificate {variant.certificate.kind}, required exact")
    bar = FLOOR_BARS.get(variant.precision)
    if architecture.held_to_floor and bar is not None:
        slow = [s for s in speed if s.share_of_floor < bar]
        missed += [f"{s.share_of_floor:.2f} of the floor's speed at {s.tokens} tokens, required {bar}" for s in slow]
    wanted = COSINE_BARS.get(variant.precision) if cosine is not None else None
    if cosine is not None and wanted is not None and not (cosine[0] >= wanted[0] and cosine[1] >= wanted[1]):
        missed.append(
            f"cosine {cosine[0]:.4f} at least and {cosine[1]:.4f} in the median, required {wanted[0]} and {wanted[1]}"
        )
    return missed
