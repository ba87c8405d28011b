"""Which window to choose: the budget and the waiting of a live service swept through its settings, and put back."""

from __future__ import annotations

import json
import statistics
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from bench.loadtest.stage import Measured, run_stage
from bench.loadtest.sweep import Level, Load, Step
from bench.loadtest.target import Target

SETTINGS: Final = ("max_window_tokens", "max_wait_ms")
OPEN_SHARE: Final = 0.7  # of the unswept maximum: the rate at which every setting's latency is compared
NEAR_BEST: Final = 0.95
SETTINGS_S: Final = 30.0


class SettingsError(Exception):
    """The service's settings cannot be read or changed."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting: the closed loop's maximum, and an open loop at a rate that all settings share."""

    max_window_tokens: int
    max_wait_ms: float
    closed: tuple[Measured, ...]
    open_loop: tuple[Measured, ...]

    @property
    def tokens_per_s(self) -> float:
        """The median of the closed loop's."""
        return statistics.median(each.summary.tokens_per_s for each in self.closed)

    @property
    def p99_ms(self) -> float:
        """The median of the open loop's p99; infinite where a round had none, or errors."""
        found = [each.summary for each in self.open_loop]
        return statistics.median(float("inf") if s.latency is None or s.errors else s.latency.p99 for s in found)


@dataclass(frozen=True, slots=True)
class Settings:
    """`/v2/settings` of the service at `url`, with the headers that it asks of an admin."""

    url: str
    headers: tuple[tuple[str, str], ...]

    def read(self) -> dict[str, Any]:
        """All settings."""
        return self._ask(None)

    def change(self, **values: float) -> None:
        """Change these; raises SettingsError with the service's words."""
        self._ask(values)

    @contextmanager
    def kept(self) -> Generator[None, None, None]:
        """Whatever is changed within is put back."""
        before = {name: value for name, value in self.read().items() if name in SETTINGS}
        try:
            yield
        finally:
            self.change(**before)

    def _ask(self, values: dict[str, float] | None) -> dict[str, Any]:
        url = f"{self.url.rstrip('/')}/v2/settings"
        content = None if values is None else json.dumps(values).encode()
        headers = {"Content-Type": "application/json", **dict(self.headers)}
        try:
            request = urllib.request.Request(url, content, headers, method="GET" if values is None else "PATCH")  # noqa: S310
            with urllib.request.urlopen(request, timeout=SETTINGS_S) as answer:  # noqa: S310
                settings: dict[str, Any] = json.loads(answer.read())
                return settings
        except urllib.error.HTTPError as refusal:
            with refusal:
                raise SettingsError(f"{url}: {refusal.code} {refusal.read(500).decode(errors='replace')}") from refusal
        except (OSError, ValueError) as fault:
            raise SettingsError(f"{url}: {fault}") from fault


def sweep_windows(
    target: Target,
    settings: Settings,
    load: Load,
    connections: int,
    grid: Sequence[tuple[int, float]],
    rounds: int,
    step: Step,
) -> list[Point]:
    """Measure every (max_window_tokens, max_wait_ms) of `grid`, in turn, round by round.

    Raises:
        SettingsError: the service lets nobody change its settings, or not to these values.
    """
    closed: list[list[Measured]] = [[] for _ in grid]
    open_loop: list[list[Measured]] = [[] for _ in grid]
    with settings.kept():
        step("the maximum, with the settings as they are")
        most = run_stage(target, load.stage(Level("closed", connections), seed=0)).summary.requests_per_s
        if not most:
            raise SettingsError(f"{target.url}: no request of the closed loop was answered")
        for no in range(rounds):
            for place, (budget, wait) in enumerate(grid):
                step(f"round {no + 1} of {rounds}: {budget} tokens, {wait:g} ms")
                settings.change(max_window_tokens=budget, max_wait_ms=wait)
                closed[place].append(run_stage(target, load.stage(Level("closed", connections), seed=no)))
                open_loop[place].append(run_stage(target, load.stage(Level("open", OPEN_SHARE * most), seed=no)))
    return [
        Point(budget, wait, tuple(closed[place]), tuple(open_loop[place])) for place, (budget, wait) in enumerate(grid)
    ]


def recommend(points: Sequence[Point]) -> Point:
    """Of those within 5 % of the best throughput, the one with the shortest tail; of equals, the smaller window.

    Raises:
        ValueError: there are none.
    """
    best = max(point.tokens_per_s for point in points)
    near = [point for point in points if point.tokens_per_s >= NEAR_BEST * best]
    return min(near, key=lambda point: (point.p99_ms, point.max_window_tokens, point.max_wait_ms))


def batching_gain(points: Sequence[Point]) -> float:
    """The best throughput over that of the smallest window measured."""
    smallest = min(points, key=lambda point: (point.max_window_tokens, point.max_wait_ms))
    return max(point.tokens_per_s for point in points) / smallest.tokens_per_s
