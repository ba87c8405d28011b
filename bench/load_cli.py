"""`tokenslab bench load`: closed, open or replayed load on any server of the protocol, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import load_options as options
from bench.loadtest.arrivals import ArrivalKind
from bench.loadtest.baseline import compare, read_baseline
from bench.loadtest.document import document
from bench.loadtest.sizes import Sizes, read_trace
from bench.loadtest.sweep import Level, Load, mean_tokens, measure_limit, run_levels, window_rows
from bench.loadtest.target import discover
from bench.loadtest.terminal import progress, show, show_changes
from bench.machine import describe_machine
from service.cpu import cpu_quota


def load(
    model: options.Model,
    url: options.Url = None,
    serve: options.Serve = None,
    connections: Annotated[str, typer.Option(help="Closed loop: levels of connections, 1,4,16,64")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: levels of requests/s, 50,100,200")] = "",
    arrivals: Annotated[ArrivalKind, typer.Option(help="Of the open loop")] = "poisson",
    trace: Annotated[Path | None, typer.Option(help="Replay this CSV: columns at_s and tokens")] = None,
    speed: Annotated[str, typer.Option(help="Of the replay: levels, 1,2,4")] = "1",
    sizes: options.SizesText = "16",
    wire: options.WireOption = "binary",
    header: options.Header = None,
    seconds: options.Seconds = 5,
    warm_up: options.WarmUp = 1,
    rounds: options.Rounds = 3,
    max_connections: Annotated[int, typer.Option(min=1, help="Of the open loop and the replay")] = 256,
    processes: options.Processes = 1,
    timeout_s: options.Timeout = 10,
    bundle: options.BundleFolder = None,
    precision: options.PrecisionOption = "fp32",
    threads: options.Threads = None,
    out: options.Out = None,
    html: options.Html = None,
    ci: Annotated[Path | None, typer.Option(help="Compare with this earlier --out; exit 1 on a regression")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Of --ci: throughput may fall by this share")] = 0.1,
    latency_tolerance: Annotated[float, typer.Option(min=0, help="Of --ci: latency may rise by this share")] = 0.5,
) -> None:
    """Sweep connections, rates or a trace's speed; without any, connections 1, 4, 16 and 64.

    An open loop sends when it is meant to, whatever the server does, and counts latency from then.
    """
    console = Console()
    with options.faults(console):
        baseline = None if ci is None else read_baseline(ci)  # before anything takes time
        levels = [Level("closed", int(n)) for n in options.numbers(connections, "--connections")]
        levels += [Level("open", n) for n in options.numbers(rate, "--rate")]
        if trace is not None:
            levels += [Level("replay", n) for n in options.numbers(speed, "--speed")]
        levels = levels or [Level("closed", n) for n in (1, 4, 16, 64)]
        recorded = None if trace is None else read_trace(trace)
        common = Load(
            Sizes.parse(sizes), seconds, warm_up, arrivals, recorded, max_connections, processes, timeout_s
        )  # fmt: skip
        limit = None
        with options.server_at(url, serve, threads) as (address, _), progress(console, rounds * len(levels)) as step:
            target = discover(address, model, binary=wire == "binary", headers=options.headers_of(header))
            if bundle is not None:
                rows = window_rows(common, levels)
                limit = measure_limit(bundle, precision, threads or cpu_quota(), rows, mean_tokens(common))
            measured = run_levels(target, common, levels, rounds, step)
        plan: dict[str, Any] = {
            "model": model,
            "server": address if serve is None else f"of our own, serving {serve}",
            "sizes": sizes,
            "arrivals": arrivals,
            "trace": None if trace is None else trace.name,
            "wire": wire,
            "precision": None if bundle is None else precision,
            "seconds": seconds,
            "warm_up": warm_up,
            "rounds": rounds,
            "processes": processes,
        }
        found = document(plan, describe_machine(threads or cpu_quota()), measured, limit=limit)
        show(console, found)
        options.write(found, out, html, console)
        changes = [] if baseline is None else compare(baseline, found, tolerance, latency_tolerance)
    if changes:
        show_changes(console, changes)
    regressed = [change for change in changes if change.regressed]
    for change in regressed:
        typer.echo(f"tokenslab bench load: regressed: {change}", err=True)
    if options.failed(found) or regressed:
        raise typer.Exit(1)
