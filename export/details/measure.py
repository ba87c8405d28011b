"""Measure a bundle's details on its files, before the bundle is in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from export.details.document import Details, Fused, VariantDetails
from export.details.fusion import fusions
from export.details.stages import measure_stages
from export.floor import measure_speed
from export.quantization.calibration import Calibration, Feeds
from service.errors import ProviderError
from service.manifest import Manifest, Precision, Speed, Variant

SPEED_TOKENS: Final = (64,)
SPEED_SECONDS: Final = 0.5


def measure_details(
    folder: Path, manifest: Manifest, calibration: Calibration, precisions: Sequence[Precision]
) -> Details:
    """Stages on the first run of `calibration`, fusions and speed, of the files of `manifest` in `folder`.

    Stages are not measured where the weights are in a file of their own: it would take them into memory once more for
    each precision, and an export may take no more than 2.5 times the weights.
    """
    feeds = calibration.feeds[0]
    here = {v.precision: v for v in manifest.variants if v.provider == "cpu" and v.precision in precisions}
    reason = None
    if "fp32" not in here:
        reason = "there is no float file to compare with"
    elif any(variant.data for variant in here.values()):
        reason = "the weights are in a file of their own"
    files = {precision: folder / variant.file for precision, variant in here.items()}
    timed = all(not v.data and v.quantized_matmuls + v.float_matmuls for v in here.values())
    speeds = measure_speed(folder, manifest, SPEED_TOKENS, SPEED_SECONDS) if here and timed else {}
    return Details(
        tokens=0 if reason is not None else len(feeds["tokens"]),
        source=calibration.source,
        not_measured=reason,
        stages=[] if reason is not None else measure_stages(files, feeds, folder),
        variants=[_variant(folder, variant, feeds, speeds.get(variant.precision, [])) for variant in manifest.variants],
    )


def _variant(folder: Path, variant: Variant, feeds: Feeds, speed: Sequence[Speed]) -> VariantDetails:
    rows: list[Fused] = []
    reason = None
    if variant.data:
        reason = "the weights are in a file of their own"
    else:
        try:
            rows = fusions(folder / variant.file, variant.provider, feeds)
        except ProviderError as cause:
            reason = str(cause)
    return VariantDetails(
        precision=variant.precision,
        provider=variant.provider,
        fusions=rows,
        fusions_not_measured=reason,
        speed=list(speed),
    )
