"""`tokenslab bench peers`: the contest on the command line."""

from __future__ import annotations

import json
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from bench.bundles import ExportFailed
from bench.client import AnswerError
from bench.load import LoadError, choose_generator
from bench.machine import describe_machine
from bench.peers.contest import Contest, Entry, Plan
from bench.peers.peer import PEER_NAMES, PEERS, PeerError
from bench.peers.verdict import GOALS, Line, lines, table
from bench.process import ServerError
from service.cpu import cpu_quota
from service.errors import TokenslabError
from service.manifest import Precision

INSTALL = (
    f"Install these first, from PyPI: of {', '.join(PEER_NAMES)} "
    "(pytriton needs the distribution's own Python 3.11 as /usr/bin/python3)"
)
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def peers(
    models: Annotated[Path, typer.Option(help="Where the measured bundle is, or is exported to")] = Path(
        "build/bench-models"
    ),
    environments: Annotated[Path, typer.Option(help="Where each peer has an environment of its own")] = Path(
        "build/peers"
    ),
    install: Annotated[str, typer.Option(help=INSTALL)] = "",
    only: Annotated[str, typer.Option(help="Of the installed peers, only these")] = "",
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(GOALS)}")] = ",".join(GOALS),
    precisions: Annotated[str, typer.Option(help=f"Of {', '.join(PRECISIONS)}")] = ",".join(PRECISIONS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all servers and cases")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds under load per measurement")] = 5,
    repeats: Annotated[int, typer.Option(min=0, help="How often a disturbed measurement is repeated")] = 2,
    load: Annotated[str, typer.Option(help="auto (wrk if it is installed), wrk, or own")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write every round here, as JSON")] = None,
    check: Annotated[bool, typer.Option(help="Exit 1 if a median misses its goal, or an error invalidates it")] = False,
) -> None:
    """The service against mosec and the other installed peers: same graph, cases, load and machine, in turn.

    Each one's tokens/s over the in-process limit at the window that a perfect server would form, everyone else held.
    """
    console = Console()
    signal.signal(signal.SIGTERM, _exit)  # so that the servers are stopped on the way out
    try:
        for peer in PEERS:
            if peer.name in _listed(install, PEER_NAMES, "--install"):
                console.print(f"installing {peer.name}", highlight=False)
                peer.install(environments)
        wanted = _listed(only, PEER_NAMES, "--only") or PEER_NAMES
        plan = Plan(
            models=models,
            environments=environments,
            peers=[peer for peer in PEERS if peer.name in wanted and peer.installed(environments)],
            cases=_listed(cases, tuple(GOALS), "--cases"),
            precisions=[name for name in PRECISIONS if name in _listed(precisions, PRECISIONS, "--precisions")],
            rounds=rounds,
            seconds=seconds,
            repeats=repeats,
            threads=cpu_quota(),
            generator=choose_generator(load),
        )
        with tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as logs:
            entries = Contest(plan, Path(logs), lambda text: console.print(text, highlight=False)).run()
    except (ExportFailed, ServerError, AnswerError, LoadError, PeerError, TokenslabError) as error:
        typer.echo(f"tokenslab bench: {error}", err=True)
        raise typer.Exit(1) from None
    verdicts = lines(entries)
    _show(console, verdicts, entries, plan, out)
    if check and not all(line.passes for line in verdicts):
        raise typer.Exit(1)


def _show(console: Console, verdicts: list[Line], entries: list[Entry], plan: Plan, out: Path | None) -> None:
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a log file has no width; a folded table cannot be read
    console.print(table(verdicts))
    if out is not None:
        document = {
            "schema_version": 1,
            "machine": describe_machine(plan.threads),
            "load": plan.generator.name,
            "figures": [{**asdict(line), "goal": asdict(line.goal), "passes": line.passes} for line in verdicts],
            "rounds": [asdict(entry) for entry in entries],
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"every round: {out}", highlight=False)


def _listed(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: expected some of {', '.join(known)}", param_hint=option)
    return names


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
