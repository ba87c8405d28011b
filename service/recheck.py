"""The claim of a certificate, tried on a sample: a row alone and the same row in a window give the same bits.

Pure numpy around one callable, so that the service can try it at start and export can build on it. It knows neither
ONNX Runtime nor a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from service.manifest import Kind
from service.memory import Memory
from service.packing import Float32, Int64


class Run(Protocol):
    """A model: tokens (n, d_in), seq_lens (s,) or None, one memory per sequence or None -> out (n, d_out)."""

    def __call__(self, tokens: Float32, seq_lens: Int64 | None, memory: Memory | None = None, /) -> Float32: ...


class Part(NamedTuple):
    """What is followed through windows: a row, or a sequence with its memory where the model takes one."""

    tokens: Float32  # (n, d_in)
    memory: Float32 | None = None  # (m, d_memory)


def run_window(run: Run, kind: Kind, parts: Sequence[Part]) -> list[Float32]:
    """`parts`, each of n_i tokens, packed into one window; their outputs, each (n_i, d_out)."""
    lengths = np.array([len(part.tokens) for part in parts], np.int64)
    memories = [part.memory for part in parts if part.memory is not None]
    memory = Memory(np.concatenate(memories), np.cumsum([len(rows) for rows in memories])) if memories else None
    tokens = np.concatenate([part.tokens for part in parts])
    out = run(tokens, lengths if kind == "sequence" else None, memory)
    return np.split(out, np.cumsum(lengths)[:-1])


def same_bits(left: Float32, right: Float32) -> npt.NDArray[np.bool_]:
    """Elementwise equality of bits, so 0.0 differs from -0.0; every NaN equals every NaN, whatever its payload."""
    equal = left.view(np.uint32) == right.view(np.uint32)
    return np.asarray(equal | (np.isnan(left) & np.isnan(right)))


def difference(alone: Float32, batched: Float32) -> str | None:
    """None if the outputs of one part are the same bits, else the first element that differs, as text."""
    alone, batched = np.ascontiguousarray(alone), np.ascontiguousarray(batched)
    wrong = np.argwhere(~same_bits(alone, batched))
    if not len(wrong):
        return None
    row, column = map(int, wrong[0])
    return f"out[{row}, {column}] is {alone[row, column]!s} alone and {batched[row, column]!s} in the window"


def holds(run: Run, kind: Kind, d_in: int, *, d_memory: int | None = None, rows: int = 16, seed: int = 0) -> str | None:
    """Run `rows` rows (or ragged sequences of as many) alone and in one window with outlier and NaN neighbours.

    With `d_memory` every sequence has a ragged memory, and the neighbours' are outliers and NaN too.

    Returns None if every output is the same bits both times, else the first counter-example as text.
    """
    rng = np.random.default_rng(seed)
    cuts = (
        np.sort(rng.choice(np.arange(1, rows), rows // 4, replace=False)) if kind == "sequence" else np.arange(1, rows)
    )
    tokens = np.split(rng.standard_normal((rows, d_in), dtype=np.float32), cuts)
    loud = Part(1000 * rng.standard_normal((3, d_in), dtype=np.float32))
    broken = Part(np.full((1, d_in), np.nan, np.float32))
    parts = [Part(part) for part in tokens]
    if d_memory is not None:
        lengths = rng.integers(1, rows, len(parts))
        parts = [
            Part(p.tokens, rng.standard_normal((n, d_memory), np.float32)) for p, n in zip(parts, lengths, strict=True)
        ]
        loud = Part(loud.tokens, 1000 * rng.standard_normal((2, d_memory), dtype=np.float32))
        broken = Part(broken.tokens, np.full((5, d_memory), np.nan, np.float32))
    batched = run_window(run, kind, [loud, *parts, broken])[1:-1]
    for index, (part, inside) in enumerate(zip(parts, batched, strict=True)):
        found = difference(run_window(run, kind, [part])[0], inside)
        if found is not None:
            noun = "sequence" if kind == "sequence" else "row"
            return f"{noun} {index} of {len(parts)} ({len(part.tokens)} tokens, seed {seed}): {found}"
    return None
