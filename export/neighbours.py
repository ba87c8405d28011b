"""The windows of the certificate: the neighbours that provoke whatever couples rows. Pure numpy; it runs nothing.

Kernels that change with the number of rows, scales over a whole tensor, padding and masks over ragged sequences, NaN
and Inf that spread: each has a setting here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.manifest import Kind
from service.packing import Float32

WINDOWS: Final = (2, 7, 64, 257)  # rows; 257 crosses every tile and leaves one over
_SEQUENCE_WINDOWS: Final = (2, 7, 40)  # sequences
_LARGE: Final = 2048  # tokens of the largest window, about what the service packs
_ROWS: Final = 24  # rows that are followed through all windows
_LENGTHS: Final = (1, 1, 2, 3, 5, 7, 11, 13, 17, 31)  # tokens of the sequences that are followed
_LONGEST: Final = 128
_LARGE_LONGEST: Final = 512  # tokens of one sequence of the largest window
_LOUD: Final = (30, 1000)
_BAD: Final = {"NaN": (np.nan,), "Inf": (np.inf, -np.inf)}


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One kind of window: how many parts (rows or sequences) it has, and who may be in it."""

    name: str
    parts: int
    neighbours: list[Float32]
    always: list[Float32]  # neighbours that every window has

    def windows(
        self, probes: Sequence[Float32], rng: np.random.Generator
    ) -> Iterator[tuple[list[Float32], dict[int, int]]]:
        """Windows that hold each probe once, at a random place: the parts, and probe -> its place among them."""
        group = max(1, min(len(probes), self.parts // 2))
        for start in range(0, len(probes), group):
            members = range(start, min(start + group, len(probes)))
            drawn = np.resize(rng.permutation(len(self.neighbours)), self.parts - len(members) - len(self.always))
            parts = [*(probes[i] for i in members), *self.always, *(self.neighbours[int(i)] for i in drawn)]
            order = rng.permutation(len(parts))
            place = np.argsort(order)
            yield [parts[int(i)] for i in order], {member: int(place[n]) for n, member in enumerate(members)}


def random_rows(rng: np.random.Generator, rows: int, d_in: int) -> Float32:
    """N(0, 1), float32 (rows, d_in)."""
    return rng.standard_normal((rows, d_in), dtype=np.float32)


def random_probes(kind: Kind, d_in: int, rng: np.random.Generator) -> list[Float32]:
    """The parts to follow: single rows, or sequences of prime lengths and of one token."""
    return [random_rows(rng, length, d_in) for length in (_LENGTHS if kind == "sequence" else (1,) * _ROWS)]


def settings(kind: Kind, d_in: int, rng: np.random.Generator) -> Iterator[Setting]:
    """Every kind of window that the certificate has a line for."""
    noun = "sequences" if kind == "sequence" else "rows"
    lengths = rng.integers(1, 24, 64) if kind == "sequence" else np.ones(WINDOWS[-1], np.int64)
    calm = [random_rows(rng, int(length), d_in) for length in lengths]
    for parts in _SEQUENCE_WINDOWS if kind == "sequence" else WINDOWS:
        yield Setting(f"among random neighbours, {parts} {noun}", parts, calm, [])
    yield _large(kind, calm, rng)
    few, crowd = calm[:_ROWS], 40 if kind == "sequence" else 64
    for factor in _LOUD:
        yield Setting(f"beside {noun} {factor}x larger", crowd, [np.float32(factor) * part for part in few], [])
    for name, values in _BAD.items():
        yield Setting(f"beside {noun} with {name}", crowd, _poison(few, values, rng), [])
    if kind == "sequence":
        short, long = [random_rows(rng, 1, d_in) for _ in range(crowd)], random_rows(rng, _LONGEST, d_in)
        yield Setting("one long sequence beside many short", crowd, short, [long])


def _large(kind: Kind, calm: list[Float32], rng: np.random.Generator) -> Setting:
    """One window of `_LARGE` tokens for all the parts that are followed; neighbours repeat."""
    if kind == "position-wise":
        return Setting(f"among random neighbours, {_LARGE} rows", _LARGE, calm, [])
    long = random_rows(rng, _LARGE_LONGEST, calm[0].shape[1])
    average = sum(map(len, calm)) / len(calm)
    parts = len(_LENGTHS) + 1 + round((_LARGE - _LARGE_LONGEST - sum(_LENGTHS)) / average)
    return Setting(
        f"among random neighbours, about {_LARGE} tokens in sequences of up to {_LARGE_LONGEST}", parts, calm, [long]
    )


def poisoned_parts(kind: Kind, d_in: int, rng: np.random.Generator) -> list[Float32]:
    """Parts that each hold a NaN, an Inf or a -Inf."""
    lengths = (1, 2, 3, 5) * 3 if kind == "sequence" else (1,) * _ROWS
    values = [value for group in _BAD.values() for value in group]
    return _poison([random_rows(rng, length, d_in) for length in lengths], values, rng)


def _poison(parts: Sequence[Float32], values: Sequence[float], rng: np.random.Generator) -> list[Float32]:
    """Copies of `parts` with one bad element each; every fourth has a whole bad row."""
    copies = [part.copy() for part in parts]
    for index, part in enumerate(copies):
        row = int(rng.integers(len(part)))
        column = slice(None) if index % 4 == 0 else int(rng.integers(part.shape[1]))
        part[row, column] = values[index % len(values)]
    return copies
