"""A load test in the terminal: progress while it runs, tables afterwards."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.loadtest.baseline import Change
from bench.loadtest.document import COLUMNS, Document
from bench.loadtest.sweep import Step

WIDE: Final = 170  # a log file has no width, and a folded table cannot be read


@contextmanager
def progress(console: Console, steps: int) -> Generator[Step, None, None]:
    """A bar over `steps` on a terminal, a line for each elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=steps)
        begun = False

        def step(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, advance=int(begun))
            begun = True
            if not console.is_terminal:
                console.print(text, highlight=False)

        yield step


def show(console: Console, document: Document) -> None:
    """The figures, what is recommended, and why not to trust them."""
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    if document["levels"]:
        console.print(_levels(document))
    if document["windows"]:
        console.print(_windows(document))
    if (best := document["recommended"]) is not None:
        console.print(
            f"recommended: max_window_tokens {best['max_window_tokens']}, max_wait_ms {best['max_wait_ms']:g}; "
            f"batching gives {best['batching_gain']:.2f} times the throughput of the smallest window",
            highlight=False,
        )
    rows = [*document["levels"], *(point[loop] for point in document["windows"] for loop in ("closed", "open"))]
    saturated = [each for each in rows if each["saturated"]]
    if saturated:
        reasons = "; ".join(max(saturated, key=lambda each: len(each["saturated"]))["saturated"])
        console.print(
            f"client saturated in {len(saturated)} of {len(rows)} lines, their figures are its own as much as the "
            f"server's: {reasons}",
            style="yellow",
            highlight=False,
        )
    if errors := sum(each["errors"] for each in rows):
        console.print(f"INVALID: {errors} requests without a result", style="bold red", highlight=False)


def show_changes(console: Console, changes: Sequence[Change]) -> None:
    """Every ratio, then and now."""
    out = Table(title="Against the baseline")
    out.add_column("ratio")
    for name in ("then", "now", "tolerance"):
        out.add_column(name, justify="right")
    for each in changes:
        now = "gone" if each.now is None else f"{each.now:.3f}"
        style = "bold red" if each.regressed else None
        out.add_row(each.name, f"{each.then:.3f}", now, f"{each.tolerance:.0%}", style=style)
    console.print(out)


def _levels(document: Document) -> Table:
    limit = document["limit"]
    out = Table(title=f"{document['plan']['model']}, {document['plan']['sizes']} tokens a request")
    out.add_column("level", no_wrap=True)
    for name, _, _ in COLUMNS:
        out.add_column(name, justify="right", no_wrap=True)
    if limit is not None:
        out.add_column("of limit", justify="right", no_wrap=True)
    for row in document["levels"]:
        share = [] if limit is None else [f"{row['tokens_per_s'] / limit['tokens_per_s']:.3f}"]
        cells = ["" if row[key] is None else f"{row[key]:.{digits}f}" for _, key, digits in COLUMNS]
        out.add_row(row["name"], *cells, *share, style="bold red" if row["errors"] else None)
    return out


def _windows(document: Document) -> Table:
    limit, best = document["limit"], document["recommended"]
    out = Table(title=f"{document['plan']['model']}: windows")
    for name in ("max_window_tokens", "max_wait_ms", "tokens/s", "of limit", "tokens/window", "p50 ms", "p99 ms"):
        out.add_column(name, justify="right", no_wrap=True)
    for point in document["windows"]:
        closed, tail = point["closed"], point["open"]
        values = (closed["window_tokens"], tail["p50_ms"], tail["p99_ms"])
        chosen = all(point[name] == best[name] for name in ("max_window_tokens", "max_wait_ms"))
        out.add_row(
            str(point["max_window_tokens"]),
            f"{point['max_wait_ms']:g}",
            f"{closed['tokens_per_s']:.0f}",
            "" if limit is None else f"{closed['tokens_per_s'] / limit['tokens_per_s']:.3f}",
            *("" if value is None else f"{value:.2f}" for value in values),
            style="bold green" if chosen else None,
        )
    return out
