"""`tokenslab bench latency`: latency under open-loop load, on the command line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.bundles import ExportFailed
from bench.loadtest.latency import (
    BARRED_SHARE,
    SHARES,
    Plan,
    Round,
    Verdict,
    errors,
    ideal_tail,
    measure_latency,
    stages,
    verdicts,
)
from bench.loadtest.target import TargetError
from bench.machine import describe_machine
from bench.process import ServerError
from bench.timing import Spread
from service.cpu import cpu_quota
from service.errors import TokenslabError
from service.manifest import Precision


def latency(
    models: Annotated[Path, typer.Option(help="Where the measured bundle is, or is exported to")] = Path(
        "build/bench-models"
    ),
    precision: Annotated[Precision, typer.Option(help="Of the measured bundle")] = "fp32",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a request")] = 16,
    connections: Annotated[int, typer.Option(min=1, max=100, help="Of the closed loop that finds the maximum")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all stages")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured seconds of each stage")] = 8,
    processes: Annotated[int, typer.Option(min=1, help="Client processes")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="ONNX Runtime threads [default: the CPU quota]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every round here, as JSON")] = None,
    check: Annotated[bool, typer.Option(help="Exit 1 if a median misses its bar, or an error invalidates it")] = False,
) -> None:
    """Latency at 50, 70 and 90 % of the closed loop's maximum (Poisson), and of a single client.

    In an open loop latency counts from the time at which a request was meant to be sent.
    """
    console = Console()
    plan = Plan(models, precision, tokens, connections, rounds, seconds, threads or cpu_quota(), processes)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as logs:
            measured = measure_latency(plan, Path(logs), lambda text: console.print(text, highlight=False))
        judged = verdicts(measured)
    except (ExportFailed, ServerError, TargetError, TokenslabError, ValueError) as error:
        typer.echo(f"tokenslab bench: {error}", err=True)
        raise typer.Exit(1) from None
    _show(console, measured, judged)
    if out is not None:
        document = {
            "schema_version": 1,
            "machine": describe_machine(plan.threads),
            "plan": {**asdict(plan), "models": str(models)},
            "figures": [{**asdict(each), "passes": each.passes} for each in judged],
            "rounds": [asdict(each) for each in measured],
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    if check and (errors(measured) or not all(each.passes for each in judged)):
        raise typer.Exit(1)


def _show(console: Console, rounds: Sequence[Round], judged: Sequence[Verdict]) -> None:
    if not console.is_terminal:
        console.width = max(console.width, 140)  # a log file has no width; a folded table cannot be read
    console.print(_table(rounds))
    for each in judged:
        verdict = "ok" if each.passes else "MISSED"
        spread = f"{each.figure.median:.2f} ({each.figure.low:.2f}..{each.figure.high:.2f})"
        console.print(f"{each.name}: {spread}, <= {each.bar:g} {verdict}", highlight=False)
    ideal, share = ideal_tail(rounds), f"{BARRED_SHARE:.0%}"
    console.print(
        f"p99 of an ideal server at {share} / its window: {ideal.median:.2f} ({ideal.low:.2f}..{ideal.high:.2f})",
        highlight=False,
    )
    console.print(
        f"others used {max(each.foreign for each in rounds):.2f} cores at worst; the client's own part is in latency",
        highlight=False,
    )
    for reason in dict.fromkeys(reason for each in rounds for _, stage in stages(each) for reason in stage.saturated):
        console.print(f"client saturated: {reason}", style="yellow", highlight=False)
    if errors(rounds):
        console.print(f"INVALID: errors in {errors(rounds)} stages", style="bold red", highlight=False)


def _table(rounds: Sequence[Round]) -> Table:
    out = Table(title=f"Milliseconds, medians of {len(rounds)} rounds")
    out.add_column("stage", no_wrap=True)
    for name in (
        "requests/s",
        "p50",
        "p99",
        "p99.9",
        "samples",
        "compute",
        "queue",
        "tokens/window",
        "client CPU",
        "ideal p99",
    ):
        out.add_column(name, justify="right", no_wrap=True)
    first_open = len(stages(rounds[0])) - len(SHARES)
    for no, (name, _) in enumerate(stages(rounds[0])):
        measured = [stages(each)[no][1] for each in rounds]
        latencies = [m.summary.latency for m in measured if m.summary.latency is not None]
        windows = [m.summary.windows for m in measured if m.summary.windows is not None]
        out.add_row(
            name,
            _median([m.summary.requests_per_s for m in measured], 0),
            *(_median([getattr(each, q) for each in latencies], 2) for q in ("p50", "p99", "p999")),
            _median([m.summary.requests for m in measured], 0),
            *(_median([getattr(each, q) for each in windows], 2) for q in ("compute_ms", "queue_ms")),
            _median([each.tokens for each in windows], 1),
            _median([m.cpu_share for m in measured], 2),
            "" if no < first_open else _median([each.ideal[no - first_open].p99 for each in rounds], 2),
        )
    run = Spread.of([each.run_ms for each in rounds])
    out.add_row("one in-process run", "", f"{run.median:.2f}")
    return out


def _median(values: Sequence[float], digits: int) -> str:
    return f"{Spread.of(values).median:.{digits}f}" if values else ""
