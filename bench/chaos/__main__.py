"""The command line: prints what came of every kind of client, and exits 1 unless nothing was wrong, lost or a 500."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.chaos.storm import storm
from bench.chaos.tally import Tally


def main(arguments: list[str] | None = None) -> int:
    """Run, report, and return the exit code."""
    parser = argparse.ArgumentParser("python -m bench.chaos", description="Clients of every kind against a real server")
    parser.add_argument("--models", type=Path, default=Path("models"), help="repository with the bundles to serve")
    parser.add_argument("--seconds", type=float, default=60.0, help="from the first client to SIGTERM")
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--asks", type=int, default=100, help="requests to choose from, for each model and precision")
    parser.add_argument("--seed", type=int, default=None, help="of requests and clients [default: a new one each time]")
    given = parser.parse_args(arguments)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    console = Console(width=160)
    console.print(f"{given.clients} clients for {given.seconds:g} s, seed {seed}", highlight=False)
    with tempfile.TemporaryDirectory(prefix="tokenslab-chaos-") as folder:
        tally = storm(given.models, Path(folder), given.seconds, given.clients, given.asks, seed)
    _report(console, tally)
    return 0 if tally.clean else 1


def _report(console: Console, tally: Tally) -> None:
    table = Table("kind", "requests", "what came of them")
    for kind, count, outcomes in tally.rows():
        table.add_row(kind, str(count), outcomes)
    console.print(table, highlight=False)
    for fault in [*tally.wrong, *tally.lost, *tally.fives][:50]:
        console.print(fault, markup=False, highlight=False)
    console.print(tally.verdict, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
