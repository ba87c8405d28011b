"""`python -m bench.bandwidth`: when bandwidth and not compute is the limit, on this machine.

Three figures, all of one core's processor time, so that who else uses the machine hardly shows: what the arithmetic of
a token costs in-process, what carrying it through the service costs (a model as wide that computes next to nothing),
and both together through the service, which the sum of the first two must predict.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from bench.bodies import infer_body, random_tokens
from bench.break_even import GATED, LINKS_GBIT_S, Costs, break_even_d_ff, ffn_flops
from bench.bundles import FFN, THIN, Bundle, ExportFailed, ensure
from bench.limit import InProcess
from bench.load import Generator, LoadError, choose_generator
from bench.machine import cpu_model
from bench.process import ServerError
from bench.server import Server
from service.errors import TokenslabError

ROWS: Final = 128  # of a request, and so of most windows
CONNECTIONS: Final = 4
BODIES: Final = 4
WARM_UP_S: Final = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured: microseconds of one core for a token."""

    cpu: str
    d: int
    d_ff: int
    costs: Costs
    both_us: float  # through the service, model and all

    @property
    def as_predicted(self) -> float:
        """What both together cost over the sum of the parts; 1: nothing is hidden."""
        return self.both_us / (self.costs.carry_us + self.costs.compute_us)

    @property
    def gflop_s(self) -> float:
        return self.costs.gflop_s(ffn_flops(self.d, self.d_ff))


def measure(models: Path, generator: Generator, rounds: int, seconds: int) -> Figures:
    """Measure all three in turn, `rounds` times; the least of each counts.

    Raises:
        ExportFailed, ServerError, LoadError: nothing was measured.
    """
    ffn, thin = ensure(FFN, models), ensure(THIN, models)
    hidden = int(ffn.manifest.architecture["d_ff"])
    alone: list[float] = []
    carried: list[float] = []
    both: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="tokenslab-bench-") as logs,
        Server(models, 1, Path(logs) / "log") as server,
    ):
        model = InProcess(ffn.folder, ffn.manifest, "fp32", threads=1)
        for no in range(rounds):
            alone.append(_compute_us(model, seconds))
            carried.append(_served_us(server, thin, generator, seconds, no))
            both.append(_served_us(server, ffn, generator, seconds, no))
    return Figures(cpu_model(), ffn.manifest.d_in, hidden, Costs(min(carried), min(alone)), min(both))


def table(figures: Figures) -> str:
    """The figures and the break-even widths, as Markdown."""
    costs, d = figures.costs, figures.d
    lines = [
        f"{figures.cpu}, one core: {figures.gflop_s:.1f} GFLOP/s in float32 (d {d}, d_ff {figures.d_ff}, {ROWS} rows)",
        f"carrying a token: {costs.carry_us:.2f} us, {costs.carried_gbit_s(d, d):.2f} Gbit/s; "
        f"computing on it: {costs.compute_us:.2f} us",
        f"both through the service: {figures.both_us:.2f} us, {figures.as_predicted:.2f} of the sum",
        "",
        "| wire | break-even d_ff, one core | gated | 16 cores | 16 cores, gated |",
        "| --- | --- | --- | --- | --- |",
    ]
    wires = [(f"{gbit_s:g} Gbit/s", gbit_s) for gbit_s in LINKS_GBIT_S]
    for name, gbit_s in wires:
        cells = [
            f"{break_even_d_ff(cores * figures.gflop_s, gbit_s, matrices):,.0f}"
            for cores in (1, 16)
            for matrices in (2, GATED)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    own = break_even_d_ff(figures.gflop_s, costs.carried_gbit_s(d, d))
    lines.append(f"\nwithin the service, carrying costs a core as much as computing at d_ff {own:,.0f}")
    return "\n".join(lines)


def main(
    models: Annotated[Path, typer.Option(help="Where the measured bundles are, or are exported to")] = Path(
        "build/bench-models"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the least of each figure counts")] = 5,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds of each measurement")] = 2,
    load: Annotated[str, typer.Option(help="auto (wrk if it is installed), wrk, or own")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON")] = None,
) -> None:
    """Bytes of a token over the wire against its FLOPs, on this machine."""
    try:
        figures = measure(models, choose_generator(load), rounds, seconds)
    except (ExportFailed, ServerError, LoadError, TokenslabError) as error:
        typer.echo(f"bench.bandwidth: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(table(figures))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(asdict(figures), indent=1) + "\n")


def _compute_us(model: InProcess, seconds: float) -> float:
    """This thread's own processor time: with one thread ONNX Runtime computes in the caller's."""
    tokens = random_tokens(ROWS, model.d_in, seed=0)
    model.run(tokens)
    runs, began, ends = 0, time.thread_time(), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        model.run(tokens)
        runs += 1
    return (time.thread_time() - began) / (runs * ROWS) * 1e6


def _served_us(server: Server, bundle: Bundle, generator: Generator, seconds: int, seed: int) -> float:
    bodies = [infer_body(random_tokens(ROWS, bundle.manifest.d_in, seed=i)) for i in range(BODIES)]
    url = server.infer_url(bundle.model("fp32"))
    generator.run(url, bodies, CONNECTIONS, WARM_UP_S, seed=1000 + seed)
    before = server.cpu_s()
    found = generator.run(url, bodies, CONNECTIONS, seconds, seed=seed)
    if found.errors or not found.requests:
        raise LoadError(f"{bundle.manifest.name}: {found.requests} requests, errors {found.errors}")
    return (server.cpu_s() - before) / (found.requests * ROWS) * 1e6


if __name__ == "__main__":
    typer.run(main)
