"""The details as Markdown, for the end of `report.md`. Pure text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from export.details.document import Details
from export.details.plots import label
from export.details.stages import ACTIVE, OUTLIER
from export.markdown import table
from service.manifest import Precision


def sections(details: Details, plots: Sequence[str]) -> Iterator[str]:
    """Headings, tables and pictures, in order."""
    yield "## Layers and stages"
    if details.not_measured is not None:
        yield f"Not measured: {details.not_measured}."
    else:
        yield (
            f"{details.tokens:,} tokens, {details.source}. Range and rms of each value in float; outliers are channels "
            f"that reach {OUTLIER:g} times the rms; a hidden unit is active for a token if it reaches {ACTIVE:.0%} of "
            "the token's largest; SQNR in dB against float, each channel in the units that fit best, for smoothing "
            "moves scales."
        )
        yield _stages(details)
        yield from (f"![{name.removesuffix('.svg')}]({name})" for name in plots)
    yield "## What fused"
    for variant in details.variants:
        if variant.fusions_not_measured is not None:
            yield f"{variant.precision} on {variant.provider}: not measured: {variant.fusions_not_measured}."
    rows = [
        (
            variant.precision,
            fused.pattern,
            " or ".join(fused.kernels),
            f"{fused.found} of {fused.expected}{', as written' if fused.written else ''}",
            "-" if fused.share_of_time is None else f"**{fused.share_of_time:.1%}**",
        )
        for variant in details.variants
        for fused in variant.fusions
    ]
    yield table(("precision", "pattern", "becomes", "fused", "share of a run's time by what did not"), rows)
    for variant in details.variants:
        yield from (
            f"{variant.precision}, {f.pattern}: not at {', '.join(f.missed)}." for f in variant.fusions if f.missed
        )
    speeds = [
        (
            variant.precision,
            f"{speed.tokens:,}",
            f"{speed.us_per_token:.2f}",
            f"{speed.floor_us_per_token:.2f}",
            f"{speed.share_of_floor:.2f}",
        )
        for variant in details.variants
        for speed in variant.speed
    ]
    if speeds:
        yield "## Speed"
        yield "CPU time of one thread, the least of many interleaved runs; the floor is the weight matmuls alone."
        yield table(("precision", "tokens", "us a token", "floor", "speed over the floor's"), speeds)


def _stages(details: Details) -> str:
    precisions: list[Precision] = sorted({p for stage in details.stages for p in stage.sqnr_db})
    header = ("stage", "value", "rows x width", "range", "rms", "outliers", "active", *precisions)
    return table(
        header,
        [
            (
                label(stage),
                stage.weight or stage.value,
                f"{stage.rows:,} x {stage.width:,}",
                f"{stage.least:.3g} to {stage.greatest:.3g}",
                f"{stage.rms:.3g}",
                str(stage.outlier_channels),
                "-" if stage.active_share is None else f"{stage.active_share:.1%}",
                *(_db(stage.sqnr_db.get(precision)) for precision in precisions),
            )
            for stage in details.stages
        ],
    )


def _db(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if math.isfinite(value) else "not finite"
