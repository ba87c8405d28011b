"""What came of each request, by kind of client. `wrong`, `lost` and `fives` are the claim; the rest is the summary.

A kind may have a second part behind a colon, for the messages; the summary leaves it out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from bench.chaos.wire import Reply


class Wrong(Exception):
    """An answer that is not the one that was due."""


@dataclass
class Tally:
    """Counts by (kind, outcome), and a line for each fault."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    fives: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the claim holds."""
        return not (self.wrong or self.lost or self.fives)

    @property
    def verdict(self) -> str:
        """The last line of the report."""
        return f"wrong {len(self.wrong)}, lost {len(self.lost)}, 500s {len(self.fives)}"

    def note(self, kind: str, outcome: str) -> None:
        """Count one request."""
        self.outcomes[kind, outcome] += 1

    def add_wrong(self, kind: str, message: str) -> None:
        self.note(kind, "WRONG")
        self.wrong.append(f"{kind}: {message}")

    def add_lost(self, kind: str, message: str) -> None:
        self.note(kind, "LOST")
        self.lost.append(f"{kind}: {message}")

    def see(self, kind: str, reply: Reply) -> None:
        """Every answer passes here before it is judged."""
        if reply.status == 500:
            self.fives.append(f"{kind}: {reply.body[:300]!r}")

    def rows(self) -> list[tuple[str, int, str]]:
        """For each kind: how many requests, and what came of them."""
        kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (kind, outcome), count in self.outcomes.items():
            kinds[kind.partition(":")[0]][outcome] += count
        return [
            (kind, own.total(), ", ".join(f"{outcome} {count}" for outcome, count in own.most_common()))
            for kind, own in sorted(kinds.items())
        ]
