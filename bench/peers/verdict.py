"""The goals beside the figures. Pure: measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from bench.peers.contest import OURS, Entry
from bench.timing import Spread

RIVAL: Final = "mosec"


@dataclass(frozen=True, slots=True)
class Goal:
    """The least share of the in-process limit, and the least ratio to mosec's better setting in the same run."""

    share: float
    over_rival: float


GOALS: Final = {
    "1x64": Goal(0.52, 1.1),
    "16x32": Goal(0.88, 1.1),
    "mixed": Goal(0.90, 1.1),
    "128x8": Goal(0.93, 1.05),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One case of one precision: our share in our better setting, and over the rival's in its better one; None where
    the rival was not measured.
    """

    case: str
    precision: str
    setting: str
    share: Spread
    over_rival: float | None
    others: dict[str, Spread]  # shares of every other server and setting, our other one among them
    invalid: int  # entries with errors, ours
    disturbed: int

    @property
    def goal(self) -> Goal:
        return GOALS[self.case]

    @property
    def passes(self) -> bool:
        """Whether both goals are met; without the rival, only the first can be."""
        over = self.over_rival is None or self.over_rival >= self.goal.over_rival
        return not self.invalid and self.share.median >= self.goal.share and over


def lines(entries: Sequence[Entry]) -> list[Line]:
    """The verdicts, in the order of the entries."""
    found = []
    for precision, case in dict.fromkeys((entry.precision, entry.case) for entry in entries):
        here = [entry for entry in entries if (entry.precision, entry.case) == (precision, case)]
        shares = {
            (server, setting): Spread.of([e.share for e in here if (e.server, e.setting) == (server, setting)])
            for server, setting in dict.fromkeys((entry.server, entry.setting) for entry in here)
        }
        (_, setting), share = max((item for item in shares.items() if item[0][0] == OURS), key=_median)
        rivals = [share.median for (server, _), share in shares.items() if server == RIVAL]
        del shares[OURS, setting]
        found.append(
            Line(
                case,
                precision,
                setting,
                share,
                share.median / max(rivals) if rivals and max(rivals) > 0 else None,
                {f"{server} {setting}".strip(): share for (server, setting), share in shares.items()},
                sum(bool(e.load.errors) or not e.load.requests for e in here if e.server == OURS),
                sum(entry.disturbed for entry in here),
            )
        )
    return found


def table(verdicts: Sequence[Line]) -> Table:
    """Medians and extremes, goals beside them."""
    out = Table(title="Share of the in-process limit, medians; goals beside the figures")
    for name in ("case", "precision", OURS, "setting", "min..max", "goal", f"over {RIVAL}", "goal", "others", "notes"):
        out.add_column(name)
    for line in verdicts:
        goal = line.goal
        over = "" if line.over_rival is None else f"{line.over_rival:.2f}"
        notes = [f"INVALID: {line.invalid}"] if line.invalid else []
        notes += [f"disturbed: {line.disturbed}"] if line.disturbed else []
        out.add_row(
            line.case,
            line.precision,
            f"{line.share.median:.3f}",
            line.setting,
            f"{line.share.low:.3f}..{line.share.high:.3f}",
            f">= {goal.share:g} {_verdict(line.share.median >= goal.share)}",
            over,
            f">= {goal.over_rival:g} "
            + ("?" if line.over_rival is None else _verdict(line.over_rival >= goal.over_rival)),
            "; ".join(f"{label} {share.median:.3f}" for label, share in line.others.items()),
            "; ".join(notes),
            style=None if line.passes else "bold red",
        )
    return out


def _verdict(met: bool) -> str:
    return "ok" if met else "MISSED"


def _median(item: tuple[tuple[str, str], Spread]) -> float:
    return item[1].median
