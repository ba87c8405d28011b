"""A stored baseline, and whether a run is worse than it: by ratios, which outlive a machine. Pure but for reading."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.loadtest.document import Document

THROUGHPUT: Final = "tokens/s over the limit"
SAME: Final = ("sizes", "arrivals", "wire", "precision", "trace", "speed")  # else the ratios are of different things


class BaselineError(Exception):
    """The baseline cannot be read, or is of another load."""


@dataclass(frozen=True, slots=True)
class Change:
    """One ratio, then and now; `now` is None where this run does not have it."""

    name: str
    then: float
    now: float | None
    tolerance: float

    @property
    def regressed(self) -> bool:
        """Whether throughput fell, or latency rose, by more than the tolerance; or the figure is gone."""
        if self.now is None:
            return True
        if self.name.endswith(THROUGHPUT):
            return self.now < self.then * (1 - self.tolerance)
        return self.now > self.then * (1 + self.tolerance)

    def __str__(self) -> str:
        now = "gone" if self.now is None else f"{self.now:.3f}"
        return f"{self.name}: {self.then:.3f} then, {now} now (tolerance {self.tolerance:.0%})"


def read_baseline(path: Path) -> Document:
    """A document that an earlier run wrote; raises BaselineError."""
    try:
        found = json.loads(path.read_text())
        if found["schema_version"] != 1 or not found["ratios"]:
            raise BaselineError(f"{path}: no baseline: it has no ratios, or another schema_version than 1")
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise BaselineError(f"{path}: no baseline: {fault!r}") from fault
    document: Document = found
    return document


def compare(baseline: Document, now: Document, throughput: float, latency: float) -> list[Change]:
    """Every ratio of the baseline beside this run's, with its tolerance (0.1: a tenth worse).

    Raises:
        BaselineError: the loads differ in what a ratio depends on.
    """
    for name in SAME:
        then, here = baseline["plan"].get(name), now["plan"].get(name)
        if then != here:
            raise BaselineError(f"the baseline's {name} was {then!r}, this run's is {here!r}: not comparable")
    return [
        Change(name, then, now["ratios"].get(name), throughput if name.endswith(THROUGHPUT) else latency)
        for name, then in baseline["ratios"].items()
    ]
