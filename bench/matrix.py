"""The whole benchmark: servers up, answers checked, then every case in every round, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.bundles import BLOCK, FFN, ensure
from bench.cases import CASES, SKEWED
from bench.limit import InProcess
from bench.load import Generator
from bench.measure import Bench, Measurement, check_answers
from bench.server import Server
from bench.skewed import Skewed, check_skewed_answers, measure_skewed
from service.manifest import Precision

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; `seconds` is the time under load of one measurement."""

    models: Path
    cases: Sequence[str]
    precisions: Sequence[Precision]
    rounds: int
    seconds: int
    repeats: int
    threads: int
    generator: Generator


@dataclass(slots=True)
class Results:
    """Every round of everything that was measured."""

    answers_checked: int = 0
    rows: list[Measurement] = field(default_factory=list)
    skewed: list[Skewed] = field(default_factory=list)


def run_matrix(plan: Plan, logs: Path, progress: Progress) -> Results:
    """Run `plan`; what the servers print goes to files in the folder `logs`.

    Raises:
        AnswerError: a service's answer differs from the in-process one; nothing has been timed then.
        ExportFailed, BundleError, ServerError, LoadError: no bundle, no server, or no load.
    """
    results = Results()
    cases = [case for case in CASES if case.name in plan.cases]
    if cases:
        _ffn(plan, logs, progress, results)
    if SKEWED in plan.cases:
        _skewed(plan, logs, progress, results)
    return results


def _ffn(plan: Plan, logs: Path, progress: Progress, results: Results) -> None:
    cases = [case for case in CASES if case.name in plan.cases]
    progress(f"bundle {FFN.name}")
    bundle = ensure(FFN, plan.models)
    bench = Bench(plan.generator, plan.seconds, plan.repeats)
    limits = {p: InProcess(bundle.folder, bundle.manifest, p, plan.threads) for p in plan.precisions}
    with ExitStack() as stack:
        servers: dict[bool, Server] = {}
        for windows in {case.windows for case in cases}:
            option = "--windows" if windows else "--no-windows"
            progress(f"server {option}")
            server = Server(plan.models, plan.threads, logs / f"ffn{option}.log", option)
            servers[windows] = stack.enter_context(server)
            for precision, limit in limits.items():
                results.answers_checked += check_answers(server, bundle.model(precision), limit)
        for no in range(plan.rounds):
            for precision, limit in limits.items():
                for case in cases:
                    progress(f"round {no + 1} of {plan.rounds}: {precision}, {case.label}")
                    with ExitStack() as others:
                        for windows, server in servers.items():
                            if windows != case.windows:
                                others.enter_context(server.held())
                        model = bundle.model(precision)
                        row = bench.measure(case, servers[case.windows], model, limit, precision, no)
                    results.rows.append(row)


def _skewed(plan: Plan, logs: Path, progress: Progress, results: Results) -> None:
    progress(f"bundle {BLOCK.name}")
    bundle = ensure(BLOCK, plan.models)
    blocks = {p: InProcess(bundle.folder, bundle.manifest, p, plan.threads) for p in plan.precisions}
    progress("server for the skewed lengths")
    with Server(plan.models, plan.threads, logs / "skewed.log") as server:
        for precision, block in blocks.items():
            results.answers_checked += check_skewed_answers(server, bundle.model(precision), block)
        for no in range(plan.rounds):
            for precision, block in blocks.items():
                progress(f"round {no + 1} of {plan.rounds}: {precision}, skewed lengths")
                results.skewed.append(
                    measure_skewed(
                        server, bundle.model(precision), block, precision, no, plan.seconds, repeats=plan.repeats
                    )
                )
