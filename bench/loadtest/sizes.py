"""How many tokens requests have: fixed, uniform, zipf or those of a file; and recorded traces of sizes and arrivals."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.loadtest.arrivals import Times

Tokens = NDArray[np.int64]
FORMS: Final = "16, uniform:1..128, zipf:1.2:512 (exponent and largest), or file:PATH (a number a line)"
TRACE_COLUMNS: Final = ("at_s", "tokens")


N = TypeVar("N", int, float)


class InputFileError(Exception):
    """A file of sizes or a trace that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A distribution over `values`, ascending; `weights` sum to one."""

    text: str
    values: Tokens
    weights: NDArray[np.float64]

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """One of `FORMS`. zipf: rank r has a probability proportional to r^-exponent, and its request r tokens.

        Raises:
            ValueError: it is none of them, or a size is below one.
            InputFileError: the file is missing or has something else in it.
        """
        if text.startswith("file:"):
            return cls._counted(text, read_sizes(Path(text.removeprefix("file:"))))
        if found := re.fullmatch(r"(?:uniform:(\d+)\.\.)?(\d+)", text):
            low, high = int(found[1] or found[2]), int(found[2])
            if not 1 <= low <= high:
                raise ValueError(f"sizes {text!r}: expected {FORMS}")
            return cls._weighted(text, np.arange(low, high + 1), np.ones(high - low + 1))
        if (found := re.fullmatch(r"zipf:(\d+(?:\.\d+)?):(\d+)", text)) and int(found[2]):
            values = np.arange(1, int(found[2]) + 1)
            return cls._weighted(text, values, np.power(values.astype(np.float64), -float(found[1])))
        raise ValueError(f"sizes {text!r}: expected {FORMS}")

    @classmethod
    def _counted(cls, text: str, sizes: Tokens) -> Sizes:
        values, counts = np.unique(sizes, return_counts=True)
        return cls._weighted(text, values, counts.astype(np.float64))

    @classmethod
    def _weighted(cls, text: str, values: Tokens, weights: NDArray[np.float64]) -> Sizes:
        return cls(text, values.astype(np.int64), weights / weights.sum())

    @property
    def mean(self) -> float:
        """Tokens of a request, on average."""
        return float(self.values @ self.weights)

    @property
    def largest(self) -> int:
        """Tokens of the largest request."""
        return int(self.values[-1])

    def draw(self, count: int, seed: int) -> Tokens:
        """(count,) sizes, each drawn on its own."""
        return np.random.default_rng(seed).choice(self.values, count, p=self.weights)


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded arrivals: seconds from the first, ascending, and the tokens of each."""

    times: Times
    tokens: Tokens

    def faster(self, speed: float) -> Trace:
        """The same requests, `speed` times as fast."""
        if speed <= 0:
            raise ValueError(f"speed must be positive, found {speed:g}")
        return Trace(self.times / speed, self.tokens)


def read_sizes(path: Path) -> Tokens:
    """(n,) tokens, a number a line; raises InputFileError, naming the line."""
    sizes = [_number(line, path, no, int) for no, line in enumerate(_text(path).split("\n"), 1) if line.strip()]
    return np.array(_at_least(sizes, 1, path), np.int64)


def read_trace(path: Path) -> Trace:
    """CSV with the columns `at_s` (seconds, from any origin) and `tokens`, others ignored, in any order of lines.

    Raises:
        InputFileError: a column is missing, or a line has something else; the message names it.
    """
    rows = csv.DictReader(_text(path).splitlines())
    missing = set(TRACE_COLUMNS) - set(rows.fieldnames or ())
    if missing:
        raise InputFileError(f"{path}: no column {sorted(missing)[0]!r}; expected {', '.join(TRACE_COLUMNS)}")
    read = [
        (_number(row["at_s"], path, no, float), _number(row["tokens"], path, no, int)) for no, row in enumerate(rows, 2)
    ]
    tokens = _at_least([size for _, size in read], 1, path)
    times = np.array([at for at, _ in read], np.float64)
    order = np.argsort(times, kind="stable")
    return Trace(times[order] - times.min(), np.array(tokens, np.int64)[order])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as fault:
        raise InputFileError(f"{path}: {fault}") from fault


def _number(text: str | None, path: Path, no: int, kind: type[N]) -> N:
    try:
        number = kind(text or "")
    except ValueError:
        raise InputFileError(f"{path}, line {no}: {text!r} is no {kind.__name__}") from None
    if not np.isfinite(number):
        raise InputFileError(f"{path}, line {no}: {text!r} is not finite")
    return number


def _at_least(sizes: list[int], least: int, path: Path) -> list[int]:
    if not sizes or min(sizes) < least:
        raise InputFileError(f"{path}: {'a size below one' if sizes else 'no sizes'}")
    return sizes
