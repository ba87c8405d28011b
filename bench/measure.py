"""One measurement of one case: the in-process limit, the service under load, the limit again, and who disturbed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.bodies import Body, Float32, infer_body, random_tokens
from bench.cases import Case
from bench.client import AnswerError, post_all
from bench.limit import InProcess
from bench.load import Generator
from bench.machine import Usage, UsageMeter
from bench.server import Server
from bench.timing import Load, share_of_limit

BODIES: Final = 8  # of each case, so that no answer is the last one again
WARM_UP_S: Final = 1
TIMEOUT_S: Final = 60.0

# Beyond these, in cores, somebody else's work is in the figure; and the limit itself must not move meanwhile.
CALM_FOREIGN: Final = 0.12
CALM_STOLEN: Final = 0.10
CALM_LIMITS: Final = 0.80

CHECKED_LENGTHS: Final = (1, 2, 3, 7, 16, 33, 64, 128)
CHECKED_COPIES: Final = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of one round. Rates are tokens/s, usage cores; `ratio` is the service over the limit."""

    case: str
    precision: str
    round: int
    tries: int
    tokens_per_s: float
    limit_before: float
    limit_after: float
    ratio: float
    window_tokens: float  # mean, as the service counted them
    load: Load
    usage: Usage
    foreign: float  # the largest of the three phases
    stolen: float
    disturbed: bool

    @property
    def valid(self) -> bool:
        """Whether every request was answered with a result."""
        return not self.load.errors and self.load.requests > 0


@dataclass(frozen=True, slots=True)
class Bench:
    """What one measurement needs: the load generator, the seconds under load and of each in-process limit, and how
    often a disturbed measurement is repeated."""

    generator: Generator
    seconds: int
    repeats: int
    limit_s: float = 1.0

    def measure(self, case: Case, server: Server, model: str, limit: InProcess, precision: str, no: int) -> Measurement:
        """Measure `case` against `model`; of several tries the least disturbed one counts."""
        tries = [self._once(case, server, model, limit, precision, no, 1)]
        while tries[-1].disturbed and len(tries) <= self.repeats:
            tries.append(self._once(case, server, model, limit, precision, no, len(tries) + 1))
        if not tries[-1].disturbed:
            return tries[-1]
        return min(tries, key=lambda t: t.foreign + t.stolen)

    def _once(
        self, case: Case, server: Server, model: str, limit: InProcess, precision: str, no: int, tries: int
    ) -> Measurement:
        url = server.infer_url(model)
        bodies = bodies_of(case, limit.d_in, seed=no)
        self.generator.run(url, bodies, case.connections, WARM_UP_S, seed=1000 + no)
        before, usage_before = self._limit(server, limit, case)
        counts, meter = server.counts(), UsageMeter(server.cpu_s)
        load = self.generator.run(url, bodies, case.connections, self.seconds, seed=no)
        usage, counted = meter.read(), server.counts()
        after, usage_after = self._limit(server, limit, case)
        tokens_per_s = load.tokens_per_s
        windows = counted["tokenslab_windows_total"] - counts["tokenslab_windows_total"]
        tokens = counted["tokenslab_tokens_total"] - counts["tokenslab_tokens_total"]
        phases = (usage_before, usage, usage_after)
        foreign, stolen = max(u.foreign for u in phases), max(u.stolen for u in phases)
        moved = min(before, after) < CALM_LIMITS * max(before, after)
        return Measurement(
            case=case.name,
            precision=precision,
            round=no,
            tries=tries,
            tokens_per_s=tokens_per_s,
            limit_before=before,
            limit_after=after,
            ratio=share_of_limit(tokens_per_s, before, after),
            window_tokens=tokens / windows if windows else 0.0,
            load=load,
            usage=usage,
            foreign=foreign,
            stolen=stolen,
            disturbed=foreign > CALM_FOREIGN or stolen > CALM_STOLEN or moved,
        )

    def _limit(self, server: Server, limit: InProcess, case: Case) -> tuple[float, Usage]:
        with server.held():
            meter = UsageMeter(server.cpu_s)
            tokens_per_s = limit.tokens_per_s(case.window_rows, self.limit_s)
            return tokens_per_s, meter.read()


def bodies_of(case: Case, d: int, seed: int) -> list[Body]:
    """The requests of `case`: `BODIES` different ones of each length."""
    return [infer_body(x) for x in tokens_of(case, d, seed)]


def tokens_of(case: Case, d: int, seed: int) -> list[Float32]:
    """The tokens of the requests of `case`, each (length, d)."""
    lengths = [rows for rows in case.mixed for _ in range(BODIES)]
    return [random_tokens(rows, d, seed * len(lengths) + i) for i, rows in enumerate(lengths)]


def check_answers(server: Server, model: str, limit: InProcess, seed: int = 0) -> int:
    """Send requests of many lengths at once and compare each answer, bit for bit, with the request run alone here.

    Returns how many were compared.

    Raises:
        AnswerError: one differs.
    """
    lengths = CHECKED_LENGTHS * CHECKED_COPIES
    requests = [random_tokens(rows, limit.d_in, seed * len(lengths) + i) for i, rows in enumerate(lengths)]
    answers = post_all(server.infer_url(model), [infer_body(x) for x in requests], len(requests), TIMEOUT_S)
    for tokens, answer in zip(requests, answers, strict=True):
        wanted = limit.run(tokens)
        if answer.shape != wanted.shape or answer.tobytes() != wanted.tobytes():
            raise AnswerError(f"{model}: the answer to {len(tokens)} tokens is not what the file gives in-process")
    return len(answers)
