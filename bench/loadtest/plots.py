"""Plots of a load test as SVG, by matplotlib. Text and axes take the page's own colour, so that one drawing serves
light and dark pages; the series' colours are legible on both (Okabe and Ito's, for colour-blind readers too).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]

FOREGROUND: Final = "#010203"  # a colour that nothing else has: replaced by currentColor in the SVG
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
STYLE: Final[Any] = {  # Any: the stubs want literal keys
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and copied
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), FOREGROUND
    ),
}
PERCENTILES: Final = {"p50_ms": "p50", "p90_ms": "p90", "p99_ms": "p99", "p999_ms": "p99.9"}


def throughput(closed: Rows, limit: float | None) -> str:
    """Tokens/s against connections, with the in-process limit as a line."""

    def draw(axes: Axes) -> None:
        axes.plot(*_points(closed, "value", "tokens_per_s"), marker="o", color=COLOURS[0], label="service")
        if limit is not None:
            axes.axhline(limit, color=COLOURS[1], linestyle="--", label="in-process limit")
        axes.set(xlabel="connections (closed loop)", ylabel="tokens/s")
        _ticks(axes, closed)
        axes.set_ylim(bottom=0)
        axes.legend()

    return _svg("throughput", draw)


def latency(open_loop: Rows) -> str:
    """Percentiles against the offered rate."""

    def draw(axes: Axes) -> None:
        for colour, (key, label) in zip(COLOURS, PERCENTILES.items(), strict=False):
            axes.plot(*_points(open_loop, "value", key), marker="o", color=colour, label=label)
        axes.set(xlabel="requests/s offered (open loop)", ylabel="ms from the intended sending", yscale="log")
        axes.legend()

    return _svg("latency", draw)


def windows(rows: Rows) -> str:
    """Mean tokens of a window, level by level."""

    def draw(axes: Axes) -> None:
        axes.barh([row["name"] for row in rows], [row["window_tokens"] for row in rows], color=COLOURS[2])
        axes.set(xlabel="tokens in a window (mean)")
        axes.invert_yaxis()

    return _svg("windows", draw)


def times(rows: Rows) -> str:
    """Queue beside compute time, level by level."""

    def draw(axes: Axes) -> None:
        names = [row["name"] for row in rows]
        queue, compute = ([row[key] for row in rows] for key in ("queue_ms", "compute_ms"))
        axes.barh(names, queue, color=COLOURS[4], label="queue")
        axes.barh(names, compute, left=queue, color=COLOURS[0], label="compute")
        axes.set(xlabel="ms (medians, from Server-Timing)")
        axes.invert_yaxis()
        axes.legend()

    return _svg("times", draw)


def settings(points: Rows, limit: float | None) -> str:
    """Tokens/s against the budget, a line for each time that a free engine waits."""

    def draw(axes: Axes) -> None:
        waits = sorted({point["max_wait_ms"] for point in points})
        for no, wait in enumerate(waits):
            own = sorted(
                (point["max_window_tokens"], point["closed"]["tokens_per_s"])
                for point in points
                if point["max_wait_ms"] == wait
            )
            colour = COLOURS[no % len(COLOURS)]
            axes.plot([x for x, _ in own], [y for _, y in own], marker="o", color=colour, label=f"wait {wait:g} ms")
        if limit is not None:
            axes.axhline(limit, color=FOREGROUND, linestyle="--", label="in-process limit")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="max_window_tokens", ylabel="tokens/s")
        axes.set_ylim(bottom=0)
        axes.legend()

    return _svg("settings", draw)


def _points(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    found = sorted((row[x], row[y]) for row in rows if row[y] is not None)
    return [a for a, _ in found], [b for _, b in found]


def _ticks(axes: Axes, closed: Rows) -> None:
    axes.set_xscale("log", base=2)
    values = [row["value"] for row in closed]
    axes.set_xticks(values, [f"{value:g}" for value in values])


def _svg(salt: str, draw: Callable[[Axes], None]) -> str:
    """`draw` on fresh axes, as an SVG element; its ids depend on `salt`, so that plots share a page."""
    with rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(7.5, 3.8), layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = out.getvalue()
    return svg[svg.index("<svg") :].replace(FOREGROUND, "currentColor")
