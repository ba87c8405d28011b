"""`tokenslab bench wire`: the cost of the wire, on the command line."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench.bundles import ExportFailed
from bench.load import LoadError, choose_generator
from bench.process import ServerError
from bench.wire import RATE_BAR, WireCost, measure_wire
from service.errors import TokenslabError


def wire(
    models: Annotated[Path, typer.Option(help="Where the measured bundle is, or is exported to")] = Path(
        "build/bench-models"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over both servers")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds under load per measurement")] = 3,
    load: Annotated[str, typer.Option(help="auto (wrk if it is installed), wrk, or own")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write every round here, as JSON")] = None,
    check: Annotated[bool, typer.Option(help=f"Exit 1 if the rate is below {RATE_BAR} of the echo's")] = False,
) -> None:
    """Requests/s and CPU time of a request of one token, against bare uvicorn echoing the same body, in one run."""
    try:
        with tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as logs:
            cost = measure_wire(models, choose_generator(load), rounds, seconds, Path(logs), typer.echo)
    except (ExportFailed, ServerError, LoadError, TokenslabError) as error:
        typer.echo(f"tokenslab bench: {error}", err=True)
        raise typer.Exit(1) from None
    _show(cost)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"samples": [asdict(sample) for sample in cost.samples]}, indent=1) + "\n")
    if check and (cost.errors or cost.rate_ratio.median < RATE_BAR):
        raise typer.Exit(1)


def _show(cost: WireCost) -> None:
    for server in ("tokenslab", "echo"):
        rate, cpu = cost.rate(server), cost.cpu_us(server)
        typer.echo(f"{server:<10}{rate.median:8.0f} requests/s{cpu.median:8.1f} us of CPU a request")
    ratio = cost.rate_ratio
    verdict = "ok" if ratio.median >= RATE_BAR else "MISSED"
    typer.echo(f"rate: {ratio.median:.3f} ({ratio.low:.3f}..{ratio.high:.3f}) of the echo's, >= {RATE_BAR} {verdict}")
    if cost.errors:
        typer.echo(f"INVALID: errors in {cost.errors} of {len(cost.samples)} measurements")
