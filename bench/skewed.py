"""Skewed lengths: many short sequences and a long one, packed by the service against padded to the longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.bodies import infer_body, random_tokens
from bench.cases import SKEWED_LONGEST, skewed_lengths
from bench.client import AnswerError, post_all, waves
from bench.limit import InProcess
from bench.machine import UsageMeter
from bench.measure import CALM_FOREIGN, CALM_STOLEN, TIMEOUT_S
from bench.server import Server
from bench.timing import Load


@dataclass(frozen=True, slots=True)
class Skewed:
    """One round. Both rates are *useful* tokens/s: padding counts for nothing."""

    precision: str
    round: int
    tries: int
    useful_tokens: int
    padded_tokens: int
    packed_tokens_per_s: float
    padded_tokens_per_s: float
    ratio: float
    load: Load
    foreign: float
    stolen: float
    disturbed: bool

    @property
    def valid(self) -> bool:
        """Whether every request was answered with a result."""
        return not self.load.errors and self.load.requests > 0


def measure_skewed(
    server: Server, model: str, block: InProcess, precision: str, no: int, seconds: float, repeats: int
) -> Skewed:
    """Useful tokens/s of the service, each sequence a request of its own and all of them at once, over the same
    block in this process on the whole batch padded to the longest; of several tries the least disturbed one counts.
    """
    tries = [_once(server, model, block, precision, no, seconds, 1)]
    while tries[-1].disturbed and len(tries) <= repeats:
        tries.append(_once(server, model, block, precision, no, seconds, len(tries) + 1))
    return min(tries, key=lambda t: (t.disturbed, t.foreign + t.stolen))


def _once(server: Server, model: str, block: InProcess, precision: str, no: int, seconds: float, tries: int) -> Skewed:
    lengths = skewed_lengths(seed=no)
    useful, sequences = int(lengths.sum()), len(lengths)
    bodies = [
        infer_body(random_tokens(int(rows), block.d_in, seed=no * sequences + i), np.array([rows], np.int64))
        for i, rows in enumerate(lengths)
    ]
    meter = UsageMeter(server.cpu_s)
    load = waves(server.infer_url(model), bodies, seconds, TIMEOUT_S)
    packed = load.requests_per_s / sequences * useful
    with server.held():
        padded = random_tokens(sequences * SKEWED_LONGEST, block.d_in, seed=no)
        equal = np.full(sequences, SKEWED_LONGEST, np.int64)
        # One run takes seconds, and the shape's memory is in place after the first.
        padded_tokens_per_s = block.runs_per_s(padded, equal, seconds, warm_runs=1 if no == 0 else 0) * useful
    usage = meter.read()
    return Skewed(
        precision=precision,
        round=no,
        tries=tries,
        useful_tokens=useful,
        padded_tokens=len(padded),
        packed_tokens_per_s=packed,
        padded_tokens_per_s=padded_tokens_per_s,
        ratio=packed / padded_tokens_per_s,
        load=load,
        foreign=usage.foreign,
        stolen=usage.stolen,
        disturbed=usage.foreign > CALM_FOREIGN or usage.stolen > CALM_STOLEN,
    )


def check_skewed_answers(server: Server, model: str, block: InProcess) -> int:
    """Each sequence of the skewed case, sent beside all others, against the same sequence alone in this process.

    Returns how many were compared.

    Raises:
        AnswerError: one differs in a bit.
    """
    lengths = skewed_lengths(seed=0)
    sequences = [random_tokens(int(rows), block.d_in, seed=i) for i, rows in enumerate(lengths)]
    bodies = [infer_body(tokens, np.array([len(tokens)], np.int64)) for tokens in sequences]
    answers = post_all(server.infer_url(model), bodies, len(bodies), TIMEOUT_S)
    for tokens, answer in zip(sequences, answers, strict=True):
        if answer.tobytes() != block.run(tokens).tobytes():
            raise AnswerError(f"{model}: the answer to a sequence of {len(tokens)} is not what the file gives alone")
    return len(answers)
