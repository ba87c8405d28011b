"""The details as pictures: SVG files beside `report.md`, the same bytes for the same figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from export.details.document import Details, StageFigures

ERROR: Final = "report-error.svg"
RANGES: Final = "report-ranges.svg"
ACTIVE: Final = "report-active.svg"
UNHARMED_DB: Final = 80.0  # what no quantized matmul has touched yet is above it, and would flatten the rest
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_STYLE: Final[Any] = {
    "svg.hashsalt": "tokenslab",
    "svg.fonttype": "path",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(details: Details, folder: Path) -> list[str]:
    """Write the plots that there are figures for; their file names."""
    made = []
    quantized = sorted({precision for stage in details.stages for precision in stage.sqnr_db})
    if quantized:
        _save(folder / ERROR, details.stages, lambda axes: _error(axes, details.stages, quantized))
        made.append(ERROR)
    if details.stages:
        _save(folder / RANGES, details.stages, lambda axes: _ranges(axes, details.stages))
        made.append(RANGES)
    hidden = [stage for stage in details.stages if stage.active_share is not None]
    if hidden:
        _save(folder / ACTIVE, hidden, lambda axes: _active(axes, hidden))
        made.append(ACTIVE)
    return made


def label(stage: StageFigures) -> str:
    """Layer and stage in a few characters."""
    return stage.stage if stage.layer is None else f"{stage.layer} {stage.stage}"


def _error(axes: Any, stages: Sequence[StageFigures], precisions: Sequence[Any]) -> None:
    for colour, precision in zip(COLOURS, precisions, strict=False):
        points = [(at, s.sqnr_db[precision]) for at, s in enumerate(stages) if _finite(s.sqnr_db.get(precision))]
        axes.plot([at for at, _ in points], [db for _, db in points], "o-", ms=3, lw=1, color=colour, label=precision)
    axes.set_ylim(top=min(UNHARMED_DB, axes.get_ylim()[1]))
    axes.set_ylabel("SQNR against float, dB")
    axes.legend(frameon=False)


def _ranges(axes: Any, stages: Sequence[StageFigures]) -> None:
    at = range(len(stages))
    axes.vlines(at, [s.least for s in stages], [s.greatest for s in stages], color=COLOURS[0], lw=3, label="range")
    axes.plot(at, [s.rms for s in stages], "o", ms=3, color=COLOURS[1], label="rms")
    with_outliers = [(no, s) for no, s in enumerate(stages) if s.outlier_channels]
    axes.plot(
        [no for no, _ in with_outliers],
        [max(abs(s.least), abs(s.greatest)) for _, s in with_outliers],
        "v",
        ms=4,
        color=COLOURS[3],
        label="has outlier channels",
    )
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylabel("activation")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _active(axes: Any, stages: Sequence[StageFigures]) -> None:
    axes.bar(range(len(stages)), [stage.active_share for stage in stages], color=COLOURS[2])
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of active hidden units")


def _save(path: Path, stages: Sequence[StageFigures], plot: Callable[[Any], None]) -> None:
    import matplotlib  # half a second, for those who draw

    with matplotlib.rc_context(_STYLE):
        from matplotlib.figure import Figure  # as above; no display is asked for

        figure = Figure(figsize=(min(24.0, max(5.0, 0.22 * len(stages) + 2)), 3.6), layout="constrained")
        axes = figure.subplots()
        plot(axes)
        every = max(1, math.ceil(len(stages) / 96))
        axes.set_xticks(range(0, len(stages), every), [label(s) for s in stages[::every]], rotation=90, fontsize=7)
        axes.grid(axis="y", alpha=0.3)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
