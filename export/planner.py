"""`--precision auto`: the fastest precision within a bound, by measurement on this machine. It makes no variant itself.

Known losers are not measured: their reasons are in the table, beside what the measured candidates came to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from export.certify import machine
from export.errors import ExportError
from export.lowering.registry import Provider
from export.precisions import RECIPES, UNSUITED
from service.manifest import Candidate, Plan, Precision, Speed, Variant

SECONDS_A_WINDOW: Final = 2.0  # of one thread's CPU time, for all candidates and their floors

_LOSERS: Final[Mapping[Provider, Mapping[str, str]]] = {
    "cpu": {
        **UNSUITED["cpu"],
        "int8, saturating": "uint8 x int8 with 8-bit weights adds pairs in 16 bits without VNNI: SQNR of about 14 dB",
        "int8, one scale for all rows": "quantize_dynamic: an answer depends on its neighbours",
    },
    "cuda": UNSUITED["cuda"],
}


@dataclass(frozen=True)
class Request:
    """What a plan is for.

    target: the provider.
    tokens: sizes of the windows that count, each as much as the others.
    max_drift: the largest change of an output by its neighbours; 0: none.
    """

    target: Provider = "cpu"
    tokens: Sequence[int] = (1, 64, 1024)
    max_drift: float = 0.0

    def check(self) -> None:
        """Raise ExportError for what can be refused before any work."""
        if self.target == "cuda":
            raise ExportError(
                "--target cuda: plans are measured by CPU time; name precisions for --provider cuda instead"
            )
        if not self.tokens or min(self.tokens) < 1:
            raise ExportError(f"--tokens {','.join(map(str, self.tokens))}: expected window sizes of at least 1")
        if not 0 <= self.max_drift < math.inf:
            raise ExportError(f"--max-drift {self.max_drift}: expected a finite number, at least 0")


def candidates(request: Request, *, calibrated: bool) -> tuple[list[Precision], dict[str, str]]:
    """The precisions to measure, and those that are not, each with its reason; `calibrated`: with tokens for it."""
    refused = dict(_LOSERS[request.target])
    chosen: list[Precision] = []
    for precision, recipe in RECIPES.items():
        if request.target not in recipe.providers or precision in refused:
            continue
        if recipe.calibration == "own" and not calibrated:
            refused[precision] = "needs --calibrate, for its ranges are fixed"
            continue
        chosen.append(precision)
    return chosen, refused


def choose(
    request: Request,
    variants: Sequence[Variant],
    speeds: Mapping[Precision, Sequence[Speed]],
    refused: Mapping[str, str],
    min_sqnr: float | None,
) -> Plan:
    """The plan: of the variants within the bounds the one with the least time, as the geometric mean over all windows.

    Args:
        request: what the plan is for.
        variants: measured against torch and certified; fp32 is among them.
        speeds: of each, at the windows of the request.
        refused: what was not made -> why.
        min_sqnr: in dB; None: each precision's own bar, which variants have passed.
    """
    rows = []
    for variant in variants:
        worst = min(row.sqnr_db for row in variant.parity)
        drift = variant.certificate.max_drift
        reason = None
        if min_sqnr is not None and worst < min_sqnr:
            reason = f"SQNR {worst:.1f} dB, {min_sqnr:g} wanted"
        elif variant.certificate.kind == "dependent":
            reason = "an answer depends on its neighbours"
        elif drift > request.max_drift:
            reason = f"its neighbours move an output by {drift:.1e}, {request.max_drift:g} allowed"
        rows.append(
            Candidate(
                name=variant.precision,
                us_per_token={speed.tokens: speed.us_per_token for speed in speeds[variant.precision]},
                sqnr_db=worst,
                max_drift=drift,
                refused=reason,
            )
        )
    within = [row for row in rows if row.refused is None]
    if not within:
        raise ExportError("no precision is within the bounds: " + "; ".join(f"{r.name}: {r.refused}" for r in rows))
    best = min(within, key=lambda row: sum(map(math.log, row.us_per_token.values())))
    rows += [Candidate(name=name, refused=reason) for name, reason in refused.items()]
    return Plan(
        target=request.target,
        tokens=list(request.tokens),
        min_sqnr=min_sqnr,
        max_drift=request.max_drift,
        machine=machine(),
        chosen=best.name,
        candidates=rows,
    )


def table(plan: Plan) -> Table:
    """The plan for a terminal: one line for each candidate."""
    sizes = [f"us/token at {tokens:,}" for tokens in plan.tokens]
    made = Table("precision", *sizes, "SQNR", "drift", "", title=f"Plan for {plan.target} on {plan.machine}")
    for row in plan.candidates:
        times = [f"{row.us_per_token[tokens]:.1f}" if tokens in row.us_per_token else "-" for tokens in plan.tokens]
        sqnr = "-" if row.sqnr_db is None else f"{row.sqnr_db:.1f} dB"
        drift = "-" if row.max_drift is None else f"{row.max_drift:.1e}" if row.max_drift else "none"
        verdict = "chosen" if row.name == plan.chosen else row.refused or "slower"
        made.add_row(row.name, *times, sqnr, drift, verdict)
    return made
