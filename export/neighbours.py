"""The windows of the certificate: the neighbours that provoke whatever couples rows. Pure numpy; it runs nothing.

Kernels that change with the number of rows, scales over a whole tensor, padding and masks over ragged sequences, NaN
and Inf that spread: each has a setting here. A part is a row, or a sequence with its own memory where the model takes
one; what is loud, bad or long in a neighbour's tokens is so in its memory too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from service.manifest import Kind
from service.packing import Float32
from service.recheck import Part

WINDOWS: Final = (2, 7, 64, 257)  # rows; 257 crosses every tile and leaves one over
_SEQUENCE_WINDOWS: Final = (2, 7, 40)  # sequences
_LARGE: Final = 2048  # tokens of the largest window, about what the service packs
_ROWS: Final = 24  # rows that are followed through all windows
_LENGTHS: Final = (1, 1, 2, 3, 5, 7, 11, 13, 17, 31)  # tokens of the sequences that are followed
_LONGEST: Final = 128
_LARGE_LONGEST: Final = 512  # tokens of one sequence of the largest window
_LOUD: Final = (30, 1000)
_BAD: Final = {"NaN": (np.nan,), "Inf": (np.inf, -np.inf)}

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One kind of window: how many parts (rows or sequences) it has, and who may be in it."""

    name: str
    parts: int
    neighbours: list[Part]
    always: list[Part]  # neighbours that every window has

    def windows(self, probes: Sequence[Part], rng: np.random.Generator) -> Iterator[tuple[list[Part], dict[int, int]]]:
        """Windows that hold each probe once, at a random place: the parts, and probe -> its place among them."""
        group = max(1, min(len(probes), self.parts // 2))
        for start in range(0, len(probes), group):
            members = range(start, min(start + group, len(probes)))
            drawn = np.resize(rng.permutation(len(self.neighbours)), self.parts - len(members) - len(self.always))
            parts = [*(probes[i] for i in members), *self.always, *(self.neighbours[int(i)] for i in drawn)]
            order = rng.permutation(len(parts))
            place = np.argsort(order)
            yield [parts[int(i)] for i in order], {member: int(place[n]) for n, member in enumerate(members)}


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes N(0, 1) parts for one kind of model."""

    kind: Kind
    d_in: int
    d_memory: int | None
    rng: np.random.Generator

    def draw(self, tokens: int, memory: int | None = None) -> Part:
        """A part of `tokens` rows; its memory, if the model takes one, has `memory` rows (None: 1 to 23)."""
        rows = random_rows(self.rng, tokens, self.d_in)
        if self.d_memory is None:
            return Part(rows)
        return Part(rows, random_rows(self.rng, memory or int(self.rng.integers(1, 24)), self.d_memory))

    def probes(self) -> list[Part]:
        """The parts to follow: single rows, or sequences of prime lengths and of one token, and memories likewise."""
        lengths = _LENGTHS if self.kind == "sequence" else (1,) * _ROWS
        return [self.draw(tokens, memory) for tokens, memory in zip(lengths, reversed(lengths), strict=True)]

    def settings(self) -> Iterator[Setting]:
        """Every kind of window that the certificate has a line for."""
        rng, sequences = self.rng, self.kind == "sequence"
        noun = "sequences" if sequences else "rows"
        lengths = rng.integers(1, 24, 64) if sequences else np.ones(WINDOWS[-1], np.int64)
        calm = [self.draw(int(length)) for length in lengths]
        for parts in _SEQUENCE_WINDOWS if sequences else WINDOWS:
            yield Setting(f"among random neighbours, {parts} {noun}", parts, calm, [])
        yield self._large(calm)
        few, crowd = calm[:_ROWS], 40 if sequences else 64
        for factor in _LOUD:
            yield Setting(f"beside {noun} {factor}x larger", crowd, [_louder(part, factor) for part in few], [])
        for name, values in _BAD.items():
            yield Setting(f"beside {noun} with {name}", crowd, _poison(few, values, rng), [])
        if sequences:
            short, long = [self.draw(1, 1) for _ in range(crowd)], self.draw(_LONGEST, _LONGEST)
            yield Setting("one long sequence beside many short", crowd, short, [long])

    def _large(self, calm: list[Part]) -> Setting:
        """One window of `_LARGE` tokens for all the parts that are followed; neighbours repeat."""
        if self.kind == "position-wise":
            return Setting(f"among random neighbours, {_LARGE} rows", _LARGE, calm, [])
        long = self.draw(_LARGE_LONGEST, _LARGE_LONGEST)
        average = sum(len(part.tokens) for part in calm) / len(calm)
        parts = len(_LENGTHS) + 1 + round((_LARGE - _LARGE_LONGEST - sum(_LENGTHS)) / average)
        return Setting(
            f"among random neighbours, about {_LARGE} tokens in sequences of up to {_LARGE_LONGEST}",
            parts,
            calm,
            [long],
        )

    def poisoned(self) -> list[Part]:
        """Parts that each hold a NaN, an Inf or a -Inf."""
        lengths = (1, 2, 3, 5) * 3 if self.kind == "sequence" else (1,) * _ROWS
        values = [value for group in _BAD.values() for value in group]
        return _poison([self.draw(length) for length in lengths], values, self.rng)


def random_rows(rng: np.random.Generator, rows: int, width: int) -> Float32:
    """N(0, 1), float32 (rows, width)."""
    return rng.standard_normal((rows, width), dtype=np.float32)


def poisoned_rows(part: Part) -> Bool:
    """Which tokens of `part` a NaN or Inf reaches at once: their own, or one in the memory they attend to."""
    if part.memory is not None and not np.isfinite(part.memory).all():
        return np.ones(len(part.tokens), np.bool_)
    return np.asarray(~np.isfinite(part.tokens).all(axis=1))


def _louder(part: Part, factor: int) -> Part:
    memory = None if part.memory is None else np.float32(factor) * part.memory
    return Part(np.float32(factor) * part.tokens, memory)


def _poison(parts: Sequence[Part], values: Sequence[float], rng: np.random.Generator) -> list[Part]:
    """Copies of `parts` with one bad element each; every fourth has a whole bad row.

    Of four parts with a memory two have it there: one element and one whole row.
    """
    copies = [Part(part.tokens.copy(), None if part.memory is None else part.memory.copy()) for part in parts]
    for index, part in enumerate(copies):
        rows, whole = part.tokens, index % 4 == 0
        if part.memory is not None and index % 4 >= 2:
            rows, whole = part.memory, index % 4 == 2
        row = int(rng.integers(len(rows)))
        column = slice(None) if whole else int(rng.integers(rows.shape[1]))
        rows[row, column] = values[index % len(values)]
    return copies
