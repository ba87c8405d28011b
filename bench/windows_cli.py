"""`tokenslab bench windows`: which window budget and waiting a service should have, on the command line."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from bench import load_options as options
from bench.loadtest.document import document
from bench.loadtest.sizes import Sizes
from bench.loadtest.sweep import Level, Load, mean_tokens, measure_limit, window_rows
from bench.loadtest.target import discover
from bench.loadtest.terminal import progress, show
from bench.loadtest.windows import Settings, sweep_windows
from bench.machine import describe_machine
from service.cpu import cpu_quota


def windows(
    model: options.Model,
    url: options.Url = None,
    serve: options.Serve = None,
    budgets: Annotated[str, typer.Option(help="Levels of max_window_tokens; the largest request is added")] = (
        "128,512,2048"
    ),
    waits: Annotated[str, typer.Option(help="Levels of max_wait_ms, beside 0")] = "2",
    connections: Annotated[int, typer.Option(min=1, help="Of the closed loop")] = 32,
    sizes: options.SizesText = "16",
    wire: options.WireOption = "binary",
    header: options.Header = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar=options.ADMIN_KEY, help="Of the service at --url, to change its settings")
    ] = None,
    seconds: options.Seconds = 3,
    warm_up: options.WarmUp = 1,
    rounds: options.Rounds = 3,
    processes: options.Processes = 1,
    timeout_s: options.Timeout = 10,
    bundle: options.BundleFolder = None,
    precision: options.PrecisionOption = "fp32",
    threads: options.Threads = None,
    out: options.Out = None,
    html: options.Html = None,
) -> None:
    """What batching gives, and which window to choose: sweeps a service of ours through its settings, then restores.

    Every setting has a closed loop, for its throughput, and an open loop at 70 % of the maximum, for its latency. The
    smallest budget is that of the largest request: no two such requests share a window.
    """
    console = Console()
    with options.faults(console):
        common = Load(Sizes.parse(sizes), seconds, warm_up, processes=processes, timeout_s=timeout_s)
        tokens = {int(n) for n in options.numbers(budgets, "--budgets")}
        grid = [
            (budget, wait)
            for budget in sorted({common.sizes.largest, *(n for n in tokens if n >= common.sizes.largest)})
            for wait in (0.0, *options.numbers(waits, "--waits"))
        ]
        limit = None
        steps = 1 + rounds * len(grid)
        with options.server_at(url, serve, threads) as (address, own_key), progress(console, steps) as step:
            target = discover(address, model, binary=wire == "binary", headers=options.headers_of(header))
            key = own_key or admin_key
            settings = Settings(address, (("X-API-Key", key),) if key else ())
            if bundle is not None:
                rows = window_rows(common, [Level("closed", connections)])
                limit = measure_limit(bundle, precision, threads or cpu_quota(), rows, mean_tokens(common))
            points = sweep_windows(target, settings, common, connections, grid, rounds, step)
        plan = {
            "model": model,
            "server": address if serve is None else f"of our own, serving {serve}",
            "sizes": sizes,
            "wire": wire,
            "precision": None if bundle is None else precision,
            "connections": connections,
            "seconds": seconds,
            "warm_up": warm_up,
            "rounds": rounds,
            "processes": processes,
        }
        found = document(plan, describe_machine(threads or cpu_quota()), points=points, limit=limit)
        show(console, found)
        options.write(found, out, html, console)
    if any(point[loop]["errors"] for point in found["windows"] for loop in ("closed", "open")):
        raise typer.Exit(1)
