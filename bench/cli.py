"""`tokenslab bench`: the command line of the benchmark."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, get_args

import typer
from rich.console import Console

from bench.bundles import ExportFailed
from bench.cases import CASE_NAMES
from bench.client import AnswerError
from bench.latency_cli import latency
from bench.load import LoadError, choose_generator
from bench.load_cli import load
from bench.machine import describe_machine
from bench.matrix import Plan, Results, run_matrix
from bench.peers_cli import peers
from bench.process import ServerError
from bench.report import as_json, figures, table
from bench.windows_cli import windows
from bench.wire_cli import wire
from service.cpu import cpu_quota
from service.errors import TokenslabError
from service.manifest import Precision

PRECISIONS: Final[tuple[Precision, ...]] = tuple(name for name in get_args(Precision) if name not in ("fp16", "bf16"))


def register(app: typer.Typer) -> None:
    """Add the commands to the console script."""
    bench = typer.Typer(help="Measure the service against the same graph in-process.", no_args_is_help=True)
    bench.callback()(_group)
    bench.command(epilog="Example: tokenslab bench run --cases 16x32,skewed --rounds 3 --out results.json")(run)
    bench.command()(wire)
    bench.command()(latency)
    bench.command(epilog="Example: tokenslab bench load demo-ffn --serve models --rate 100,200 --html load.html")(load)
    bench.command(epilog="Example: tokenslab bench windows demo-ffn --serve models --html windows.html")(windows)
    bench.command()(peers)
    app.add_typer(bench, name="bench")


def _group() -> None:
    """Measure the service against the same graph in-process."""


def run(
    models: Annotated[
        Path, typer.Option(help="Where the measured bundles are, or are exported to (needs the export extra)")
    ] = Path("build/bench-models"),
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(CASE_NAMES)}: <tokens>x<connections>")] = ",".join(
        CASE_NAMES
    ),
    precisions: Annotated[str, typer.Option(help=f"Of {', '.join(PRECISIONS)}")] = ",".join(PRECISIONS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all cases")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds under load per measurement")] = 3,
    repeats: Annotated[int, typer.Option(min=0, help="How often a disturbed measurement is repeated")] = 2,
    threads: Annotated[int | None, typer.Option(min=1, help="ONNX Runtime threads [default: the CPU quota]")] = None,
    load: Annotated[str, typer.Option(help="auto (wrk if it is installed), wrk, or own")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write every round here, as JSON")] = None,
    check: Annotated[bool, typer.Option(help="Exit 1 if a median misses its bar, or an error invalidates it")] = False,
) -> None:
    """Tokens/s of the service over tokens/s of the same ONNX file in-process, both within one run.

    The in-process limit is taken at the window size of each case, before and after each measurement, with the server
    held still. Answers are compared bit for bit before anything is timed.
    """
    console = Console()
    signal.signal(signal.SIGTERM, _exit)  # so that the servers are stopped on the way out
    try:
        plan = Plan(
            models=models,
            cases=_listed(cases, CASE_NAMES, "--cases"),
            precisions=_precisions(precisions),
            rounds=rounds,
            seconds=seconds,
            repeats=repeats,
            threads=threads or cpu_quota(),
            generator=choose_generator(load),
        )
        results = _measure(plan, console)
    except (ExportFailed, ServerError, AnswerError, LoadError, TokenslabError) as error:
        typer.echo(f"tokenslab bench: {error}", err=True)
        raise typer.Exit(1) from None
    _show(plan, results, console, out)
    missed = [line for line in figures(results) if not line.passes]
    if check and missed:
        raise typer.Exit(1)


def _measure(plan: Plan, console: Console) -> Results:
    with (
        tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as logs,
        console.status("starting") as status,
    ):

        def progress(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False)

        return run_matrix(plan, Path(logs), progress)


def _show(plan: Plan, results: Results, console: Console, out: Path | None) -> None:
    machine = describe_machine(plan.threads)
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {plan.threads} threads; onnxruntime {machine['onnxruntime']}; "
        f"{results.answers_checked} answers compared bit for bit: equal",
        highlight=False,
    )
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a log file has no width; a folded table cannot be read
    console.print(table(figures(results), plan))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(as_json(results, plan, machine), indent=1) + "\n")
        console.print(f"every round: {out}", highlight=False)


def _listed(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: expected some of {', '.join(known)}", param_hint=option)
    return names


def _precisions(text: str) -> tuple[Precision, ...]:
    names = _listed(text, PRECISIONS, "--precisions")
    return tuple(precision for precision in PRECISIONS if precision in names)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
