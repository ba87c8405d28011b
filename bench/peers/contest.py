"""Ours and the peers in turn, round after round: shares of the in-process limit, with everyone else held still."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from bench.bodies import random_tokens
from bench.bundles import FFN, Bundle, ensure
from bench.cases import CASES, Case
from bench.limit import InProcess
from bench.load import Generator
from bench.machine import UsageMeter
from bench.matrix import Progress
from bench.measure import CALM_FOREIGN, CALM_LIMITS, CALM_STOLEN, WARM_UP_S, check_answers, tokens_of
from bench.peers.peer import OIP, ONE_OR_TWO, Peer, PeerError, Wire
from bench.process import Process
from bench.server import Server
from bench.timing import Load, share_of_limit
from service.manifest import Precision

OURS: Final = "tokenslab"
CHECKED: Final = (1, 3, 16, 128)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how often; `environments` holds the peers' own."""

    models: Path
    environments: Path
    peers: Sequence[Peer]
    cases: Sequence[str]
    precisions: Sequence[Precision]
    rounds: int
    seconds: int
    repeats: int
    threads: int
    generator: Generator
    limit_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One server in one round of one case; rates in tokens/s."""

    server: str
    setting: str
    case: str
    precision: str
    round: int
    tokens_per_s: float
    limit: float
    share: float
    load: Load
    cpu_us_per_request: float
    foreign: float
    stolen: float
    disturbed: bool


@dataclass(slots=True)
class _Contestant:
    name: str
    setting: str
    process: Process
    path: str
    wire: Wire

    def __str__(self) -> str:
        return f"{self.name} {self.setting}".strip()


@dataclass(slots=True)
class Contest:
    """One run of a plan; `entries` grow as it goes."""

    plan: Plan
    logs: Path
    progress: Progress
    entries: list[Entry] = field(default_factory=list)

    def run(self) -> list[Entry]:
        """Every contestant in every case of every round.

        Raises:
            AnswerError, PeerError: somebody answers wrongly; nothing of that precision has been timed then.
            ExportFailed, BundleError, ServerError, LoadError: no bundle, no server, or no load.
        """
        bundle = ensure(FFN, self.plan.models)
        for precision in self.plan.precisions:
            limit = InProcess(bundle.folder, bundle.manifest, precision, self.plan.threads)
            with ExitStack() as stack:
                contestants = self._start(bundle, precision, limit, stack)
                for no in range(self.plan.rounds):
                    for case in (case for case in CASES if case.name in self.plan.cases):
                        for one in contestants:
                            self.progress(f"round {no + 1} of {self.plan.rounds}: {precision}, {case.label}, {one}")
                            with _held(other.process for other in contestants if other is not one):
                                self.entries.append(self._measure(one, case, precision, limit, no))
        return self.entries

    def _start(self, bundle: Bundle, precision: Precision, limit: InProcess, stack: ExitStack) -> list[_Contestant]:
        plan = self.plan
        contestants, model = [], bundle.model(precision)
        for setting in ONE_OR_TWO:
            label = setting.label(plan.threads)
            self.progress(f"{precision}: {OURS} {label}")
            log = self.logs / f"{OURS}-{precision}-{setting.workers}.log"
            ours = stack.enter_context(Server(plan.models, plan.threads, log, replicas=setting.workers))
            check_answers(ours, model, limit)
            path = ours.infer_url(model).removeprefix(ours.url)
            contestants.append(_Contestant(OURS, label, ours, path, OIP))
        variant = next(v for v in bundle.manifest.variants if (v.provider, v.precision) == ("cpu", precision))
        for peer in plan.peers:
            for setting in peer.settings:
                label = setting.label(plan.threads)
                self.progress(f"{precision}: {peer.name} {label}")
                log = self.logs / f"{peer.name}-{precision}-{setting.workers}.log"
                file = bundle.folder / variant.file
                process = peer.server(plan.environments, setting, file, limit.d_in, plan.threads, log)
                stack.enter_context(process)
                one = _Contestant(peer.name, label, process, peer.path, peer.wire)
                _check(one, limit)
                contestants.append(one)
        return contestants

    def _measure(self, one: _Contestant, case: Case, precision: str, limit: InProcess, no: int) -> Entry:
        tries = [self._once(one, case, precision, limit, no)]
        while tries[-1].disturbed and len(tries) <= self.plan.repeats:
            tries.append(self._once(one, case, precision, limit, no))
        return min(tries, key=lambda entry: (entry.disturbed, entry.foreign + entry.stolen))

    def _once(self, one: _Contestant, case: Case, precision: str, limit: InProcess, no: int) -> Entry:
        plan, url = self.plan, one.process.url + one.path
        bodies = [one.wire.encode(tokens) for tokens in tokens_of(case, limit.d_in, seed=no)]
        plan.generator.run(url, bodies, case.connections, WARM_UP_S, seed=1000 + no)
        before = self._limit(one, case, limit)
        meter, cpu_s = UsageMeter(one.process.cpu_s), one.process.cpu_s()
        load = plan.generator.run(url, bodies, case.connections, plan.seconds, seed=no)
        usage, cpu_s = meter.read(), one.process.cpu_s() - cpu_s
        after = self._limit(one, case, limit)
        moved = min(before, after) < CALM_LIMITS * max(before, after)
        return Entry(
            server=one.name,
            setting=one.setting,
            case=case.name,
            precision=precision,
            round=no,
            tokens_per_s=load.tokens_per_s,
            limit=(before + after) / 2,
            share=share_of_limit(load.tokens_per_s, before, after),
            load=load,
            cpu_us_per_request=cpu_s / max(1, load.requests) * 1e6,
            foreign=usage.foreign,
            stolen=usage.stolen,
            disturbed=usage.foreign > CALM_FOREIGN or usage.stolen > CALM_STOLEN or moved,
        )

    def _limit(self, one: _Contestant, case: Case, limit: InProcess) -> float:
        with one.process.held():
            return limit.tokens_per_s(case.window_rows, self.plan.limit_s)


@contextmanager
def _held(processes: Iterator[Process]) -> Iterator[None]:
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process.held())
        yield


def _check(one: _Contestant, limit: InProcess) -> None:
    """Raise PeerError unless a peer's answers are what the file gives, but for the last bits."""
    for rows in CHECKED:
        tokens = random_tokens(rows, limit.d_in, seed=rows)
        body, wanted = one.wire.encode(tokens), limit.run(tokens)
        link = http.client.HTTPConnection("127.0.0.1", one.process.port, timeout=30)
        try:
            link.request("POST", one.path, body.content, body.headers)
            answer = link.getresponse()
            headers, content = {name.title(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            link.close()
        if answer.status != 200:
            raise PeerError(f"{one.name}: {answer.status} for {rows} tokens: {content[:200]!r}")
        try:
            found = one.wire.read(headers, content).reshape(wanted.shape)
        except ValueError as error:
            raise PeerError(
                f"{one.name}: {len(content)} bytes for {rows} tokens that cannot be read: {error}"
            ) from error
        if not np.allclose(found, wanted, rtol=1e-3, atol=1e-3):
            raise PeerError(f"{one.name}: the answer to {rows} tokens is not what the file gives")
